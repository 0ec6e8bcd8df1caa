"""Partitioning of requests over servers: one message to each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from stratagem.messages import explain
from stratagem.parameter_server.client.shard_layout import ShardLayout
from stratagem.parameter_server.server.rows import parts_of_shards
from stratagem.parameter_server.transport.wire import Message

__all__ = ["GradientParts", "RequestParts", "WholeVariables", "row_parts", "shard_name"]


class WholeVariables:
    """Whole variables that are asked for."""

    def __init__(self) -> None:
        self._parts: dict[int, list[tuple[str, int, str]]] = defaultdict(list)

    @property
    def servers(self) -> list[int]:
        """The servers with parts of these variables."""
        return list(self._parts)

    def add(self, name: str, placement: ShardLayout, slot: str = "") -> None:
        """Asks for one more.

        Args:
            name: by which it is known afterwards.
            placement: where it is.
            slot: "" for its value, ":slot" for a slot.
        """
        for shard, server in enumerate(placement.servers):
            self._parts[server].append((name, shard, shard_name(placement, shard) + slot))

    def names(self, server: int) -> list[str]:
        """Returns the names that a server is asked for."""
        return [name for _, _, name in self._parts.get(server, ())]

    def variables(self, server: int) -> list[str]:
        """Returns the names, as they were added, of what a server holds some of."""
        return [name for name, _, _ in self._parts.get(server, ())]

    def joined(self, answers: Mapping[int, Sequence[np.ndarray]]) -> dict[str, np.ndarray]:
        """Puts variables together.

        Args:
            answers: what each server has sent for its names.

        Returns:
            Whole variables, by name.
        """
        shards: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
        for server, parts in self._parts.items():
            for (name, shard, _), array in zip(parts, answers[server], strict=True):
                shards[name][shard] = array
        return {name: _joined(own) for name, own in shards.items()}


class RequestParts:
    """Arrays for shards, by the server that holds these."""

    def __init__(self) -> None:
        self._names: dict[int, list[str]] = defaultdict(list)
        self._arrays: dict[int, list[np.ndarray]] = defaultdict(list)

    def add(self, server: int, name: str, *arrays: np.ndarray) -> None:
        """Adds what is for one shard.

        Args:
            server: which holds it.
            name: its name.
            arrays: the same number for each.
        """
        self._names[server].append(name)
        self._arrays[server] += arrays

    def messages(self, kind: str, **fields: Any) -> dict[int, Message]:
        """Returns a message to each server.

        Args:
            kind: what is asked.
            fields: of all messages; `names` is added.
        """
        return {
            server: Message(kind, {**fields, "names": names}, self._arrays[server])
            for server, names in self._names.items()
        }


class GradientParts:
    """Gradients for one server."""

    def __init__(self) -> None:
        self.variables: list[str] = []
        self._whole: dict[str, np.ndarray] = {}
        self._rows: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._optimizers: dict[str, str] = {}

    def add(self, placement: ShardLayout, shard: int, optimizer: str, gradient: np.ndarray) -> None:
        """Adds the gradient of a shard."""
        self._whole[self._noted(placement, shard, optimizer)] = gradient

    def add_rows(
        self,
        placement: ShardLayout,
        shard: int,
        optimizer: str,
        ids: np.ndarray,
        values: np.ndarray,
    ) -> None:
        """Adds gradients of rows of a shard, which may be none."""
        numbers = ids - placement.first_rows[shard]
        self._rows[self._noted(placement, shard, optimizer)] = (numbers, values)

    def _noted(self, placement: ShardLayout, shard: int, optimizer: str) -> str:
        self.variables.append(placement.name)
        name = shard_name(placement, shard)
        if optimizer:
            self._optimizers[name] = optimizer
        return name

    def message(self, **fields: Any) -> Message:
        """Returns the push.

        Args:
            fields: beside those that say what the arrays are.
        """
        told = {**fields, "whole": list(self._whole), "rows": list(self._rows)}
        told["optimizers"] = self._optimizers
        of_rows = [array for pair in self._rows.values() for array in pair]
        return Message("push", told, [*self._whole.values(), *of_rows])


def shard_name(placement: ShardLayout, shard: int) -> str:
    """Returns the name of a shard on its server."""
    return placement.name_of(shard)


def row_parts(placement: ShardLayout, ids: np.ndarray) -> Iterable[tuple[int, slice]]:
    """Returns each shard of a variable, and which ids are its own.

    Args:
        placement: of the variable.
        ids: in their order, each once.

    Returns:
        Pairs in the order of the shards; also of shards without any.

    Raises:
        IndexError: an id that the variable does not have.
    """
    num_rows = placement.shape[0] if placement.shape else 0
    if len(ids) and (int(ids[0]) < 0 or int(ids[-1]) >= num_rows):
        raise IndexError(
            explain(
                f"Ids {int(ids[0])} to {int(ids[-1])} were looked up in {placement.name!r}.",
                expected=f"0 to {num_rows - 1}.",
                fix="make the table larger, or map ids into it, such as by a hash modulo its size.",
            )
        )
    return enumerate(parts_of_shards(ids, placement.rows))


def _joined(shards: Mapping[int, np.ndarray]) -> np.ndarray:
    if len(shards) == 1:
        return shards[0]
    return np.concatenate([shards[shard] for shard in range(len(shards))])
