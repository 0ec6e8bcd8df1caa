"""Description of a strategy by itself: `describe`, its form in a notebook, and `dir`."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
from rich.table import Table

from stratagem.contexts import StrategyParts
from stratagem.devices.compression import Compression
from stratagem.devices.local_updates import LocalUpdates, fragments_of
from stratagem.devices.mesh import Topology
from stratagem.errors import explain
from stratagem.execution.programs.lockstep import compilations_of
from stratagem.logs import PublicDir, as_html, as_text, new_table, size_text
from stratagem.strategies.base.cross_device_ops import CrossDeviceOps
from stratagem.variables.placement import Placement
from stratagem.variables.registry import VariableKind, home_of
from stratagem.variables.sharded_store import ShardedStore, SingleDeviceStore
from stratagem.variables.store import is_compressed, is_remote, store_of

# `StrategyDescription`: devices, variables, traffic and programs of a strategy, as data.

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
    programs by function.
    """

    title: str
    num_replicas: int
    devices: Sequence[DescribedDevice]
    variables: Sequence[StoredVariableSize]
    transfers: Sequence[DescribedTransfer]
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
            self._transfer_table(),
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


# Bytes that a training step moves for the variables of a strategy.
#
# They follow from the placement of the variables, the compression and the method of local updates.

# How, and what.
_Transfer = tuple[str, str]

_SUM: _Transfer = ("all-reduce", "gradients")
_CHANGES: _Transfer = ("all-reduce", "changes of weights")
_ROUNDED_SUM: _Transfer = ("all-reduce in bfloat16", "gradients")
_SCATTER: _Transfer = ("reduce-scatter", "gradients")
_GATHER: _Transfer = ("all-gather", "values")
_PULL: _Transfer = ("pull from servers", "values")
_PUSH: _Transfer = ("push to servers", "gradients")
_PULL_ROWS: _Transfer = ("pull from servers", "rows looked up")
_PUSH_ROWS: _Transfer = ("push to servers", "gradients of rows")
_COPY: _Transfer = ("copy from the host to each replica", "values")
_COPY_BACK: _Transfer = ("copy from replica 0 to the host", "gradients")
_ROWS: _Transfer = ("exchange of rows", "rows looked up, and their gradients")
_BRING: _Transfer = ("copy from pinned host memory", "values and optimizer state")
_PUT_BACK: _Transfer = ("copy to pinned host memory", "values and optimizer state")
_BY_BATCH = (_PULL_ROWS, _PUSH_ROWS, _ROWS)


def array_bytes(variable: Any) -> int:
    """Returns the size of a whole variable, counted once."""
    return math.prod(variable.shape) * jnp.dtype(variable.dtype).itemsize


def transfers_of(
    variables: Sequence[Any],
    placement: Placement,
    topology: Topology,
    *,
    has_slots: bool,
    compression: Compression | None = None,
    in_bfloat16: bool = False,
    local_updates: LocalUpdates | None = None,
) -> list[DescribedTransfer]:
    """Returns the transfers of a step that trains the trainable ones of these variables.

    `has_slots` means that the optimizer's state is among them; otherwise each trained variable is
    assumed to have a slot. `in_bfloat16` means that sums of float32 are sent as bfloat16. The sums
    of losses and metrics, a few bytes each, are left out, and so are the first steps of local
    updates, which may synchronize more often.
    """
    if local_updates is not None and topology.num_replicas > 1:
        trained = [one for one in variables if _is_trained(one)]
        return _synchronizations(trained, local_updates, topology.num_replicas)
    totals: collections.Counter[_Transfer] = collections.Counter()
    compressed: list[Any] = []
    stores = {id(one.slot_of): store_of(one) for one in variables if _is_slot(one)}
    for variable in variables:
        if _is_trained(variable):
            if id(variable) in stores or has_slots or is_remote(variable):
                slot_store = stores.get(id(variable))
            else:
                slot_store = placement.choose(variable, variable)
            kinds = _kinds(variable, slot_store, topology.num_replicas)
            if _SUM in kinds and is_compressed(variable, compression):
                compressed.append(variable)
                continue
            if in_bfloat16 and jnp.dtype(variable.dtype) == jnp.float32:
                kinds = [_ROUNDED_SUM if kind == _SUM else kind for kind in kinds]
            totals.update(dict.fromkeys(kinds, array_bytes(variable)))
        if getattr(store_of(variable), "is_pinned", False):
            part = array_bytes(variable) // topology.num_replicas
            totals.update(dict.fromkeys((_BRING, _PUT_BACK), part))
    found = [_described(kind, size, topology.num_replicas) for kind, size in totals.items()]
    if compression is not None and compressed:
        found.append(_compressed(compressed, _SUM[1], compression, topology.num_replicas))
    return found


