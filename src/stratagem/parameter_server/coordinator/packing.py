"""Pickling of functions and values between the coordinator and workers: the interface."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

__all__ = ["Packing", "Resource"]


@dataclasses.dataclass(frozen=True)
class Resource:
    """Stands in what is sent for an object that a worker has made and keeps.

    Args:
        number: of the object.
    """

    number: int


class Packing(Protocol):
    """Pickles objects for another process; an executor that schedules and a worker have one."""

    def pack(self, value: Any, strategy: Any) -> bytes:
        """Returns an object as bytes.

        Args:
            value: any object; the strategy and its variables go by their names.
            strategy: of the coordinator, or of the worker.
        """
        ...

    def unpack(self, data: bytes, strategy: Any) -> Any:
        """Returns the object that bytes stand for, with this process's strategy and variables."""
        ...

    def take_built(self, strategy: Any) -> list[tuple[int, list[str]]]:
        """Returns which optimizers a worker has built since it was last asked.

        Returns:
            Of each the number that it came with, and the names of the variables it trains.
        """
        ...

    def collected(self, number: int) -> Any:
        """Returns the coordinator's own variable, of which a worker has counted a part.

        Args:
            number: that it was sent with.

        Returns:
            The variable; None if nobody uses it any more.
        """
        ...

    def build(self, number: int, names: list[str], strategy: Any) -> None:
        """Builds the coordinator's own optimizer as a worker has built its copy."""
        ...
