"""Sums between processes: figures, table and plot; two real processes with the smallest arrays."""