def _synchronizations(
    trained: Sequence[Any], method: LocalUpdates, num_replicas: int
) -> list[DescribedTransfer]:
    """Returns the transfers of local updates, as the mean of a step."""
    compression: Any = method.compression
    totals: dict[str, DescribedTransfer] = {}
    for fragment, _ in fragments_of(trained, method):
        whole = sum(array_bytes(one) for one in fragment if not is_compressed(one, compression))
        parts = [_described(_CHANGES, whole, num_replicas)]
        if compressed := [one for one in fragment if is_compressed(one, compression)]:
            parts.append(_compressed(compressed, _CHANGES[1], compression, num_replicas))
        for part in parts if whole else parts[1:]:
            before = totals.get(part.kind)
            totals[part.kind] = part if before is None else _together(before, part)
    return [
        dataclasses.replace(
            one,
            sent_bytes=(one.sent_bytes or 0) // method.least_period,
            every_steps=method.least_period,
        )
        for one in totals.values()
    ]


def _together(first: DescribedTransfer, second: DescribedTransfer) -> DescribedTransfer:
    return dataclasses.replace(
        first,
        num_bytes=(first.num_bytes or 0) + (second.num_bytes or 0),
        sent_bytes=(first.sent_bytes or 0) + (second.sent_bytes or 0),
    )


def _compressed(
    variables: Sequence[Any], arrays: str, compression: Compression, num_replicas: int
) -> DescribedTransfer:
    """Returns the sum of what belongs to variables and travels together."""
    shapes = [tuple(one.shape) for one in variables]
    return DescribedTransfer(
        f"all-reduce by {type(compression).__name__}",
        arrays,
        sum(array_bytes(one) for one in variables),
        compression.sent_bytes(*shapes, num_replicas=num_replicas),
    )


def _is_slot(variable: object) -> bool:
    return getattr(variable, "slot_of", None) is not None


def _is_trained(variable: object) -> bool:
    return bool(getattr(variable, "trainable", False)) and not _is_slot(variable)


def _kinds(variable: Any, slot_store: object, num_replicas: int) -> Sequence[_Transfer]:
    """Returns the transfers of one trained variable."""
    store, has_rows = store_of(variable), getattr(variable, "has_rows", False)
    if is_remote(variable):
        return (_PULL_ROWS, _PUSH_ROWS) if has_rows else (_PULL, _PUSH)
    if store is None:
        if num_replicas == 1:
            return ()
        return (_SCATTER, _GATHER) if isinstance(slot_store, ShardedStore) else (_SUM,)
    if has_rows:
        return (_ROWS,)
    if not store.is_on_replicas:
        return (_COPY, *((_SUM,) if num_replicas > 1 else ()), _COPY_BACK)
    return (_GATHER, _SCATTER) if num_replicas > 1 else ()


