"""One model in a process of its own: trained, profiled, and described as JSON."""

from __future__ import annotations

import dataclasses
import gzip
import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_profile.models import CASES, Case

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import jax
import keras

from benchmarks.gpu_profile.kernels import Kernel, by_kind, host_calls, kernels_of, step_gaps
from stratagem.keras.training.model import lower_training_step
from stratagem.planning.step_time import Assumptions
from stratagem.planning.targets import ACCELERATORS, Accelerator

__all__ = ["accelerator_here", "profile_case", "trained", "write_profile"]

_MOST_TRACE_BYTES = 10 * 2**20
_PROFILED_STEPS = 5
_TOP = 10


def accelerator_here() -> Accelerator:
    """Returns the figures of the attached GPU, or of an H100 where they are not listed."""
    kind = jax.local_devices()[0].device_kind
    known = [one for one in ACCELERATORS.values() if one.device_kind == kind]
    return known[0] if known else ACCELERATORS["H100"]


class _Epochs(keras.callbacks.Callback):
    """Seconds of each epoch; an epoch's logs are there when its last step has run."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._begin_s = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._begin_s = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seconds.append(time.perf_counter() - self._begin_s)


def trained(case: Case, model: keras.Model, num_epochs: int) -> list[float]:
    """Trains some epochs; returns the seconds of a step in each, the first with compilation.

    Args:
        case: whose batches.
        model: in its strategy.
        num_epochs: to train.
    """
    epochs = _Epochs()
    x, y = case.arrays(case.num_steps)
    fit: dict[str, Any] = {"batch_size": case.batch_size, "shuffle": False, "verbose": 0}
    model.fit(x, y, epochs=num_epochs, callbacks=[epochs], **fit)
    return [seconds / case.num_steps for seconds in epochs.seconds]


def profile_case(name: str, output: Path, *, is_tiny: bool, is_fused: bool) -> None:
    """Profiles a model, and writes the description and its trace into a folder.

    Args:
        name: of the case.
        output: the folder.
        is_tiny: sizes for a test.
        is_fused: attention in one kernel.
    """
    case = CASES[is_tiny][name]
    case = dataclasses.replace(case, num_steps=min(case.num_steps, 30))
    with sg.MirroredStrategy().scope():
        model = case.build(is_fused)
    begin_s = time.perf_counter()
    trained(case, model, 1)
    first_s = time.perf_counter() - begin_s
    steps_s = trained(case, model, 4)
    folder = output / f"{name}-trace"
    with sg.profile(steps=(2, 2 + _PROFILED_STEPS), folder=folder, verbose=False) as profile:
        trained(dataclasses.replace(case, num_steps=4 + _PROFILED_STEPS), model, 1)
    facts: dict[str, Any] = {
        "model": name,
        "is_fused": is_fused,
        "device": jax.local_devices()[0].device_kind,
        "num_parameters": model.count_params(),
        "batch_size": case.batch_size,
        "first_epoch_s": first_s,
        "epochs_step_s": steps_s,
        "step_s": statistics.median(steps_s[1:]),
        "memory_stats": jax.local_devices()[0].memory_stats(),
    }
    path = output / f"{name}.json"
    path.write_text(json.dumps(facts, indent=1))
    if profile.trace is None or profile.summary is None:
        raise RuntimeError("sg.profile has no summary: see the warnings")
    write_profile(facts, Path(profile.trace), profile.summary, path)
    path.write_text(json.dumps(facts, indent=1))
    facts["whole_step"] = _whole_step(case, model, facts["step_s"])
    path.write_text(json.dumps(facts, indent=1))


def write_profile(facts: dict[str, Any], trace: Path, summary: Any, path: Path) -> None:
    """Adds a profile to the facts of a model, and writes its trace, compressed, beside them.

    Args:
        facts: to which it is added.
        trace: the file.
        summary: of it.
        path: of the facts.
    """
    kernels = kernels_of(trace, accelerator_here())
    # The profile's own whole: kernels of several streams may overlap.
    whole_s = summary.whole_s
    facts["profile"] = summary.to_dict(top=40)
    facts["idle_share"] = 1 - summary.busy_share
    facts["kernels"] = [_kernel_fields(one, whole_s, summary.num_steps) for one in kernels[:40]]
    facts["top"] = facts["kernels"][:_TOP]
    facts["num_kernels_per_step"] = sum(one.count for one in kernels) / (summary.num_steps or 1)
    facts["kinds"] = by_kind(kernels)
    facts["host"] = {"steps": step_gaps(trace), "longest": host_calls(trace)}
    content = gzip.compress(trace.read_bytes(), 9)
    if len(content) <= _MOST_TRACE_BYTES:
        path.with_suffix(".xplane.pb.gz").write_bytes(content)
    facts["trace_bytes"] = len(content)


def _kernel_fields(one: Kernel, whole_s: float, num_steps: int) -> dict[str, Any]:
    return {
        **dataclasses.asdict(one),
        "name": one.name[:200],
        "share": one.time_s / whole_s if whole_s else 0.0,
        "per_step_s": one.time_s / (num_steps or 1),
        "bound": one.bound,
        "share_of_peak": one.share_of_peak,
    }


def _whole_step(case: Case, model: keras.Model, step_s: float) -> dict[str, Any]:
    """Returns what the step's products and bytes would take at the peak, beside what it takes.

    The compiled step is the one that has just run, so it comes from JAX's cache where one is set.
    """
    from stratagem.planning.schedule import Schedule, operation_costs

    compiled = lower_training_step(model, case.shapes()).compile()
    schedule = Schedule(compiled.as_text())
    costs = operation_costs(schedule)
    accelerator = accelerator_here()
    product_s = sum(
        one.times * one.flops / accelerator.peak_flops_per_s(one.dtype) for one in costs
    )
    counted_bytes = schedule.accessed_bytes()
    return {
        "flops": sum(one.times * one.flops for one in costs),
        "share_of_peak_flops": product_s / step_s,
        "accessed_bytes": counted_bytes,
        "share_of_peak_bytes": counted_bytes / accelerator.memory_bytes_per_s / step_s,
        "peak": {"flops_per_s": dict(accelerator.flops_per_s)}
        | {"bytes_per_s": accelerator.memory_bytes_per_s},
        "assumed": dataclasses.asdict(Assumptions()),
    }
