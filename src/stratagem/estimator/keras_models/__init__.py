"""Conversion of compiled Keras models to Estimators."""
