"""TensorFlow's alternative spellings of this library's names."""

from stratagem.compat import experimental

__all__ = ["experimental"]
