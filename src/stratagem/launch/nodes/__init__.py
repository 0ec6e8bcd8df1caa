"""Tasks of one job on several machines."""
