"""Compressed sums, against NumPy and against what no scheme may lose."""
