"""Interface for pickling between the coordinator and workers."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from stratagem.strategies.base.strategy import Strategy


@dataclasses.dataclass(frozen=True)
class Resource:
    """Reference, by number, to an object that each worker creates and stores."""

    number: int


class Packing(Protocol):
    """Pickles objects for another process. The coordinator's executor and each worker have one."""

    def pack(self, value: object, strategy: Strategy) -> bytes:
        """Pickles an object, with references to the strategy and its variables by name."""
        ...

    def unpack(self, data: bytes | memoryview, strategy: Strategy) -> Any:
        """Unpickles an object, with this process's strategy and variables."""
        ...

    def take_built(self, strategy: Strategy) -> list[tuple[int, list[str]]]:
        """Returns the optimizers that a worker has built since the last call.

        Each is a pair of the optimizer's number and the names of the variables that it trains.
        """
        ...

    def collected(self, number: int) -> Any:
        """Returns the coordinator's variable for a worker's metric count; None if it is unused."""
        ...

    def build(self, number: int, names: list[str], strategy: Strategy) -> None:
        """Builds the coordinator's copy of an optimizer that a worker has built."""
        ...
