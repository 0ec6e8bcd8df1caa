"""The variables that one server holds: whole ones and shards, and the slots of optimizers."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from stratagem.messages import explain
from stratagem.servers.updates import State, UpdateRule

__all__ = ["ShardSpec", "Store"]

# Rows are updated in arrays of these many rows or twice as many, so that few shapes are compiled.
_LEAST_ROWS = 64


@dataclasses.dataclass(frozen=True)
class ShardSpec:
    """Consecutive rows of a variable, or all of it.

    Args:
        name: of the variable, unique in the cluster.
        shape: of the shard.
        dtype: its dtype.
        first_row: where it begins in the variable.
        has_rows: whether single rows of it are pulled and updated; else it always travels whole.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    first_row: int = 0
    has_rows: bool = False

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> ShardSpec:
        """Returns the spec that `dataclasses.asdict` and JSON made fields of."""
        told: dict[str, Any] = {**fields, "shape": tuple(fields["shape"])}
        return cls(**told)


class _Shard:
    """One shard and its slots. Whole arrays are replaced and never changed; rows are changed."""

    def __init__(self, spec: ShardSpec, value: np.ndarray) -> None:
        self.spec = spec
        self.value: Any = value  # what the rule returns, once it was updated
        self.slots: dict[str, Any] = {}
        self.lock = threading.Lock()  # of rows that are changed


