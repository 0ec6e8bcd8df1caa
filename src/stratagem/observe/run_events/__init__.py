"""Event logs of a run: starts, steps, saves and failures of every process."""
