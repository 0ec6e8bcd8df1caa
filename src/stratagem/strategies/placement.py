"""Rules for `placement`: by variable size, by layer, or for optimizer state."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from stratagem.contexts import explicit_device
from stratagem.devices.finding import find_devices, planned_shard_state
from stratagem.devices.mesh import Topology
from stratagem.errors import check_type, explain, invalid
from stratagem.execution.lookups import is_worth_rows
from stratagem.logs import warn_on_one_worker
from stratagem.variables.layouts import Store, VariableLayouts, store_of
from stratagem.variables.placement import (
    Replicated,
    ShardedState,
    ShardedStore,
    SingleDeviceStore,
    is_worth_sharding,
)

if TYPE_CHECKING:
    from stratagem.execution.tracing.remote_state import RemoteState
    from stratagem.variables.placement import NewVariable

__all__ = ["at_least_bytes", "in_layer", "optimizer_state"]


@dataclasses.dataclass(frozen=True)
class AtLeastBytes:
    """A rule that matches variables by size; it may match none."""

    num_bytes: int

    def __call__(self, variable: Any) -> bool:
        """Returns True if the variable has at least `num_bytes`."""
        size = math.prod(variable.shape) * np.dtype(variable.dtype).itemsize
        return size >= self.num_bytes


def at_least_bytes(num_bytes: int) -> Callable[[Any], bool]:
    """Returns a rule that matches variables by size; it may match none.

    Args:
        num_bytes: minimum size in bytes.

    Returns:
        A function of a variable.

    Example:
        >>> sg.HybridStrategy(
        ...     ["cpu:0", "cpu:1"], placement={sg.placement.at_least_bytes(2**30): "sharded"}
        ... ).num_replicas_in_sync
        2

    Source: specific to Stratagem.
    """
    return AtLeastBytes(num_bytes)


def in_layer(layer: Any) -> Callable[[Any], bool]:
    """Returns a rule that matches the variables of a layer.

    Args:
        layer: a Keras layer, or its name.

    Returns:
        A function of a variable.

    Example:
        >>> sg.HybridStrategy(
        ...     ["cpu:0", "cpu:1"], placement={sg.placement.in_layer("users"): "central"}
        ... ).num_replicas_in_sync
        2

    Source: specific to Stratagem.
    """
    name = layer if isinstance(layer, str) else layer.name

    def is_in_layer(variable: Any) -> bool:
        return name in variable.path.split("/")[:-1]

    return is_in_layer


def optimizer_state(variable: Any) -> bool:
    """A rule that places the optimizer state of variables apart from them.

    It applies to variables on the replicas' devices or in pinned host memory, and accepts
    "mirrored", "sharded" and "pinned_host". Without it, optimizer state is stored with its
    variable.

    Args:
        variable: a variable.

    Returns:
        True for optimizer state of a variable, such as Adam's moments.

    Example:
        >>> strategy = sg.HybridStrategy(
        ...     ["cpu:0", "cpu:1"], placement={sg.placement.optimizer_state: "pinned_host"}
        ... )
        >>> with strategy.scope():
        ...     layer = keras.layers.Dense(64)
        ...     layer.build((None, 64))
        ...     adam = keras.optimizers.Adam()
        ...     adam.build(layer.trainable_variables)
        >>> [sg.placement.optimizer_state(one) for one in (layer.kernel, adam.variables[2])]
        [False, True]

    Source: specific to Stratagem; ZeRO-Offload in DeepSpeed.
    """
    return getattr(variable, "slot_of", None) is not None


# Placement of variables by rules for their paths or sizes: `placement=`.


# Offloading of large variables to pinned host memory.

# JAX's name of that memory
PINNED_HOST = "pinned_host"


class OffloadedState(Replicated):
    """Large variables in pinned host memory, and lookup tables in ordinary host memory.

    Devices copy whole arrays from pinned memory, not single rows, so tables stay out of it.

    Args:
        store: pinned host memory.
        tables: the store of large tables.
    """

    uses_stores = True

    def __init__(self, store: ShardedStore, tables: SingleDeviceStore) -> None:
        super().__init__()
        self._store = store
        self._tables = tables

    def choose(self, variable: NewVariable, slot_of: object) -> Store | None:
        """Returns the store of a variable; a slot is stored with the variable it belongs to."""
        if slot_of is not None and store_of(slot_of) is not self._store:
            return store_of(slot_of)
        if slot_of is None and variable.is_large_table:
            return self._tables
        return if_worth_offloading(self._store, variable)


def pinned_host_store(topology: Topology) -> ShardedStore:
    """Returns the store of shards in pinned host memory.

    Raises:
        ValueError: a device without such memory.
    """
    # Abstract devices cannot be asked; each process asks its own devices.
    devices: Any = () if topology.is_abstract else topology.local_devices
    for device in devices:
        kinds = [memory.kind for memory in device.addressable_memories()]
        if PINNED_HOST not in kinds:
            raise invalid(
                f"{device} has no {PINNED_HOST!r} memory; its memories are {kinds}.",
                expected="devices with pinned host memory.",
                fix='store the variables in ordinary host memory: parameter_device="cpu:0" '
                'of CentralStorageStrategy, or the place "central" of HybridStrategy.',
            )
    return ShardedStore(topology, memory_kind=PINNED_HOST)


def if_worth_offloading(store: Store | None, variable: NewVariable) -> Store | None:
    """Returns a store, but None for a small variable in pinned memory: it stays on the devices."""
    if store is None or not store.is_pinned or is_worth_sharding(tuple(variable.shape)):
        return store
    return None


MIRRORED, CENTRAL, SHARDED, SERVER = "mirrored", "central", "sharded", "server"

Rule = str | Callable[[Any], bool]


def places_on_replicas(
    placement: Mapping[Rule, str], topology: Topology
) -> dict[str, Store | None]:
    """Returns the store of each place that the replicas' devices can access.

    Raises:
        ValueError: a rule needs pinned memory, and a device has none.
    """
    requested = [*placement.values()] if isinstance(placement, Mapping) else []
    return {
        MIRRORED: None,
        SHARDED: ShardedStore(topology),
        PINNED_HOST: pinned_host_store(topology) if PINNED_HOST in requested else None,
    }


def check_rules(placement: Any, places: Mapping[str, Store | None]) -> None:
    """Raises TypeError or ValueError unless `placement` maps valid rules to some of `places`."""
    wanted = "a mapping from patterns of variable paths, or functions of a variable, to places"
    check_type("placement", placement, Mapping, wanted, 'write placement={"embedding": "sharded"}.')
    for rule, place in placement.items():
        _check_place(rule, place, places)
        _matcher(rule)


class PlacementRules(Replicated):
    """Stores each variable by the first rule that matches it; see `HybridStrategy`.

    Args:
        placement: places by rule.
        places: the store of each place; None for a copy on each replica's device.
        remote: the state on parameter servers, if a rule needs it.

    Raises:
        TypeError, ValueError: as `check_rules`.
    """

    uses_stores = True

    def __init__(
        self,
        placement: Mapping[Rule, str],
        places: Mapping[str, Store | None],
        remote: RemoteState | None = None,
    ) -> None:
        super().__init__()
        check_rules(placement, places)
        self.remote = remote
        self.placement: Mapping[Rule, str] = dict(placement)
        self._places = places
        self.allows_devices = CENTRAL in places
        self._rules = [(rule, _matcher(rule), place) for rule, place in placement.items()]
        # There may be no large variables, or no optimizer state.
        self._unused = [
            rule
            for rule in placement
            if not isinstance(rule, AtLeastBytes) and rule is not optimizer_state
        ]
        self._paths: dict[str, None] = {}

    def is_on_servers(self, variable: Any) -> bool:
        """Returns True if the rules send a variable, which is not a slot, to parameter servers."""
        return explicit_device() is None and self._place_of(variable) == SERVER

    def choose(self, variable: NewVariable, slot_of: object) -> Store | None:
        """Returns the store of a variable; a slot without a rule is stored with its variable."""
        if slot_of is not None:
            return if_worth_offloading(self._store_of_slot(slot_of), variable)
        if (device_name := explicit_device()) is not None:
            return SingleDeviceStore(find_devices([device_name])[0])
        store = if_worth_offloading(self._places[self._place_of(variable)], variable)
        _warn_if_not_sharded(variable, store)
        return store

    def check(self) -> None:
        """Raises a ValueError if a rule has matched no variable."""
        if self._unused and self._paths:
            unused = ", ".join(map(_shown, self._unused))
            raise invalid(
                f"placement has rules that match no variable: {unused}. The variables are "
                f"{[*self._paths]}.",
                expected="every rule to be the first match of at least one variable.",
                fix="compare the patterns with the paths, and put narrower rules first.",
            )

    def _store_of_slot(self, variable: object) -> Store | None:
        store = store_of(variable)
        is_on_replicas = store is None or isinstance(store, ShardedStore)
        if not is_on_replicas or optimizer_state not in self.placement:
            return store
        return self._places[self.placement[optimizer_state]]

    def _place_of(self, variable: Any) -> str:
        self._paths[variable.path] = None
        for rule, matches, place in self._rules:
            if matches(variable):
                self._unused = [one for one in self._unused if one is not rule]
                return place
        return MIRRORED


def _check_place(rule: Rule, place: str, places: Mapping[str, Store | None]) -> None:
    if place not in places:
        raise invalid(
            f"placement has the place {place!r} for {rule!r}.",
            expected=f"one of {', '.join(map(repr, places))}.",
            fix="use sg.HybridStrategy, on the devices of one process."
            if place in (CENTRAL, SERVER)
            else "write one of these.",
        )
    if rule is optimizer_state and place in (CENTRAL, SERVER):
        raise invalid(
            f"placement has the place {place!r} for sg.placement.optimizer_state.",
            expected=f"one of {MIRRORED!r}, {SHARDED!r}, {PINNED_HOST!r}: other optimizer "
            "state is stored with its variable.",
            fix=f"write {PINNED_HOST!r}, or place the variables.",
        )


def _warn_if_not_sharded(variable: NewVariable, store: Store | None) -> None:
    """Warns about a large variable with no axis to shard."""
    shape = tuple(variable.shape)
    if not isinstance(store, ShardedStore) or not is_worth_rows(shape):
        return
    count = store.topology.num_replicas
    if store.sharded_axis(shape) is None:
        warn_on_one_worker(
            explain(
                f"Variable {variable.path!r} of shape {shape} cannot be sharded over {count} "
                "devices, so each device has a copy.",
                expected=f"an axis whose size is divisible by {count}.",
                fix=f"make it {-(-shape[0] // count) * count} rows long, for example.",
            ),
            stacklevel=2,
        )


def _shown(rule: Rule) -> str:
    return repr(rule) if isinstance(rule, str) else getattr(rule, "__qualname__", repr(rule))


def _matcher(rule: Rule) -> Callable[[Any], bool]:
    if callable(rule):
        return lambda variable: bool(rule(variable))
    if not isinstance(rule, str):
        raise TypeError(
            explain(
                f"placement has the rule {rule!r} of type {type(rule).__name__}.",
                expected="a pattern of variable paths, or a function of a variable.",
                fix='write "users/embeddings", or sg.placement.at_least_bytes(2**30).',
            )
        )
    try:
        pattern = re.compile(rule)
    except re.error as error:
        raise invalid(
            f"placement has the pattern {rule!r}: {error}.",
            expected="a regular expression, searched in the path of a variable.",
            fix="escape literal characters with re.escape.",
        ) from None
    return lambda variable: pattern.search(variable.path) is not None


# Placement of model state by `shard_state=`, `layout_map=` or `placement=`.


def state_placement(
    topology: Topology,
    *,
    shard_state: str | None = None,
    layout_map: object = None,
    placement: Mapping[Rule, str] | None = None,
) -> Replicated:
    """Returns the placement that the arguments of a lockstep strategy ask for.

    Raises:
        ValueError: an unknown `shard_state`, `placement` and another argument, or as of
            `PlacementRules`.
        TypeError: as of `PlacementRules`, or a `layout_map` of another type.
    """
    shard_state = planned_shard_state() or shard_state
    if shard_state not in (None, "optimizer", "all"):
        raise invalid(
            f"shard_state={shard_state!r} was given.",
            expected='"optimizer", "all" or None.',
            fix='pass "optimizer" to shard optimizer state, "all" to shard the weights, too.',
        )
    wishes = {f"shard_state={shard_state!r}": shard_state, "a layout_map": layout_map}
    given = [name for name, wish in wishes.items() if wish is not None]
    if placement is not None and given:
        raise invalid(
            f"{' and '.join([*given, 'a placement'])} were given.",
            expected="a placement alone: it decides where every variable is stored.",
            fix="leave the placement out, or the others.",
        )
    if not (given or placement):
        _require_one_copy(topology)
    if placement is not None:
        return PlacementRules(placement, places_on_replicas(placement, topology))
    layouts = None
    if isinstance(layout_map, VariableLayouts):  # of a strategy with as many devices per replica
        layouts = layout_map.on(topology)
    elif layout_map is not None:
        layouts = VariableLayouts(layout_map, topology)
    is_sharded = shard_state is not None or (layouts is not None and layouts.uses_replicas)
    if not is_sharded or topology.num_shards == 1:
        return Replicated(layouts)
    return ShardedState(ShardedStore(topology), shard_state, layouts)


def _require_one_copy(topology: Topology) -> None:
    if topology.shard_size is not None:
        raise invalid(
            f"shard_size={topology.shard_size} was given, and nothing is sharded.",
            expected="shard_state, a layout_map or a placement beside it.",
            fix='pass shard_state="all", or leave shard_size out.',
        )
