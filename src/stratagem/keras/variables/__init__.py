"""Keras variables of a strategy: creation, reads, assignments, and placement."""
