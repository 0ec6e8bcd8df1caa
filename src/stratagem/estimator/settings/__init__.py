"""Run configuration, strategies and cluster task of an Estimator."""

__all__ = []
