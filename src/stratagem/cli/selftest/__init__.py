"""Self-test of an installation: every strategy, compared with NumPy."""
