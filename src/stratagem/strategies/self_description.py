"""Description of a strategy by itself: `describe`, its form in a notebook, and `dir`."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from rich.table import Table

from stratagem.contexts import StrategyParts
from stratagem.devices.mesh import Topology
from stratagem.errors import explain, invalid
from stratagem.execution.programs.lockstep import compilations_of
from stratagem.logs import PublicDir, as_html, as_text, new_table, size_text
from stratagem.strategies.cross_device_ops import CrossDeviceOps
from stratagem.variables.layouts import is_remote, store_of
from stratagem.variables.placement import ShardedStore, SingleDeviceStore
from stratagem.variables.registry import home_of, is_on_read

# `StrategyDescription`: devices, variables and programs of a strategy, as data.

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyDescription:
    """State of a strategy: a string for a terminal, tables in a notebook.

    `num_replicas` counts the replicas of all processes, and `programs` has the number of compiled
    programs by function.
    """

    title: str
    num_replicas: int
    devices: Sequence[DescribedDevice]
    variables: Sequence[StoredVariableSize]
    programs: Mapping[str, int]

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
            self._program_table(),
        )
        with_lines: list[str | Table] = [part for table in tables for part in ("", table)]
        return [f"{self.title}: {self.num_replicas} {replicas}", *with_lines]

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


def array_bytes(variable: Any) -> int:
    """Returns the size of a whole variable, counted once."""
    return math.prod(variable.shape) * jnp.dtype(variable.dtype).itemsize


_SERVERS = "parameter servers"
# Replica functions of Keras's methods, by the name of their program.
_KERAS_METHODS = {
    "ReplicaSteps.train": "fit",
    "ReplicaSteps.test": "evaluate",
    "ReplicaSteps.predict": "predict",
}


class SelfDescription(StrategyParts, PublicDir):
    """Methods of a strategy that show what it is and what it stores."""

    cross_device_ops: CrossDeviceOps

    def describe(self, model: Any = None) -> StrategyDescription:
        """Describes devices, variables and compiled programs. Call anywhere.

        Nothing is sent to other processes. What a step moves between devices is in
        `stratagem plan`.

        Args:
            model: a Keras model, to describe only its variables and those of its optimizer and
                metrics; None for all variables of the strategy.

        Returns:
            Text when printed, tables in a notebook, and the numbers as attributes: `devices`,
            `variables`, `programs`.

        Raises:
            TypeError: `model` has no variables.
            ValueError: a variable of `model` belongs to another strategy.

        Example:
            >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> with strategy.scope():
            ...     model = keras.Sequential([keras.Input((255,)), keras.layers.Dense(4)])
            >>> described = strategy.describe(model)
            >>> described.variable_bytes, described.stored_bytes
            (4096, 8192)

        Source: specific to Stratagem.
        """
        found = list(self.variables.live()) if model is None else self._variables_of(model)
        compiled = compilations_of(self)
        sizes = [_sized(variable, self.topology) for variable in found]
        return StrategyDescription(
            title=str(self),
            num_replicas=self.topology.num_replicas,
            devices=_devices(sizes, self.topology),
            variables=sizes,
            programs={_KERAS_METHODS.get(name, name): count for name, count in compiled.items()},
        )

    def _variables_of(self, model: Any) -> list[Any]:
        if not hasattr(model, "variables"):
            raise TypeError(
                explain(
                    f"describe received {model!r} of type {type(model).__name__}.",
                    expected="a Keras model, or None for all variables.",
                    fix="pass the model that was created in the strategy's scope.",
                )
            )
        optimizer = getattr(model, "optimizer", None)  # None before `compile`
        all_variables = [
            *model.variables,
            *getattr(optimizer, "variables", ()),
            *getattr(model, "metrics_variables", ()),
        ]
        found = {id(variable): variable for variable in all_variables}
        for variable in found.values():
            home = home_of(variable)
            if home is None or home.strategy is not self:
                owner = "no strategy" if home is None else str(home.strategy)
                raise invalid(
                    f"Variable {variable.path!r} of the model belongs to {owner}.",
                    expected=f"a model whose variables belong to {self}.",
                    fix="create the model in this strategy's scope, or call describe of its "
                    "own strategy.",
                )
        return [variable for variable in found.values() if variable.has_value]

    def _repr_html_(self) -> str:
        described = self.describe()
        table = new_table(None, ["", ""])
        for name, text in (
            ("replicas", str(described.num_replicas)),
            ("devices", _listed([one.name for one in described.devices])),
            ("variables", f"{len(described.variables)}, {size_text(described.variable_bytes)}"),
            ("on all devices", size_text(described.stored_bytes)),
        ):
            table.add_row(name, text)
        return as_html([type(self).__name__, table])


def _listed(names: Sequence[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _name(device: jax.Device) -> str:
    return f"{device.platform}:{device.id}"


def _devices(sizes: Sequence[StoredVariableSize], topology: Topology) -> list[DescribedDevice]:
    stored: collections.Counter[str] = collections.Counter()
    for size in sizes:
        stored.update(size.device_bytes)
    replicas = {
        _name(device): replica
        for replica in range(topology.num_replicas)
        for device in topology.devices_of(replica)
    }
    if topology.devices is None:  # JAX's default device, once something is stored there
        replicas = dict.fromkeys(stored, 0)
    others = [name for name in stored if name not in replicas]
    return [
        *(DescribedDevice(name, replica, stored[name]) for name, replica in replicas.items()),
        *(DescribedDevice(name, None, stored[name]) for name in others),
    ]


def _sized(variable: Any, topology: Topology) -> StoredVariableSize:
    return StoredVariableSize(
        path=variable.path,
        shape=tuple(variable.shape),
        dtype=str(variable.dtype),
        place=_place(variable, topology),
        num_bytes=array_bytes(variable),
        device_bytes=_device_bytes(variable),
    )


def _device_bytes(variable: Any) -> dict[str, int]:
    """Returns the bytes on each device that stores a copy, a shard or a component."""
    if is_remote(variable):
        return {_SERVERS: array_bytes(variable)}
    array = variable.storage if store_of(variable) is None else variable.stored
    sharding = getattr(array, "sharding", None)
    if sharding is None:  # a shape without a value, for planning
        return {}
    size = array.dtype.itemsize
    for length in sharding.shard_shape(array.shape):
        size *= length
    memory = " (pinned host memory)" if sharding.memory_kind == "pinned_host" else ""
    return {f"{_name(device)}{memory}": size for device in _in_order(sharding.device_set)}


def _in_order(devices: Iterable[jax.Device]) -> list[jax.Device]:
    return sorted(devices, key=lambda device: device.id)


def _place(variable: Any, topology: Topology) -> str:
    store = store_of(variable)
    if is_remote(variable):
        return f"rows on {_SERVERS}" if getattr(variable, "has_rows", False) else f"on {_SERVERS}"
    if isinstance(store, SingleDeviceStore):
        return f"one copy on {_name(store.device)}"
    if isinstance(store, ShardedStore):
        return "shards in pinned host memory" if store.is_pinned else "shard per replica"
    if is_on_read(variable):
        return "value per replica"
    if getattr(variable, "division", None) is not None:
        return "shards in each replica"
    return "copy per replica" if topology.num_replicas > 1 else "one copy"
