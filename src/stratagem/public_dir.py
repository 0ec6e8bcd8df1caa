"""`dir` of public objects: what completion offers in a notebook."""

from __future__ import annotations


class PublicDir:
    """Base of classes whose `dir` lists public names only; other names can still be read."""

    __slots__ = ()

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not name.startswith("_")]
