"""Spellings that come from elsewhere: tables of names."""

from stratagem.compat import experimental

__all__ = ["experimental"]
