"""Variables on parameter servers, as one process reads and changes them."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from stratagem.messages import explain
from stratagem.optional_libraries import load
from stratagem.servers.connection import Connections
from stratagem.servers.placement import Placement
from stratagem.servers.rows import combine_rows, parts_of_shards
from stratagem.servers.store import ShardSpec
from stratagem.servers.updates import UpdateRule
from stratagem.servers.wire import Message

__all__ = ["ServedVariables"]


class ServedVariables:
    """Reads and changes variables by name, wherever their rows are. Any thread may call it.

    Args:
        connections: to the servers.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._placements: dict[str, Placement] = {}
        self._local = threading.local()
        self._numbers = itertools.count(1)
        self._pickle: Any = load(
            "cloudpickle", needed_by="a client of parameter servers", install="stratagem[ray]"
        )

    def know(self, placement: Placement) -> None:
        """Notes where a variable is that another process has made.

        Args:
            placement: where it is.
        """
        self._placements[placement.name] = placement

    def create(
        self, placement: Placement, initial: np.ndarray | Callable[[int, int], np.ndarray]
    ) -> bool:
        """Makes a variable, unless the servers have it: they outlive a client.

        Args:
            placement: where it is to be.
            initial: its value; or a function of the first row and the number of rows that returns
                so much of it, called on the servers, for what is too large for one process.

        Returns:
            Whether it was made.

        Raises:
            ValueError: the servers have one of that name that is something else.
        """
        self.know(placement)
        is_pickled = callable(initial)
        if is_pickled:
            pickled = np.frombuffer(self._pickle.dumps(initial), np.uint8)
            values = [pickled] * len(placement.rows)
        else:
            values = placement.parts(np.asarray(initial, np.dtype(placement.dtype)))
        are_new = []
        for shard, value in enumerate(values):
            spec = ShardSpec(
                _shard_name(placement, shard),
                placement.shape_of(shard),
                placement.dtype,
                placement.first_rows[shard],
                placement.has_rows,
            )
            fields = {"spec": dataclasses.asdict(spec), "is_pickled": is_pickled}
            answer = self._connections.ask(
                placement.servers[shard], Message("create", fields, [value])
            )
            are_new.append(bool(answer.fields["is_new"]))
        return any(are_new)

    def pull(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Returns whole variables.

        Args:
            names: theirs; "name:slot" is a slot of the optimizer.

        Returns:
            Arrays by name, which must not be changed.
        """
        wanted: dict[int, list[tuple[str, int, str]]] = defaultdict(list)
        for name in names:
            placement, slot = self._find(name)
            for shard, server in enumerate(placement.servers):
                wanted[server].append((name, shard, _shard_name(placement, shard) + slot))
        answers = self._connections.ask_all(
            {
                server: Message("pull", {"names": [shard_name for _, _, shard_name in parts]})
                for server, parts in wanted.items()
            }
        )
        shards: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
        for server, parts in wanted.items():
            self._note_version(server, answers[server])
            for (name, shard, _), array in zip(parts, answers[server].arrays, strict=True):
                shards[name][shard] = array
        return {name: _joined(shards[name]) for name in names}

    def pull_rows(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Returns rows of a variable; each is sent once, however often it is asked for.

        Args:
            name: of the variable, or of a slot.
            ids: integers of any shape.

        Returns:
            Array of shape (*ids.shape, ...).

        Raises:
            IndexError: an id that the variable does not have.
        """
        placement, slot = self._find(name)
        unique, places = np.unique(ids, return_inverse=True)
        _require_ids(placement, unique)
        parts = _parts(placement, unique)
        answers = self._ask_shards(
            {
                shard: Message(
                    "pull_rows",
                    {"names": [_shard_name(placement, shard) + slot]},
                    [unique[part] - placement.first_rows[shard]],
                )
                for shard, part in parts.items()
            },
            placement,
        )
        row_shape = placement.shape[1:]
        rows = [answers[shard].arrays[0] for shard in parts]
        joined = np.concatenate(rows) if rows else np.empty((0, *row_shape), placement.dtype)
        return joined[places.reshape(-1)].reshape(*np.shape(ids), *row_shape)

    def assign(self, name: str, value: np.ndarray, *, sign: int = 0) -> None:
        """Sets a variable, or changes it.

        Args:
            name: its name, or that of a slot.
            value: of its shape.
            sign: 0 sets it; 1 adds the value, -1 subtracts it.
        """
        placement, slot = self._find(name)
        self._ask_shards(
            {
                shard: Message(
                    "assign",
                    {"names": [_shard_name(placement, shard) + slot], "sign": sign},
                    [part],
                )
                for shard, part in enumerate(placement.parts(np.asarray(value)))
            },
            placement,
        )

    def scatter(self, name: str, ids: np.ndarray, values: np.ndarray, *, sign: int = 0) -> None:
        """Sets rows of a variable, or changes them.

        Args:
            name: its name, or that of a slot.
            ids: of shape (k,); rows that come more than once are added up, or must be the same.
            values: of shape (k, ...).
            sign: 0 sets them; 1 adds the values, -1 subtracts them.

        Raises:
            IndexError: an id that the variable does not have.
        """
        placement, slot = self._find(name)
        if sign:
            ids, values = combine_rows(np.asarray(ids), np.asarray(values))
        else:
            ids, last = np.unique(np.asarray(ids)[::-1], return_index=True)
            values = np.asarray(values)[::-1][last]
        _require_ids(placement, ids)
        self._ask_shards(
            {
                shard: Message(
                    "scatter",
                    {"name": _shard_name(placement, shard) + slot, "sign": sign},
                    [ids[part] - placement.first_rows[shard], values[part]],
                )
                for shard, part in _parts(placement, ids).items()
            },
            placement,
        )

    def set_rule(self, rule: UpdateRule, names: Sequence[str]) -> None:
        """Gives all servers the optimizer of these variables.

        Args:
            rule: the optimizer's.
            names: of the variables that it trains.
        """
        pickled = np.frombuffer(self._pickle.dumps(rule), np.uint8)
        shards: dict[int, list[str]] = {server: [] for server in range(len(self._connections))}
        for name in names:
            placement = self._placements[name]
            for shard, server in enumerate(placement.servers):
                shards[server].append(_shard_name(placement, shard))
        self._connections.ask_all(
            {server: Message("rule", {"names": held}, [pickled]) for server, held in shards.items()}
        )

    def push(
        self,
        whole: Mapping[str, np.ndarray],
        rows: Mapping[str, tuple[np.ndarray, np.ndarray]] | None = None,
    ) -> None:
        """Sends gradients, which the servers apply at once.

        Args:
            whole: of variables, by name.
            rows: of single rows: ids of shape (k,), in any order, repeated or not, and gradients of
                shape (k, ...), by name of the variable.

        Raises:
            IndexError: an id that a variable does not have.
        """
        pushes: dict[int, _Push] = defaultdict(_Push)
        for name, gradient in whole.items():
            placement = self._placements[name]
            for shard, part in enumerate(placement.parts(np.asarray(gradient))):
                pushes[placement.servers[shard]].add(_shard_name(placement, shard), part)
        for name, (ids, values) in (rows or {}).items():
            placement = self._placements[name]
            numbers, sums = combine_rows(np.asarray(ids), np.asarray(values))
            _require_ids(placement, numbers)
            for shard, part in _parts(placement, numbers).items():
                pushes[placement.servers[shard]].add_rows(
                    _shard_name(placement, shard),
                    numbers[part] - placement.first_rows[shard],
                    sums[part],
                )
        client, number, versions = self._identity()
        answers = self._connections.ask_all(
            {
                server: push.message(client, number, versions.get(server, 0))
                for server, push in pushes.items()
            }
        )
        for server, answer in answers.items():
            self._note_version(server, answer)

    def scalars(self, server: int = 0) -> dict[str, np.ndarray]:
        """Returns what an optimizer keeps once, as one server has it.

        Args:
            server: its index.
        """
        answer = self._connections.ask(server, Message("scalars"))
        return dict(zip(answer.fields["names"], answer.arrays, strict=True))

    def set_scalar(self, name: str, value: np.ndarray) -> None:
        """Sets one of the numbers that an optimizer keeps once, on all servers.

        Args:
            name: its name.
            value: its value.
        """
        message = Message("set_scalar", {"name": name}, [np.asarray(value)])
        servers = range(len(self._connections))
        self._connections.ask_all(dict.fromkeys(servers, message))

    def staleness(self) -> dict[int, int]:
        """Returns how many updates a server had made since a gradient's values were read.

        Returns:
            Of each such number, how many pushes there were, over all servers.
        """
        counts: dict[int, int] = defaultdict(int)
        servers = range(len(self._connections))
        for answer in self._connections.ask_all(
            dict.fromkeys(servers, Message("describe"))
        ).values():
            for behind, count in answer.fields["staleness"]:
                counts[behind] += count
        return dict(sorted(counts.items()))

    def _find(self, name: str) -> tuple[Placement, str]:
        if name in self._placements:
            return self._placements[name], ""
        variable, colon, slot = name.rpartition(":")
        return self._placements[variable], colon + slot

    def _ask_shards(
        self, messages: Mapping[int, Message], placement: Placement
    ) -> dict[int, Message]:
        """Asks for shards; several may be on one server, which is then asked several times."""
        answers: dict[int, Message] = {}
        remaining = dict(messages)
        while remaining:
            batch: dict[int, int] = {}
            for shard in remaining:
                batch.setdefault(placement.servers[shard], shard)
            got = self._connections.ask_all(
                {server: remaining.pop(shard) for server, shard in batch.items()}
            )
            answers.update({batch[server]: answer for server, answer in got.items()})
        return answers

    def _identity(self) -> tuple[str, int, dict[int, int]]:
        """Each thread is a client of its own, which has one push at a time."""
        client = getattr(self._local, "client", None)
        if client is None:
            client = self._local.client = uuid.uuid4().hex
        return client, next(self._numbers), self._versions()

    def _versions(self) -> dict[int, int]:
        versions = getattr(self._local, "versions", None)
        if versions is None:
            versions = self._local.versions = {}
        return versions

    def _note_version(self, server: int, answer: Message) -> None:
        self._versions()[server] = answer.fields["version"]


class _Push:
    """What one server is sent."""

    def __init__(self) -> None:
        self._whole: dict[str, np.ndarray] = {}
        self._rows: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def add(self, name: str, gradient: np.ndarray) -> None:
        self._whole[name] = gradient

    def add_rows(self, name: str, numbers: np.ndarray, values: np.ndarray) -> None:
        self._rows[name] = (numbers, values)

    def message(self, client: str, number: int, version: int) -> Message:
        fields = {
            "client": client,
            "number": number,
            "version": version,
            "whole": list(self._whole),
            "rows": list(self._rows),
        }
        of_rows = [array for pair in self._rows.values() for array in pair]
        return Message("push", fields, [*self._whole.values(), *of_rows])


def _shard_name(placement: Placement, shard: int) -> str:
    return placement.name if len(placement.rows) == 1 else f"{placement.name}/part_{shard}"


def _joined(shards: Mapping[int, np.ndarray]) -> np.ndarray:
    if len(shards) == 1:
        return shards[0]
    return np.concatenate([shards[shard] for shard in range(len(shards))])


def _parts(placement: Placement, ids: np.ndarray) -> dict[int, slice]:
    """The ids of each shard that has any."""
    parts = enumerate(parts_of_shards(ids, placement.rows))
    return {shard: part for shard, part in parts if part.stop > part.start}


def _require_ids(placement: Placement, ids: np.ndarray) -> None:
    num_rows = placement.shape[0] if placement.shape else 0
    if len(ids) and (int(ids[0]) < 0 or int(ids[-1]) >= num_rows):
        raise IndexError(
            explain(
                f"Ids {int(ids[0])} to {int(ids[-1])} were looked up in {placement.name!r}.",
                expected=f"0 to {num_rows - 1}.",
                fix="make the table larger, or map ids into it, such as by a hash modulo its size.",
            )
        )
