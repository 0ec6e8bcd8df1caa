"""`Patch`: one replaced attribute of Keras."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Patch:
    """A replacement of `name` of a class or module of Keras."""

    owner: Any
    name: str
    replace: Callable[[Any], Any]
    reason: str
    is_addition: bool = False  # Keras has no such attribute

    @property
    def is_lost(self) -> bool:
        """True if this Keras lacks the attribute."""
        return not self.is_addition and not hasattr(self.owner, self.name)

    @property
    def full_name(self) -> str:
        """The owner's name and the attribute's."""
        return f"{self.owner.__name__}.{self.name}"

    def install(self) -> None:
        """Replaces the attribute."""
        setattr(self.owner, self.name, self.replace(getattr(self.owner, self.name, None)))
