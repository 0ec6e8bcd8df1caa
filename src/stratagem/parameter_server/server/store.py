"""Variables of one server: whole values, shards of tables, and their optimizer slots."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from stratagem.errors import invalid
from stratagem.parameter_server.server.shards import (
    SavedPart,
    Shard,
    ShardSpec,
    State,
    UpdatedPart,
    UpdateRule,
    is_stored_by,
    own_name,
    padded_size,
    stored_name,
)
from stratagem.parameter_server.server.tables.disk_rows import Position
from stratagem.parameter_server.server.tables.keyed_shard import KeyedShard
from stratagem.parameter_server.server.tables.tiered_shard import TieredShard, Tiers

# Shards of new variables: whole values, and tables by row number or by key.


def made_shard(
    spec: ShardSpec,
    make: Callable[[], np.ndarray] | None,
    tiers: Tiers,
    *,
    is_own: bool,
    position: Position | None = None,
) -> Shard:
    """Creates a shard with its initial value; one with rows on disk is added to `tiers`.

    `position` is the end of its journal, if any. `is_own` avoids a copy of the value.

    Raises ValueError for a value of another shape.
    """
    if spec.table is not None and spec.table.get("tiers") is not None:
        tiered = TieredShard(spec, position)
        tiers.add(tiered)
        return tiered
    if spec.table is not None:
        return KeyedShard(spec)
    assert make is not None
    value = np.array(make(), np.dtype(spec.dtype), copy=None if is_own else True)
    if value.shape != spec.shape:
        raise invalid(
            f"The initial value of {spec.name!r} has shape {value.shape}.",
            expected=f"shape {spec.shape}.",
            fix="make the initializer use its `shape` argument.",
        )
    return Shard(spec, value)


@dataclasses.dataclass(frozen=True)
class _Optimizer:
    """An optimizer, described as a journal returns it, and its scalars by its own names.

    A journal never has the code of one: after a restart `rule` is None until a client sends it.
    """

    description: Any
    scalars: Mapping[str, np.ndarray]
    rule: UpdateRule | None = None


Marks = Mapping[str, Any]  # changed rows, by shard name


def _shapes(
    whole: Iterable[str], counts: Mapping[str, int], optimizers: Mapping[str, str]
) -> set[tuple[Any, ...]]:
    """Returns a key for the program of all whole variables, and one for that of each table."""
    rows = {(name, optimizers.get(name, ""), padded_size(one)) for name, one in counts.items()}
    return {tuple((name, optimizers.get(name, "")) for name in whole), *rows}


class ServerVariables:
    """Thread-safe store of a server's variables, optimizers and slots.

    `version` counts updates. `num_changes` counts every change that belongs in a journal.
    `num_refused` row gradients of the last update were dropped: their keys have no row. The name of
    a slot is "variable:slot". Rows of keyed tables are given by key, and others by number.
    """

    def __init__(self) -> None:
        self._shards: dict[str, Shard] = {}
        self._reading = threading.Lock()
        self._optimizers: dict[str, _Optimizer] = {}
        self._updating = threading.RLock()
        self._updated_shapes: set[tuple[Any, ...]] = set()
        self.version = 0
        self.num_changes = self.num_refused = 0
        self.tiers = Tiers(self.changing)

    @property
    def names(self) -> list[str]:
        """Names of all variables."""
        with self._reading:
            return list(self._shards)

    @property
    def size_bytes(self) -> int:
        """Size of all variables and slots, in bytes."""
        with self._reading:
            return sum(shard.size_bytes for shard in self._shards.values())

    @property
    def marked_bytes(self) -> int:
        """Size of the table rows that changed since the last journal entry, in bytes."""
        with self._reading:
            return sum(shard.marked_bytes for shard in self._shards.values())

    @property
    def keyed_shards(self) -> dict[str, KeyedShard]:
        """Keyed tables, by name."""
        with self._reading:
            shards = list(self._shards.values())
        return {one.spec.name: one for one in shards if isinstance(one, KeyedShard)}

    @property
    def tables(self) -> dict[str, dict[str, int]]:
        """Sizes and counters of keyed tables, by name."""
        return {name: shard.described() for name, shard in self.keyed_shards.items()}

    def replace_table(self, table: KeyedShard) -> None:
        """Replaces the keyed table with the same spec. Call within `changing`."""
        with self._reading:
            self._shards[table.spec.name] = table

    def changing(self) -> AbstractContextManager[Any]:
        """Returns a context that blocks changes by other threads, but not reads. Reentrant."""
        return self._updating

    def create(
        self, spec: ShardSpec, make: Callable[[], np.ndarray] | None = None, *, is_own: bool = False
    ) -> bool:
        """Creates a variable, and returns False if it already exists, as after a client restart.

        `make` is called only if needed; None for a keyed table, which begins empty. Pass `is_own`
        if it returns an array with no other references: a copy is then avoided, because two copies
        of a table may not fit in memory.

        Raises:
            ValueError: the name is taken by a different spec, or the initial value has a wrong
                shape.
        """
        with self._updating:
            shard = self._shards.get(spec.name)
            if shard is None:
                shard = made_shard(spec, make, self.tiers, is_own=is_own)
                with self._reading:
                    self._shards[spec.name] = shard
                self.num_changes += 1
                return True
        if shard.spec != spec:
            raise invalid(
                f"Variable {spec.name!r} was created as {spec}, but it already exists.",
                expected=f"the spec that this server stores: {shard.spec}.",
                fix="rename the variable, or restart the servers with empty journals.",
                code="SG610",
            )
        return False

    def pull(self, names: Sequence[str]) -> list[np.ndarray]:
        """Returns read-only whole variables or slots, consistent between two updates."""
        return self.read(names)[1]

    def read(self, names: Sequence[str]) -> tuple[int, list[np.ndarray]]:
        """Returns the version, and read-only whole variables or slots at that version.

        Rows of a table may be newer than the version.
        """
        with self._reading:
            version = self.version
            found = [self._find(name) for name in names]
            values = [shard.array(slot) for shard, slot in found]
        return version, [
            shard.copied(value) if shard.spec.has_rows else np.asarray(value)
            for (shard, _), value in zip(found, values, strict=True)
        ]

    def pull_rows(self, name: str, rows: np.ndarray, *, are_expanded: bool = True) -> np.ndarray:
        """Returns rows of a variable or slot, by row number within this shard, or by key.

        Without `are_expanded`, rows of a keyed table have its `RowFormat`.
        """
        with self._reading:
            shard, slot = self._find(name)
        shard.require(rows)
        pulled = shard.pulled(slot, rows)
        return shard.expanded(slot, pulled) if are_expanded else pulled

    def assign(self, name: str, value: np.ndarray, *, sign: int = 0) -> None:
        """Assigns a whole variable or slot (`sign=0`), or adds `sign * value` to it."""
        with self._updating:
            with self._reading:
                shard, slot = self._find(name)
            if value.shape != shard.spec.shape:
                raise ValueError(f"{name!r} was assigned a value of shape {value.shape}")
            if shard.spec.table is not None:  # without rows: those of keys stay
                return
            current = shard.array(slot)
            new = np.array(value) if sign == 0 else np.asarray(current) + sign * value
            self._set(shard, slot, new.astype(current.dtype, copy=False))

    def scatter(self, name: str, rows: np.ndarray, values: np.ndarray, *, sign: int = 0) -> None:
        """Assigns rows of a variable or slot (`sign=0`), or adds `sign * values` to them.

        `rows` are numbers within this shard, each once. Raises TypeError for a keyed table, whose
        rows only updates change.
        """
        with self._updating:
            with self._reading:
                shard, slot = self._find(name)
            if shard.spec.table is not None:
                raise TypeError(f"rows of {name!r} were assigned: they have keys, and no numbers")
            shard.require(rows)
            self.num_changes += 1
            if shard.spec.has_rows:
                shard.scatter(slot, rows, values, sign)
                return
            changed = np.array(shard.array(slot))
            changed[rows] = values if sign == 0 else changed[rows] + sign * values
            self._set(shard, slot, changed)

    def set_rule(self, rule: UpdateRule, names: Sequence[str], optimizer: str = "") -> None:
        """Registers an optimizer for variables, and creates missing slots.

        A variable may be trained by several optimizers.

        Raises:
            KeyError: no such variable.
            ValueError: the name belongs to a different optimizer.
        """
        with self._updating:
            known = self._optimizers.get(optimizer)
            description = json.loads(json.dumps(rule.describe(), default=repr))
            if known is not None and known.description != description:
                raise invalid(
                    f"Cannot train these variables with {description}: the servers already "
                    "have another optimizer with this name.",
                    expected=f"the existing optimizer: {known.description}.",
                    fix="use the optimizer of the journal or of the first client, rename the new "
                    "one, or restart the servers with empty journals.",
                    code="SG610",
                )
            scalars = rule.scalars() if known is None else known.scalars
            self._updated_shapes.clear()  # another rule has programs of its own
            with self._reading:
                self._optimizers[optimizer] = _Optimizer(description, scalars, rule)
            for name in names:
                with self._reading:
                    shard, _ = self._find(name)
                for slot in rule.slots(name, shard.spec.shape, shard.spec.dtype):
                    full_name = stored_name(optimizer, slot.name)
                    if full_name not in shard.slots:
                        shard.add_slot(full_name, slot)
            self.num_changes += 1

    def drop_rule(self, optimizer: str) -> None:
        """Removes an optimizer, its scalars and its slots."""
        with self._updating, self._reading:
            self._optimizers.pop(optimizer, None)
            for shard in self._shards.values():
                for name in shard.slots_of(optimizer):
                    shard.drop_slot(name)
            self.num_changes += 1

    def update(
        self,
        whole: Mapping[str, np.ndarray],
        rows: Mapping[str, tuple[np.ndarray, np.ndarray]],
        optimizers: Mapping[str, str] | None = None,
    ) -> int:
        """Applies gradients as one update, and returns the new version.

        Args:
            whole: gradients of whole variables, by variable name.
            rows: row numbers within this shard, or keys, of shape (k,) and each once, and row
                gradients of shape (k, ...), by variable name.
            optimizers: optimizer name by variable name; "" for variables not listed.

        Raises:
            KeyError: no such variable.
            RuntimeError: no rule is set.
            IndexError: no such row.
        """
        named: dict[str, list[str]] = {}
        for name in (*whole, *rows):
            named.setdefault((optimizers or {}).get(name, ""), []).append(name)
        with self._updating:
            with self._reading:
                shards = {name: self._shards[name] for name in (*whole, *rows)}
            for name, (numbers, _) in rows.items():
                shards[name].require(numbers)
            made = [
                (optimizer, *self._updated(optimizer, names, shards, whole, rows))
                for optimizer, names in named.items()
            ]
            with self._reading:
                for optimizer, parts, new in made:
                    for name, part in parts.items():
                        part.keep(new.values[name], new.slots[name])
                    own = self._optimizers[optimizer]
                    self._optimizers[optimizer] = dataclasses.replace(own, scalars=new.scalars)
                self.num_refused = sum(
                    part.num_refused for _, parts, _ in made for part in parts.values()
                )
                self.version += 1
                self.num_changes += 1
                counts = {name: len(numbers) for name, (numbers, _) in rows.items()}
                self._updated_shapes |= _shapes(whole, counts, optimizers or {})
                return self.version

    def has_updated(
        self, whole: Iterable[str], counts: Mapping[str, int], optimizers: Mapping[str, str]
    ) -> bool:
        """Returns False before the first update of such shapes, which compiles programs for them.

        `counts` has numbers of rows by name. A table that refuses keys updates fewer rows.
        """
        return _shapes(whole, counts, optimizers) <= self._updated_shapes

    def _updated(
        self,
        optimizer: str,
        names: Sequence[str],
        shards: Mapping[str, Shard],
        whole: Mapping[str, np.ndarray],
        rows: Mapping[str, tuple[np.ndarray, np.ndarray]],
    ) -> tuple[dict[str, UpdatedPart], State]:
        """Computes the update of one optimizer without storing it."""
        own = self._optimizers.get(optimizer)
        if own is None or own.rule is None:
            raise RuntimeError(f"gradients of {[*names]} came before their optimizer")
        parts = {
            name: shards[name].updated(optimizer, *rows.get(name, (None, None)), self.version + 1)
            for name in names
        }
        state = State(
            own.scalars,
            {name: part.value for name, part in parts.items()},
            {name: part.slots for name, part in parts.items()},
            [name for name in names if name in rows],
        )
        grads = {name: part.padded_grads(whole.get(name)) for name, part in parts.items()}
        return parts, own.rule.apply(state, grads)

    @property
    def scalars(self) -> dict[str, np.ndarray]:
        """Scalars of all optimizers, by `stored_name`."""
        with self._reading:
            return {
                stored_name(optimizer, name): value
                for optimizer, own in self._optimizers.items()
                for name, value in own.scalars.items()
            }

    @property
    def optimizers(self) -> dict[str, Any]:
        """Descriptions of all optimizers, by name."""
        with self._reading:
            return {name: own.description for name, own in self._optimizers.items()}

    def missing_rules(self, optimizers: Iterable[str]) -> list[str]:
        """Returns those of `optimizers` that a client must send again after a restart."""
        lacking = {name for name, own in self._optimizers.items() if own.rule is None}
        return [name for name in dict.fromkeys(optimizers) if name in lacking] if lacking else []

    def set_scalars(self, scalars: Mapping[str, float | np.ndarray]) -> None:
        """Sets optimizer scalars, by `stored_name`."""
        with self._updating:
            with self._reading:
                for full_name, value in scalars.items():
                    optimizer, _, name = full_name.rpartition(".")
                    own = self._optimizers.get(optimizer)
                    if own is None or name not in own.scalars:
                        raise KeyError(f"no scalar {full_name!r} on this server")
                    new = np.array(value, own.scalars[name].dtype)
                    self._optimizers[optimizer] = dataclasses.replace(
                        own, scalars={**own.scalars, name: new}
                    )
            self.num_changes += len(scalars)

    def take_marks(self) -> Marks:
        """Returns and clears the marks of changed rows. Call within `changing`."""
        marks = {name: shard.take_marks() for name, shard in self._shards.items()}
        return {name: taken for name, taken in marks.items() if taken is not None}

    def put_back(self, marks: Marks) -> None:
        """Undoes `take_marks` after a failed write."""
        with self._updating:
            for name, taken in marks.items():
                self._shards[name].put_back(taken)

    def saved(self, marks: Marks, *, is_all: bool = False) -> list[SavedPart]:
        """Returns changed values for a journal entry. Call within `changing`.

        `is_all` adds the unchanged ones too, except tables.
        """
        return [
            shard.saved(marks.get(name))
            for name, shard in self._shards.items()
            if name in marks or (is_all and not shard.spec.has_rows)
        ]

    def pieces(self, marks: Marks | None = None) -> Iterator[SavedPart]:
        """Yields copies of table rows, all or the marked ones, while updates continue."""
        with self._reading:
            tables = {name: one for name, one in self._shards.items() if one.spec.has_rows}
        for name, shard in tables.items():
            if marks is None:
                yield from shard.pieces()
            elif name in marks:
                yield from shard.pieces(marks[name])

    def restore(self, part: SavedPart) -> None:
        """Restores a shard or rows from a journal, before the server accepts requests."""
        shard = self._shards.get(part.spec.name)
        if shard is None:
            spec = part.spec
            shard = made_shard(
                spec,
                lambda: np.zeros(spec.shape, np.dtype(spec.dtype)),
                self.tiers,
                is_own=True,
                position=self.tiers.position,
            )
            self._shards[spec.name] = shard
        shard.restore(part)
        shard.take_marks()

    def restored(self) -> None:
        """Completes a restoration. Raises ValueError if the parts do not fit together."""
        for shard in self._shards.values():
            shard.restored()

    def restore_optimizers(
        self, version: int, descriptions: Mapping[str, Any], scalars: Mapping[str, np.ndarray]
    ) -> None:
        """Restores the version, and the descriptions and scalars of optimizers, from a journal."""
        self.version = version
        for gone in self._optimizers.keys() - descriptions.keys():
            self.drop_rule(gone)
        self._optimizers = {
            optimizer: _Optimizer(
                description,
                {
                    own_name(optimizer, name): np.array(value)
                    for name, value in scalars.items()
                    if is_stored_by(optimizer, name)
                },
            )
            for optimizer, description in descriptions.items()
        }

    def _find(self, name: str) -> tuple[Shard, str | None]:
        if name in self._shards:
            return self._shards[name], None
        variable, _, slot = name.rpartition(":")
        shard = self._shards.get(variable)
        if shard is None or slot not in shard.slots:
            raise KeyError(f"no variable {name!r} on this server")
        return shard, slot

    def _set(self, shard: Shard, slot: str | None, value: np.ndarray) -> None:
        shard.mark()
        self.num_changes += 1
        with self._reading:
            if shard.spec.has_rows:
                with shard.lock:
                    shard.array(slot)[...] = value
            elif slot is None:
                shard.value = value
            else:
                shard.slots[slot] = value
