"""A plan or a measurement of one model, in a process of its own, as JSON."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.gpu_profile.models import CASES, Case

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import jax
from jax.experimental import topologies

from benchmarks.gpu_profile.worker import accelerator_here, trained
from stratagem.keras.training.model import lower_training_step
from stratagem.planning.compilers import attached_devices, missing_compiler
from stratagem.planning.targets import parse_target

__all__ = ["describe_chip", "measure_case", "plan_case"]

_SCANNED_STEPS = 100


def describe_chip(output: Path) -> None:
    """Writes what JAX says of the attached device, and if it describes eight of them by itself.

    Args:
        output: folder.
    """
    device = jax.local_devices()[0]
    names = ("device_kind", "platform", "compute_capability", "core_count")
    facts: dict[str, Any] = {name: str(getattr(device, name, None)) for name in names}
    facts["memory_stats"] = device.memory_stats()
    facts["missing_compiler"] = missing_compiler("gpu")
    facts["attached"] = len(attached_devices(parse_target(f"1x{accelerator_here().name}")))
    try:
        described = topologies.get_topology_desc("eight", platform="cuda", topology="1x1x8")
        facts["eight_of_the_attached"] = [str(one) for one in described.devices]
    except Exception:  # noqa: BLE001 - whatever it is, it is written down
        facts["eight_of_the_attached"] = traceback.format_exc()[-2000:]
    (output / "chip.json").write_text(json.dumps(facts, indent=1))


def plan_case(name: str, output: Path, *, is_tiny: bool, is_fused: bool) -> None:
    """Writes the plan of a model for one GPU of the attached kind.

    Args:
        name: of the case.
        output: folder.
        is_tiny: sizes for a test.
        is_fused: attention in one kernel.
    """
    case = CASES[is_tiny][name]
    target = f"1x{accelerator_here().name}"
    begin_s = time.perf_counter()
    plan = sg.plan(lambda: case.build(is_fused), case.shapes(), target)
    facts = {
        "seconds": time.perf_counter() - begin_s,
        "total_bytes": plan.memory.total_bytes,
        "step_s": plan.step.step_s,
        "plan": plan.to_dict(),
    }
    (output / f"{name}.planned.json").write_text(json.dumps(facts, indent=1))


def measure_case(name: str, output: Path, *, is_tiny: bool, is_fused: bool) -> None:
    """Trains a model, and writes the peak of the device's memory and the seconds of a step.

    The peak is read before anything else runs that could raise it. A first process of the same
    model fills JAX's cache: in the second one no kernel is chosen by measuring candidates, which
    takes memory, too.

    Args:
        name: of the case.
        output: folder.
        is_tiny: sizes for a test.
        is_fused: attention in one kernel.
    """
    case = CASES[is_tiny][name]
    strategy = sg.MirroredStrategy()
    with strategy.scope():
        model = case.build(is_fused)
    device = jax.local_devices()[0]
    begin_s = time.perf_counter()
    steps_s = trained(dataclasses.replace(case, num_steps=4), model, 1)
    first_s = time.perf_counter() - begin_s
    after_four = device.memory_stats() or {}
    path = output / f"{name}.measured.json"
    previous = json.loads(path.read_text()) if path.exists() else {}
    facts: dict[str, Any] = {
        "first_s": first_s,
        "state_bytes": sum(one.storage.nbytes for one in strategy.variables.live()),
        "peak_bytes": after_four.get("peak_bytes_in_use"),
        "memory_stats": after_four,
        "peak_bytes_of_earlier_processes": [
            *previous.get("peak_bytes_of_earlier_processes", []),
            *([previous["peak_bytes"]] if "peak_bytes" in previous else []),
        ],
    }
    path.write_text(json.dumps(facts, indent=1))
    steps_s = trained(case, model, 5)
    facts |= {"epochs_step_s": steps_s, "step_s": statistics.median(steps_s)}
    facts["peak_bytes_of_all_steps"] = (device.memory_stats() or {}).get("peak_bytes_in_use")
    path.write_text(json.dumps(facts, indent=1))
    facts["compiled"] = _compiled_memory(case, model)
    path.write_text(json.dumps(facts, indent=1))
    if name == "mlp":
        facts["scanned_step_s"] = _scanned(case, is_fused)
        path.write_text(json.dumps(facts, indent=1))


def _compiled_memory(case: Case, model: Any) -> dict[str, int]:
    """Returns the compiler's account of the very step that has run."""
    analysis = lower_training_step(model, case.shapes()).compile().memory_analysis()
    names = ("argument", "output", "alias", "temp", "generated_code")
    found = {name: getattr(analysis, f"{name}_size_in_bytes") for name in names}
    return found | {"peak": getattr(analysis, "peak_memory_in_bytes", 0)}


def _scanned(case: Case, is_fused: bool) -> float:
    """Returns the seconds of a step of many in one call, which the host does not bound."""
    with sg.MirroredStrategy().scope():
        model = case.build(is_fused)
        num_steps = min(_SCANNED_STEPS, case.num_steps)
        model.compile(model.optimizer, model.loss, steps_per_execution=num_steps)
    return statistics.median(trained(case, model, 5)[1:])
