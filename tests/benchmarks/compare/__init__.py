"""Comparison of two revisions."""
