"""How functions and values travel between the coordinator and workers.

`stratagem.keras` fills the slot, because most of what is sent refers to models.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any, Protocol

from stratagem.servers import ClusterKeys

__all__ = ["Packing", "Resource", "packing", "set_packing"]


@dataclasses.dataclass(frozen=True)
class Resource:
    """Stands in what is sent for an object that a worker has made and keeps.

    Args:
        number: of the object.
    """

    number: int


class Packing(Protocol):
    """Turns objects into bytes for another process, and back; and starts such a process."""

    def serve_server(
        self, index: int, keys: ClusterKeys, journal_dir: str, journal_interval_s: float
    ) -> Any:
        """Starts a parameter server in this process.

        Args:
            index: of the server.
            keys: of the cluster.
            journal_dir: the folder of its journal.
            journal_interval_s: how long to wait after each entry.

        Returns:
            What has an address.
        """
        ...

    def serve_worker(self, index: int, keys: ClusterKeys) -> Any:
        """Starts a worker in this process.

        Args:
            index: of the worker.
            keys: of the cluster.

        Returns:
            What has an address.
        """
        ...

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


class _Slot:
    packing: Packing | None = None


def set_packing(new: Packing) -> None:
    """Fills the slot.

    Args:
        new: what packs from now on.
    """
    _Slot.packing = new


def packing() -> Packing:
    """Returns what packs."""
    if _Slot.packing is None:  # whoever imports this room alone has not loaded it yet
        importlib.import_module("stratagem.keras")
    assert _Slot.packing is not None
    return _Slot.packing
