"""Conversion of compiled Keras models to Estimators."""

__all__ = []