def _described(kind: _Transfer, size: int, num_replicas: int) -> DescribedTransfer:
    if kind in _BY_BATCH:
        return DescribedTransfer(*kind, None, None)
    sent = {
        # A ring: every replica passes on one part at a time.
        _SUM: 2 * size * (num_replicas - 1) // num_replicas,
        _CHANGES: 2 * size * (num_replicas - 1) // num_replicas,
        _ROUNDED_SUM: size * (num_replicas - 1) // num_replicas,
        _SCATTER: size * (num_replicas - 1) // num_replicas,
        _GATHER: size * (num_replicas - 1) // num_replicas,
        _PULL: 0,
        _COPY: 0,
        _BRING: 0,
    }
    return DescribedTransfer(*kind, size, sent.get(kind, size))


_SERVERS = "parameter servers"
# Replica functions of Keras's methods, by the name of their program.
_KERAS_METHODS = {
    "ReplicaSteps.train": "fit",
    "ReplicaSteps.test": "evaluate",
    "ReplicaSteps.predict": "predict",
}


class HasVariables(Protocol):
    """An object with variables, such as a model."""

    @property
    def variables(self) -> Iterable[Any]:
        """The variables."""
        ...


class SelfDescription(StrategyParts, PublicDir):
    """Methods of a strategy that show what it is and what it stores."""

    cross_device_ops: CrossDeviceOps

    def describe(self, model: HasVariables | None = None) -> StrategyDescription:
        """Describes devices, variables, traffic and compiled programs. Call anywhere.

        Sizes and traffic follow from the placement of the variables, also before the first step;
        until then, an optimizer is assumed to have state for each trained variable. A step that
        uses summed gradients otherwise, to clip them for example, sums more of them by
        all-reduce. Nothing is sent to other processes.

        Args:
            model: a Keras model, to describe only its variables and those of its optimizer and
                metrics; None for all variables of the strategy.

        Returns:
            Text when printed, tables in a notebook, and the numbers as attributes: `devices`,
            `variables`, `transfers`, `programs`.

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
            >>> [(one.kind, one.num_bytes) for one in described.transfers]
            [('all-reduce', 4096)]

        Source: specific to Stratagem.
        """
        found = list(self.variables.live()) if model is None else self._variables_of(model)
        compiled = compilations_of(self)
        is_built = getattr(getattr(model, "optimizer", None), "built", False)
        sizes = [_sized(variable, self.topology) for variable in found]
        return StrategyDescription(
            title=str(self),
            num_replicas=self.topology.num_replicas,
            devices=_devices(sizes, self.topology),
            variables=sizes,
            transfers=self._transfers_of(found, has_slots=is_built or bool(compiled)),
            programs={_KERAS_METHODS.get(name, name): count for name, count in compiled.items()},
        )

    def _transfers_of(self, found: Sequence[Any], *, has_slots: bool) -> list[DescribedTransfer]:
        return transfers_of(
            found,
            self.placement,
            self.topology,
            has_slots=has_slots,
            compression=self.cross_device_ops.compression,
            in_bfloat16=self.cross_device_ops.communicator(self.topology).in_bfloat16,
            local_updates=self.local_updates,
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
                raise ValueError(
                    explain(
                        f"Variable {variable.path!r} of the model belongs to {owner}.",
                        expected=f"a model whose variables belong to {self}.",
                        fix="create the model in this strategy's scope, or call describe of its "
                        "own strategy.",
                    )
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
    store, home = store_of(variable), home_of(variable)
    if is_remote(variable):
        return f"rows on {_SERVERS}" if getattr(variable, "has_rows", False) else f"on {_SERVERS}"
    if isinstance(store, SingleDeviceStore):
        return f"one copy on {_name(store.device)}"
    if isinstance(store, ShardedStore):
        return "shards in pinned host memory" if store.is_pinned else "shard per replica"
    if home is not None and home.kind is VariableKind.ON_READ:
        return "value per replica"
    if getattr(variable, "division", None) is not None:
        return "shards in each replica"
    return "copy per replica" if topology.num_replicas > 1 else "one copy"
