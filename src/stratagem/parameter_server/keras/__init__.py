"""Keras on parameter servers: variables, optimizers, `fit`, and pickling."""

__all__: list[str] = []
