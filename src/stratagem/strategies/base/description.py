"""`StrategyDescription`: devices, variables, traffic and programs of a strategy, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeVar

from rich.table import Table

from stratagem.rendering import as_html, as_text, new_table, size_text

_MAX_ROWS = 40
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class DescribedDevice:
    """A device, its replica and the bytes of variables that it stores.

    `replica` is None for a memory without a replica: a host's, or the parameter servers'.
    """

    name: str
    replica: int | None
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class StoredVariableSize:
    """A variable, its place and its size.

    `num_bytes` is the size of the whole variable, once; `device_bytes` the bytes that each device
    or memory stores, by name.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    place: str
    num_bytes: int
    device_bytes: Mapping[str, int]

    @property
    def stored_bytes(self) -> int:
        """Bytes on all devices together."""
        return sum(self.device_bytes.values())


@dataclasses.dataclass(frozen=True)
class DescribedTransfer:
    """Arrays that training steps move in the same way.

    `num_bytes` is the size of the whole arrays. `sent_bytes` is what one replica sends in a step,
    by a ring for collectives. Both are None if they depend on the batch. With local updates, arrays
    move once in `every_steps` steps, and `sent_bytes` is the mean of a step.
    """

    kind: str
    arrays: str
    num_bytes: int | None
    sent_bytes: int | None
    every_steps: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyDescription:
    """State of a strategy: a string for a terminal, tables in a notebook.

    `num_replicas` counts the replicas of all processes, and `programs` has the number of compiled
    programs by function. `advice` says what `compression="auto"` would choose.
    """

    title: str
    num_replicas: int
    devices: Sequence[DescribedDevice]
    variables: Sequence[StoredVariableSize]
    transfers: Sequence[DescribedTransfer]
    programs: Mapping[str, int]
    advice: Sequence[str] = ()

    @property
    def variable_bytes(self) -> int:
        """Bytes of all variables, each counted once."""
        return sum(one.num_bytes for one in self.variables)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all variables on all devices together."""
        return sum(one.stored_bytes for one in self.variables)

    def __str__(self) -> str:
        return as_text(self._parts())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return as_html(self._parts())

    def _parts(self) -> list[str | Table]:
        replicas = "replica" if self.num_replicas == 1 else "replicas"
        tables = (
            self._device_table(),
            self._variable_table(),
            self._transfer_table(),
            self._program_table(),
        )
        with_lines: list[str | Table] = [part for table in tables for part in ("", table)]
        advice = ["", *self.advice] if self.advice else []
        return [f"{self.title}: {self.num_replicas} {replicas}", *with_lines, *advice]

    def _device_table(self) -> Table:
        table = new_table("Devices", ["device", "replica"], ["variables"])
        for one in _first(self.devices):
            replica = "-" if one.replica is None else str(one.replica)
            table.add_row(one.name, replica, _size_text(one.num_bytes))
        _add_rest(table, self.devices)
        table.add_row("all", "", _size_text(self.stored_bytes), style="bold")
        return table

    def _variable_table(self) -> Table:
        right = ["size", "in all"]
        table = new_table("Variables", ["variable", "shape", "dtype", "stored as"], right)
        largest = sorted(self.variables, key=lambda one: -one.num_bytes)[:_MAX_ROWS]
        for one in largest:
            sizes = _size_text(one.num_bytes), _size_text(one.stored_bytes)
            table.add_row(one.path, str(one.shape), one.dtype, one.place, *sizes)
        _add_rest(table, self.variables)
        sizes = _size_text(self.variable_bytes), _size_text(self.stored_bytes)
        table.add_row(f"all {len(self.variables)}", "", "", "", *sizes, style="bold")
        return table

    def _transfer_table(self) -> Table:
        title = "Sent in each training step"
        table = new_table(title, ["how", "arrays"], ["size", "sent by a replica"])
        for one in self.transfers:
            sizes = (
                "by batch" if size is None else _size_text(size)
                for size in (one.num_bytes, one.sent_bytes)
            )
            rarely = f", every {one.every_steps} steps" if one.every_steps > 1 else ""
            table.add_row(one.kind + rarely, one.arrays, *sizes)
        if not self.transfers:
            table.add_row("nothing", "", "0 B", "0 B")
        return table

    def _program_table(self) -> Table:
        table = new_table("Compiled programs", ["function"], ["times"])
        for name, count in self.programs.items():
            table.add_row(name, str(count))
        if not self.programs:
            table.add_row("none", "0")
        return table


def _size_text(num_bytes: int) -> str:
    return size_text(num_bytes, least=1)


def _first(rows: Sequence[_T]) -> Sequence[_T]:
    return rows[:_MAX_ROWS]


def _add_rest(table: Table, rows: Sequence[object]) -> None:
    """Adds a row with the number of those left out."""
    if len(rows) > _MAX_ROWS:
        table.add_row(f"... {len(rows) - _MAX_ROWS} more", *[""] * (len(table.columns) - 1))
