"""Secret of a run, and the proof of it on every connection."""
