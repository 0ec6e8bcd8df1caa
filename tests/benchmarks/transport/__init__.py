"""Arrays to another process: figures, table and plot; two real processes with small arrays."""
