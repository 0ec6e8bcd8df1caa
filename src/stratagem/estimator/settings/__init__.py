"""Run configuration, strategies and cluster task of an Estimator."""
