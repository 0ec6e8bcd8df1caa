"""Migration from TensorFlow: the `stratagem migrate` command.

Importing it loads neither libcst nor JAX.
"""

__all__: list[str] = []
