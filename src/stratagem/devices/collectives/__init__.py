"""Algorithms of all-reduce, and their choice."""
