"""Migration table: names of other libraries and their counterparts here.

Nothing here loads JAX, Keras or TensorFlow.
"""

from stratagem.migrate.symbols import STATUSES, Symbol, load_symbols

__all__ = ["STATUSES", "Symbol", "load_symbols"]
