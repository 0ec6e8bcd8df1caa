"""`Patch`: one replaced attribute of Keras."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

__all__ = ["Patch"]


@dataclasses.dataclass(frozen=True)
class Patch:
    """A replacement of `name` of a class or module of Keras."""

    owner: Any
    name: str
    replace: Callable[[Any], Any]
    reason: str

    def install(self) -> None:
        """Replaces the attribute."""
        setattr(self.owner, self.name, self.replace(getattr(self.owner, self.name, None)))
