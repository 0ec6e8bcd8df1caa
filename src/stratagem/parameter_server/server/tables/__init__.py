"""Tables whose rows are found by 64-bit keys."""