class Store:
    """Holds variables and updates them; every method may be called by several threads.

    `version` counts updates.
    """

    def __init__(self) -> None:
        self._shards: dict[str, _Shard] = {}
        self._rule: UpdateRule | None = None
        self._scalars: dict[str, np.ndarray] = {}
        self._reading = threading.Lock()
        self._updating = threading.Lock()
        self.version = 0

    @property
    def names(self) -> list[str]:
        """Of its variables, in the order in which they were made."""
        with self._reading:
            return list(self._shards)

    def create(self, spec: ShardSpec, make: Callable[[], np.ndarray]) -> bool:
        """Makes a variable, unless it is there already: a client that is started again finds it.

        Args:
            spec: what it is.
            make: returns its initial value; called if it is not there.

        Returns:
            Whether it was made.

        Raises:
            ValueError: there is one of that name that is something else.
        """
        with self._updating:
            shard = self._shards.get(spec.name)
            if shard is None:
                value = np.array(make(), dtype=np.dtype(spec.dtype))
                if value.shape != spec.shape:
                    raise ValueError(
                        explain(
                            f"The initial value of {spec.name!r} has shape {value.shape}.",
                            expected=f"shape {spec.shape}.",
                            fix="let the initializer use the shape that it is given.",
                        )
                    )
                with self._reading:
                    self._shards[spec.name] = _Shard(spec, value)
                return True
        if shard.spec != spec:
            raise ValueError(
                explain(
                    f"Variable {spec.name!r} was created as {spec}.",
                    expected=f"the one that this server has: {shard.spec}.",
                    fix="give the variable another name, or start the servers anew.",
                )
            )
        return False

    def pull(self, names: Sequence[str]) -> list[np.ndarray]:
        """Returns whole variables, all as they were at one moment between two updates.

        Args:
            names: theirs; "name:slot" is a slot.

        Returns:
            Arrays that nobody changes.

        Raises:
            KeyError: no such variable.
        """
        with self._reading:
            found = [self._find(name) for name in names]
            values = [_array_of(shard, slot) for shard, slot in found]
        return [
            _copied(shard, value) if shard.spec.has_rows else np.asarray(value)
            for (shard, _), value in zip(found, values, strict=True)
        ]

    def pull_rows(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Returns single rows of a variable.

        Args:
            name: its name, or that of a slot.
            rows: their numbers within this shard, of shape (k,).

        Returns:
            Array of shape (k, ...).

        Raises:
            KeyError: no such variable. IndexError: no such row.
        """
        with self._reading:
            shard, slot = self._find(name)
            value = _array_of(shard, slot)
        _require_rows(shard, rows)
        with shard.lock:
            return np.take(value, rows, axis=0)

    def assign(self, name: str, value: np.ndarray, *, sign: int = 0) -> None:
        """Sets a whole variable, or changes it.

        Args:
            name: its name, or that of a slot.
            value: of its shape.
            sign: 0 sets it; 1 adds the value, -1 subtracts it.

        Raises:
            KeyError: no such variable. ValueError: another shape.
        """
        with self._updating:
            with self._reading:
                shard, slot = self._find(name)
            current = _array_of(shard, slot)
            if value.shape != current.shape:
                raise ValueError(
                    explain(
                        f"{name!r} was assigned a value of shape {value.shape}.",
                        expected=f"shape {current.shape}.",
                        fix="assign a value of the variable's own shape.",
                    )
                )
            new = np.array(value) if sign == 0 else np.asarray(current) + sign * value
            self._set(shard, slot, new.astype(current.dtype, copy=False))

    def scatter(self, name: str, rows: np.ndarray, values: np.ndarray, *, sign: int = 0) -> None:
        """Sets single rows of a variable, or changes them.

        Args:
            name: its name.
            rows: their numbers within this shard, of shape (k,), each once.
            values: of shape (k, ...).
            sign: 0 sets them; 1 adds the values, -1 subtracts them.

        Raises:
            KeyError: no such variable. IndexError: no such row.
        """
        with self._updating:
            with self._reading:
                shard, slot = self._find(name)
            _require_rows(shard, rows)
            current = np.asarray(_array_of(shard, slot))
            new = values if sign == 0 else np.take(current, rows, axis=0) + sign * values
            if shard.spec.has_rows:
                with shard.lock:
                    current[rows] = new
                return
            changed = current.copy()
            changed[rows] = new
            self._set(shard, slot, changed)

    def set_rule(self, rule: UpdateRule, names: Sequence[str]) -> None:
        """Sets how gradients are applied, and makes the slots that are not there.

        Args:
            rule: the optimizer's.
            names: of the variables that it trains.

        Raises:
            KeyError: no such variable. ValueError: another rule was set before.
        """
        with self._updating:
            if self._rule is not None and self._rule.describe() != rule.describe():
                raise ValueError(
                    explain(
                        f"These variables are to be trained by {rule.describe()}.",
                        expected=f"the optimizer that they were trained by: "
                        f"{self._rule.describe()}.",
                        fix="use one optimizer, or start the servers anew.",
                    )
                )
            if self._rule is None:
                self._scalars = rule.scalars()
            self._rule = rule
            for name in names:
                with self._reading:
                    shard, _ = self._find(name)
                for slot in rule.slots(name, shard.spec.shape, shard.spec.dtype):
                    if slot.name not in shard.slots:
                        full = np.full(shard.spec.shape, slot.initial, np.dtype(slot.dtype))
                        with self._reading:
                            shard.slots[slot.name] = full

    def update(
        self,
        whole: Mapping[str, np.ndarray],
        rows: Mapping[str, tuple[np.ndarray, np.ndarray]],
    ) -> int:
        """Applies gradients by the rule.

        Args:
            whole: of variables, by name.
            rows: of single rows, by name of the variable: their numbers within this shard, of shape
                (k,), each once, and their gradients, of shape (k, ...).

        Returns:
            The number of updates.

        Raises:
            KeyError: no such variable. RuntimeError: no rule was set. IndexError: no such row.
        """
        with self._updating:
            if self._rule is None:
                raise RuntimeError(
                    explain(
                        f"Gradients of {[*whole, *rows]} came before an optimizer.",
                        expected="an optimizer that was built for these variables.",
                        fix="let the coordinator compile the model, or build the optimizer.",
                    )
                )
            with self._reading:
                shards = {name: self._shards[name] for name in (*whole, *rows)}
            for name, (numbers, _) in rows.items():
                _require_rows(shards[name], numbers)
            parts = {name: _Part(shards[name], *rows.get(name, (None, None))) for name in shards}
            state = State(
                self._scalars,
                {name: part.value for name, part in parts.items()},
                {name: part.slots for name, part in parts.items()},
            )
            grads = {name: parts[name].padded_grads(whole.get(name)) for name in shards}
            new = self._rule.apply(state, grads)
            with self._reading:
                for name, part in parts.items():
                    part.keep(new.values[name], new.slots[name])
                self._scalars = dict(new.scalars)
                self.version += 1
                return self.version

    @property
    def scalars(self) -> dict[str, np.ndarray]:
        """What the rule keeps once, by name."""
        with self._reading:
            return dict(self._scalars)

    def set_scalar(self, name: str, value: np.ndarray) -> None:
        """Sets one of the scalars.

        Args:
            name: its name.
            value: its value.

        Raises:
            KeyError: no such scalar.
        """
        with self._updating:
            current = self._scalars[name]
            self._scalars = {**self._scalars, name: np.asarray(value, current.dtype)}

    def _find(self, name: str) -> tuple[_Shard, str | None]:
        if name in self._shards:
            return self._shards[name], None
        variable, _, slot = name.rpartition(":")
        shard = self._shards.get(variable)
        if shard is None or slot not in shard.slots:
            raise KeyError(f"no variable {name!r} on this server")
        return shard, slot

    def _set(self, shard: _Shard, slot: str | None, value: np.ndarray) -> None:
        with self._reading:
            if shard.spec.has_rows:
                with shard.lock:
                    _array_of(shard, slot)[...] = value
            elif slot is None:
                shard.value = value
            else:
                shard.slots[slot] = value


class _Part:
    """What an update changes of a shard: all of it, or some rows."""

    def __init__(
        self, shard: _Shard, rows: np.ndarray | None = None, grads: np.ndarray | None = None
    ) -> None:
        self._shard = shard
        self._rows = rows
        self._grads = grads
        self.value = self._taken(shard.value)
        self.slots = {name: self._taken(slot) for name, slot in shard.slots.items()}

    def padded_grads(self, whole: np.ndarray | None) -> np.ndarray:
        if self._rows is None or self._grads is None:
            assert whole is not None
            return whole
        return _padded(self._grads)

    def keep(self, value: np.ndarray, slots: Mapping[str, np.ndarray]) -> None:
        shard = self._shard
        if self._rows is None and not shard.spec.has_rows:
            shard.value = value
            shard.slots.update(slots)
            return
        rows = slice(None) if self._rows is None else self._rows
        count = None if self._rows is None else len(self._rows)
        with shard.lock:
            shard.value[rows] = value[:count]
            for name, slot in slots.items():
                shard.slots[name][rows] = slot[:count]

    def _taken(self, array: np.ndarray) -> np.ndarray:
        return array if self._rows is None else _padded(np.take(array, self._rows, axis=0))


def _padded(array: np.ndarray) -> np.ndarray:
    """The array with rows of zeros after it, so that its size is one of few."""
    size = max(_LEAST_ROWS, 1 << (len(array) - 1).bit_length() if len(array) else 0)
    if size == len(array):
        return array
    return np.concatenate([array, np.zeros((size - len(array), *array.shape[1:]), array.dtype)])


def _array_of(shard: _Shard, slot: str | None) -> np.ndarray:
    return shard.value if slot is None else shard.slots[slot]


def _copied(shard: _Shard, value: np.ndarray) -> np.ndarray:
    with shard.lock:
        return value.copy()


def _require_rows(shard: _Shard, rows: np.ndarray) -> None:
    num_rows = shard.spec.shape[0] if shard.spec.shape else 0
    if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= num_rows):
        raise IndexError(
            explain(
                f"Rows {int(rows.min())} to {int(rows.max())} of {shard.spec.name!r} were asked "
                "for.",
                expected=f"rows 0 to {num_rows - 1} of this shard.",
                fix="look up ids that the table has.",
            )
        )
