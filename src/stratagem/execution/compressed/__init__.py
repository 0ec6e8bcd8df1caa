"""Sums of gradients in a lossy form, with the error kept for the next step."""
