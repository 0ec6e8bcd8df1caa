"""Keras on parameter servers: variables, optimizers, `fit`, and pickling."""
