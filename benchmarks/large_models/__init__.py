"""Training steps of large decoders, compiled for machines that are not here."""
