"""Migration: names of other libraries with their counterparts, and a tool that rewrites programs.

Importing it loads neither libcst nor JAX.
"""

from stratagem.migrate.symbols import STATUSES, Symbol, load_symbols

__all__ = ["STATUSES", "Symbol", "load_symbols"]
