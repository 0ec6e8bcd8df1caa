"""Hooks: code that runs on the host between an Estimator's steps."""
