"""What of a model's state replicas share out among their devices."""

from __future__ import annotations

from typing import Any

from stratagem.messages import explain
from stratagem.topology import Topology
from stratagem.topology.absent import planned_shard_state
from stratagem.variables import KeepingPolicy, OverReplicas, PartedState

__all__ = ["keeping_of_state"]


def keeping_of_state(
    shard_state: Any, topology: Topology, layout_map: Any = None
) -> KeepingPolicy | None:
    """Returns where variables are kept.

    Args:
        shard_state: None, "optimizer" or "all".
        topology: the devices of the replicas.
        layout_map: which variables the devices of each replica divide; None for none.

    Raises:
        ValueError: another value, or both.
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
    if shard_state is not None and layout_map is not None:
        raise ValueError(
            explain(
                f"shard_state={shard_state!r} and a layout_map were given.",
                expected="one of the two: each says where the parts of a variable are.",
                fix="leave one of them out.",
            )
        )
    if shard_state is None or topology.num_replicas == 1:
        return None
    return PartedState(OverReplicas(topology), is_all=shard_state == "all")
