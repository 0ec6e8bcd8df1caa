"""Which of a model's state replicas share out among their devices."""

from __future__ import annotations

from typing import Any

from stratagem.messages import explain
from stratagem.strategies.placement_rules import PlacementRules, places_with_replicas
from stratagem.topology import Topology
from stratagem.topology.absent import planned_shard_state
from stratagem.variables import KeepingPolicy, OverReplicas, PartedState

__all__ = ["keeping_of_state"]


def keeping_of_state(
    topology: Topology, *, shard_state: Any = None, layout_map: Any = None, placement: Any = None
) -> KeepingPolicy | None:
    """Returns where variables are kept.

    Args:
        topology: the devices of the replicas.
        shard_state: None, "optimizer" or "all".
        layout_map: which variables the devices of each replica divide; None for none.
        placement: places by rules, of those that replicas' devices reach; None for none.

    Raises:
        ValueError: another value, more than one of them, or what `PlacementRules` refuses.
        TypeError: what `PlacementRules` refuses.
    """
    shard_state = planned_shard_state() or shard_state
    if shard_state not in (None, "optimizer", "all"):
        raise ValueError(
            explain(
                f"shard_state={shard_state!r} was given.",
                expected='"optimizer", "all" or None.',
                fix='pass "optimizer" to part what the optimizer keeps, "all" for weights, too.',
            )
        )
    wishes = {
        f"shard_state={shard_state!r}": shard_state,
        "a layout_map": layout_map,
        "a placement": placement,
    }
    given = [name for name, wish in wishes.items() if wish is not None]
    if len(given) > 1:
        raise ValueError(
            explain(
                f"{' and '.join(given)} were given.",
                expected="one of them: each says where the parts of a variable are.",
                fix="leave the others out.",
            )
        )
    if placement is not None:
        return PlacementRules(placement, places_with_replicas(placement, topology))
    if shard_state is None or topology.num_replicas == 1:
        return None
    return PartedState(OverReplicas(topology), is_all=shard_state == "all")
