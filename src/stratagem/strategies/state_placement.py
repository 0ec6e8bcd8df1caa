"""Placement of model state by `shard_state=`, `layout_map=` or `placement=`."""

from __future__ import annotations

from collections.abc import Mapping

from stratagem.devices.abstract_devices import planned_shard_state
from stratagem.devices.mesh import Topology
from stratagem.messages import explain
from stratagem.strategies.placement_rules import PlacementRules, Rule, places_on_replicas
from stratagem.variables.layouts import VariableLayouts
from stratagem.variables.placement import Placement, Replicated, ShardedState
from stratagem.variables.sharded_store import ShardedStore


def state_placement(
    topology: Topology,
    *,
    shard_state: str | None = None,
    layout_map: object = None,
    placement: Mapping[Rule, str] | None = None,
) -> Placement:
    """Returns the placement that the arguments of a lockstep strategy ask for.

    Raises:
        ValueError: an unknown `shard_state`, `placement` and another argument, or as of
            `PlacementRules`.
        TypeError: as of `PlacementRules`, or a `layout_map` of another type.
    """
    shard_state = planned_shard_state() or shard_state
    if shard_state not in (None, "optimizer", "all"):
        raise ValueError(
            explain(
                f"shard_state={shard_state!r} was given.",
                expected='"optimizer", "all" or None.',
                fix='pass "optimizer" to shard optimizer state, "all" to shard the weights, too.',
            )
        )
    wishes = {f"shard_state={shard_state!r}": shard_state, "a layout_map": layout_map}
    given = [name for name, wish in wishes.items() if wish is not None]
    if placement is not None and given:
        raise ValueError(
            explain(
                f"{' and '.join([*given, 'a placement'])} were given.",
                expected="a placement alone: it decides where every variable is stored.",
                fix="leave the placement out, or the others.",
            )
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
        raise ValueError(
            explain(
                f"shard_size={topology.shard_size} was given, and nothing is sharded.",
                expected="shard_state, a layout_map or a placement beside it.",
                fix='pass shard_state="all", or leave shard_size out.',
            )
        )
