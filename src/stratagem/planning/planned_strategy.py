"""Strategies on abstract devices, modeled on an existing strategy."""

from __future__ import annotations

from typing import Any

from stratagem.devices.abstract_devices import planning_for
from stratagem.planning.targets import Target
from stratagem.strategies.base.strategy import Strategy
from stratagem.strategies.central_storage import CentralStorageStrategy
from stratagem.strategies.local_update import LocalUpdateStrategy
from stratagem.strategies.mirrored import MirroredStrategy
from stratagem.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from stratagem.strategies.offloaded_state import PINNED_HOST, OffloadedState
from stratagem.strategies.placement_rules import PlacementRules
from stratagem.strategies.tpu import TPUStrategy
from stratagem.variables.placement import ShardedState, UniformPlacement


def planned_strategy(
    machine: Target, like: Strategy | None, shard_state: str | None = None
) -> Strategy:
    """Returns a strategy like `like`, with its replicas on the abstract devices of a machine.

    Takes over cross-device ops, local updates, devices per replica, layouts, the sequence axis and,
    without `shard_state`, sharded state. None for `like` replicates everything. Raises ValueError
    for a strategy that the machine or the planner does not support.
    """
    if like is None:
        with planning_for(machine.topology, shard_state):
            return MirroredStrategy()
    rules = like.placement if isinstance(like.placement, PlacementRules) else None
    if shard_state is None and isinstance(like.placement, ShardedState):
        shard_state = like.placement.shard_state
    size = like.topology.num_logical_devices
    layouts: Any = like.placement.layouts
    with planning_for(machine.topology):
        if like.local_updates is not None:
            return LocalUpdateStrategy(like.local_updates, ["cpu:0", "cpu:1"])  # all planned ones
        if rules is not None and shard_state is None:
            in_lockstep = (MirroredStrategy, MultiWorkerMirroredStrategy, TPUStrategy)
            # Else HybridStrategy, of a package above this one.
            kind: Any = MirroredStrategy if isinstance(like, in_lockstep) else type(like)
            return kind(None, like.cross_device_ops, placement=rules.placement)
        if isinstance(like.placement, OffloadedState) and shard_state is None:
            return CentralStorageStrategy(parameter_device=PINNED_HOST)
        if isinstance(like.placement, UniformPlacement) and shard_state is None:
            return CentralStorageStrategy()
        return MirroredStrategy(
            None,
            like.cross_device_ops,
            shard_state=shard_state,
            layout_map=layouts,
            shard_size=like.topology.shard_size,
            devices_per_replica=size,
            sequence_axis=like.sequence_axis,
        )
