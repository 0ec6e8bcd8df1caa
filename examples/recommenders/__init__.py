"""Recommenders that are trained on generated data, to a stated part of the best possible."""
