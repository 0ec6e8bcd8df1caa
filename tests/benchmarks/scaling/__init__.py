"""Scaling: the formula against values by hand, and what two pinned workers are."""
