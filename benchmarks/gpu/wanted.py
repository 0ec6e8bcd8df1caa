"""The goals of the GPU benchmarks, and what was reached of them."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from typing import Any

__all__ = ["WANTED", "Goal", "Reached", "mfu", "reached"]

_PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # bf16, dense, per second


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goal:
    """A bound on a figure of one side, or on its ratio to that of another side.

    Args:
        title: in the table.
        bound: of the ratio or figure.
        ours: key of our side.
        reference: key of the other side; "" for our figure itself.
        is_least: True if the value must reach the bound, False if it must not exceed it.
        figure: "speed", "peak" for memory, "mfu", or "stall" for that of the last save.
    """

    title: str
    bound: float
    ours: str
    reference: str = ""
    is_least: bool = True
    figure: str = "speed"


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


def _summed(other: str, bound: float, reference: str) -> Goal:
    title = f"Llama 1B, gradients of 4 batches: fit over {other}"
    return _ratio(title, bound, "llama1b-fit-4-an-update", reference)


_RESNET_OURS = "resnet50-fit-data-on-device"
_MLP_OURS, _MLP_DEVICE = "mlp-fit-100-a-call", "mlp-fit-data-on-device-100-a-call"
_LLAMA_OURS, _LLAMA_CHUNKS = "llama1b-fit-4-a-call", "llama1b-fit-chunked-loss"

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
        figure="stall",
    ),
    Goal(title="Llama 1B: MFU of fit", bound=0.45, ours=_LLAMA_OURS, figure="mfu"),
    Goal(title="Llama 1B: MFU of fit, chunked loss", bound=0.45, ours=_LLAMA_CHUNKS, figure="mfu"),
    _ratio("Llama 1B: fit over torch.compile", 1.0, _LLAMA_OURS, "llama1b-torch-compile"),
    _ratio("Llama 1B: fit over JAX by hand", 0.99, _LLAMA_OURS, "llama1b-jax-by-hand-4-a-call"),
    _ratio("Llama 1B: fit over Keras fit", 1.3, _LLAMA_OURS, "llama1b-keras-fit-1-a-call"),
    Goal(
        title="Llama 1B: peak memory of fit, of torch.compile's",
        bound=1.0,
        ours=_LLAMA_OURS,
        reference="llama1b-torch-compile",
        is_least=False,
        figure="peak",
    ),
    Goal(
        title="Llama 1B: peak memory of fit, chunked loss, of torch.compile's",
        bound=1.0,
        ours=_LLAMA_CHUNKS,
        reference="llama1b-torch-compile",
        is_least=False,
        figure="peak",
    ),
    _summed("torch.compile", 1.0, "llama1b-torch-compile-4-an-update"),
    _summed("JAX by hand", 0.99, "llama1b-jax-4-an-update"),
    _summed("Keras fit", 1.3, "llama1b-keras-fit-4-an-update"),
    _ratio(
        "Llama 3B: fit over torch.compile", 1.0, "llama3b-fit-chunked-loss", "llama3b-torch-compile"
    ),
    _ratio(
        "LoRA of Llama 8B: fit over peft and torch.compile",
        1.0,
        "llama8b-lora-fit-chunked-loss",
        "llama8b-lora-peft-torch-compile",
    ),
)


def reached(goal: Goal, results: Mapping[str, Any]) -> Reached:
    """Returns the value of a goal: of medians of the rounds, or of the last save.

    Args:
        goal: what was wanted.
        results: of `results.json`.
    """
    mine = _figure(goal.figure, _find(results, goal.ours))
    if not goal.reference:
        return Reached(goal, mine)
    theirs = _figure(goal.figure, _find(results, goal.reference))
    return Reached(goal, mine / theirs if mine is not None and theirs else None)


def _figure(name: str, side: Mapping[str, Any]) -> float | None:
    if name == "stall":
        return side["saves"][-1]["stall_s"] if side.get("saves") else None
    if name == "peak":
        return side.get("peak_bytes")
    if not side.get("steps_per_s"):
        return None
    return mfu(side) if name == "mfu" else statistics.median(side["steps_per_s"])


def mfu(side: Mapping[str, Any]) -> float | None:
    """Returns the share of the device's peak that a side's products reach; None if unknown.

    Args:
        side: a row of `results.json` with speeds.
    """
    peak = next((p for name, p in _PEAK_FLOPS.items() if name in side["device_kind"]), None)
    if peak is None or side["flops_per_step"] is None:
        return None
    return statistics.median(side["steps_per_s"]) * side["flops_per_step"] / peak


def _find(results: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    for side in results["sides"]:
        if side["key"] == key and not side["is_cold"]:
            return side
    return {}
