"""The part of a machine that a step uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.strategies.placement_rules import PlacementRules
from stratagem.variables.placement import UniformPlacement

if TYPE_CHECKING:
    from stratagem.execution.programs.step_capture import CapturedStep
    from stratagem.planning.targets import Target
    from stratagem.strategies.base.strategy import Strategy


def used_machine(step: CapturedStep, target: Target) -> tuple[Target, list[str]]:
    """Returns the part of the machine that the step uses, with notes about it."""
    notes: list[str] = []
    num_used = len(step.strategy.topology.all_devices or ())
    if num_used != target.num_devices:
        target = target.of_size(num_used)
        devices = "device" if num_used == 1 else "devices"
        notes.append(f"The plan is for {num_used} {devices}, as the strategy uses.")
    method = step.strategy.local_updates
    if method is not None and num_used > 1:
        notes.append(
            f"Replicas synchronize every {method.least_period} steps. "
            "Communication is a step's mean."
        )
    if _has_central_storage(step.strategy) and target.num_hosts > 1:
        notes.append(
            "Central storage needs a process that has all devices, but each of the "
            f'{target.num_hosts} hosts has one of its own. Place variables "sharded" or '
            '"pinned_host" there.'
        )
    if step.strategy.topology.groups is not None:
        notes.append(
            "FLOPs per device assume that the devices of a replica split its products evenly. "
            "Products that are not sharded run on every device in full."
        )
    return target, notes


def _has_central_storage(strategy: Strategy) -> bool:
    placement = strategy.placement
    if isinstance(placement, PlacementRules):
        return "central" in placement.placement.values()
    return isinstance(placement, UniformPlacement)
