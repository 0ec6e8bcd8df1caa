"""Description of a strategy by itself: `describe`, its form in a notebook, and `dir`."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import jax

from stratagem.contexts import StrategyParts
from stratagem.devices.collectives.all_reduce import ChosenAllReduce
from stratagem.devices.mesh import Topology
from stratagem.execution.programs.compilations import compilations_of
from stratagem.messages import explain
from stratagem.public_dir import PublicDir
from stratagem.rendering import as_html, new_table, size_text
from stratagem.strategies.base.cross_device_ops import CrossDeviceOps
from stratagem.strategies.base.description import (
    DescribedDevice,
    DescribedTransfer,
    StoredVariableSize,
    StrategyDescription,
)
from stratagem.strategies.base.traffic import array_bytes, shapes_summed, transfers_of
from stratagem.variables.kind import VariableKind
from stratagem.variables.registry import home_of
from stratagem.variables.sharded_store import ShardedStore
from stratagem.variables.single_device_store import SingleDeviceStore
from stratagem.variables.store import is_remote, store_of

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
            advice=self.cross_device_ops.advice(shapes_summed(found), self.topology.num_replicas),
            programs={_KERAS_METHODS.get(name, name): count for name, count in compiled.items()},
        )

    def _transfers_of(self, found: Sequence[Any], *, has_slots: bool) -> list[DescribedTransfer]:
        sums = self.cross_device_ops.all_reduce(self.topology)
        return transfers_of(
            found,
            self.placement,
            self.topology,
            has_slots=has_slots,
            compression=self.cross_device_ops.compression,
            in_bfloat16=isinstance(sums, ChosenAllReduce) and sums.in_bfloat16,
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
