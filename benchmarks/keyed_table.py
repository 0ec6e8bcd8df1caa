"""A keyed table of a server, by messages alone: what clients cost is measured elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cloudpickle
import numpy as np

from stratagem.group.transport.connection import Connections
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.server.shards import Slot, State
from stratagem.parameter_server.server.tables.row_formats import RowFormat

__all__ = ["KeyedTable"]


class _Descent:
    """Subtracts gradients."""

    def describe(self) -> dict[str, Any]:
        return {"name": "descent"}

    def scalars(self) -> dict[str, np.ndarray]:
        return {}

    def slots(self, name: str, shape: tuple[int, ...], dtype: str) -> list[Slot]:
        return []

    def apply(self, state: State, grads: Mapping[str, np.ndarray]) -> State:
        values = {name: state.values[name] - one for name, one in grads.items()}
        return State({}, values, {name: {} for name in grads})


class KeyedTable:
    """Sends messages about the table, and numbers its changes."""

    def __init__(
        self, connections: Connections, width: int, storage_dtype: str | None = None
    ) -> None:
        self._format = RowFormat((width,), "float32", storage_dtype)
        self._connections = connections
        self._width = width
        self._number = 0

    def ask(self, kind: str, fields: dict[str, Any], *arrays: np.ndarray) -> Message:
        self._number += 1
        own = {"client": "c", "number": self._number, "version": 0}
        return self._connections.ask(0, Message(kind, {**own, **fields}, arrays))

    def create(self, tiers: dict[str, Any] | None = None, rule: object = None) -> None:
        table: dict[str, Any] = {"initializer": {"kind": "constant"}, "tiers": tiers}
        table["storage_dtype"] = self._format.storage_dtype
        shape = [0, self._width]
        spec = {"name": "t", "shape": shape, "dtype": "float32", "has_rows": True, "table": table}
        self.ask("create", {"specs": [spec], "is_pickled": False})
        pickled = np.frombuffer(cloudpickle.dumps(rule or _Descent()), np.uint8)
        self.ask("rule", {"names": ["t"], "mode": None, "optimizer": ""}, pickled)

    def pull(self, keys: np.ndarray) -> np.ndarray:
        return self._format.expanded(self.ask("pull_rows", {"names": ["t"]}, keys).arrays[0])

    def push(self, keys: np.ndarray) -> None:
        ones = np.ones((len(keys), self._width), np.float32)
        self.ask("push", {"whole": [], "rows": ["t"]}, keys, ones)

    @property
    def table(self) -> dict[str, int]:
        return self.ask("describe", {}).fields["tables"]["t"]
