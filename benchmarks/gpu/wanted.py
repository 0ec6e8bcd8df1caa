"""The goals of the GPU benchmarks, and what was reached of them."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from typing import Any

__all__ = ["WANTED", "Goal", "Reached", "reached"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goal:
    """A bound on the ratio of two sides' speeds, or on a figure of one side.

    Args:
        title: in the table.
        bound: of the ratio or figure.
        ours: key of our side.
        reference: key of the other side; "" for a figure of our side.
        is_least: True if the value must reach the bound, False if it must not exceed it.
    """

    title: str
    bound: float
    ours: str
    reference: str = ""
    is_least: bool = True


@dataclasses.dataclass(frozen=True)
class Reached:
    """A goal and its value; None if it was not measured."""

    goal: Goal
    value: float | None

    @property
    def is_met(self) -> bool:
        """True if the value keeps the bound."""
        if self.value is None:
            return False
        bound = self.goal.bound
        return self.value >= bound if self.goal.is_least else self.value <= bound


def _ratio(title: str, bound: float, ours: str, reference: str) -> Goal:
    return Goal(title=title, bound=bound, ours=ours, reference=reference)


_RESNET_OURS = "resnet50-fit-data-on-device"
_MLP_OURS, _MLP_DEVICE = "mlp-fit-100-a-call", "mlp-fit-data-on-device-100-a-call"

WANTED = (
    _ratio("MLP: fit, 100 a call, over Keras fit", 8, _MLP_OURS, "mlp-keras-fit-1-a-call"),
    _ratio("MLP: fit over the scan, host data", 0.99, _MLP_OURS, "mlp-jax-scan-by-hand-100-a-call"),
    _ratio("MLP: fit over the scan, device data", 0.99, _MLP_DEVICE, "mlp-jax-scan-data-on-device"),
    _ratio(
        "ResNet-50: fit over the scan, device data",
        0.99,
        _RESNET_OURS,
        "resnet50-jax-scan-data-on-device",
    ),
    _ratio(
        "ResNet-50: fit over torch.compile, device data",
        1.0,
        _RESNET_OURS,
        "resnet50-torch-compile-data-on-device",
    ),
    _ratio(
        "ResNet-50: fit of host data over fit of device data",
        0.97,
        "resnet50-fit-data-on-host",
        _RESNET_OURS,
    ),
    _ratio("GPT: fit over the scan", 0.99, "gpt-fit-4-a-call", "gpt-jax-scan-by-hand-4-a-call"),
    _ratio(
        "BERT: fit over the scan", 0.99, "bert-fit-10-a-call", "bert-jax-scan-by-hand-10-a-call"
    ),
    Goal(
        title="Checkpoint of 10 GB: stall of a step, s",
        bound=0.2,
        ours="checkpoint-asynchronous-save",
        is_least=False,
    ),
)


def reached(goal: Goal, results: Mapping[str, Any]) -> Reached:
    """Returns the value of a goal: the ratio of medians, or the stall of the last save.

    Args:
        goal: what was wanted.
        results: of `results.json`.
    """
    ours = _find(results, goal.ours)
    if not goal.reference:
        saves = ours.get("saves")
        return Reached(goal, saves[-1]["stall_s"] if saves else None)
    reference = _find(results, goal.reference)
    speeds = [side.get("steps_per_s") for side in (ours, reference)]
    if not all(speeds):
        return Reached(goal, None)
    mine, theirs = (statistics.median(one) for one in speeds if one)
    return Reached(goal, mine / theirs)


def _find(results: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    for side in results["sides"]:
        if side["key"] == key and not side["is_cold"]:
            return side
    return {}
