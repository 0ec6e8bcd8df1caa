"""Interface of pickling between the coordinator and workers."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

__all__ = ["Packing", "Resource"]


@dataclasses.dataclass(frozen=True)
class Resource:
    """Reference to an object that each worker creates and keeps, by its number."""

    number: int


class Packing(Protocol):
    """Pickles objects for another process. The coordinator's executor and each worker have one."""

    def pack(self, value: Any, strategy: Any) -> bytes:
        """Returns an object as bytes, with the strategy and its variables by name."""
        ...

    def unpack(self, data: bytes, strategy: Any) -> Any:
        """Returns the object of `pack`'s bytes, with this process's strategy and variables."""
        ...

    def take_built(self, strategy: Any) -> list[tuple[int, list[str]]]:
        """Returns the optimizers that a worker has built since the last call.

        Each is a pair of its number and the names of the variables that it trains.
        """
        ...

    def collected(self, number: int) -> Any:
        """Returns the coordinator's variable of a worker's count; None if it is unused by now."""
        ...

    def build(self, number: int, names: list[str], strategy: Any) -> None:
        """Builds the coordinator's optimizer as a worker has built its copy."""
        ...
