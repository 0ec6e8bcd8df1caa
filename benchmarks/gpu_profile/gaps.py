"""Gaps on the device over whole epochs: `python -m benchmarks.gpu_profile.gaps fit resnet50`.

A profile of steps in the middle of an epoch does not show the time between calls and between
epochs. Run it for ours and for the scan by hand: the difference of their gaps is ours to remove.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.gpu.models import MODELS, model_of
from benchmarks.gpu.options import SideOptions

__all__ = ["by_length", "gaps_between"]

_SIDES = {
    "fit": "benchmarks.gpu.workers.stratagem_side",
    "keras": "benchmarks.gpu.workers.keras_side",
    "scan": "benchmarks.gpu.workers.jax_side",
}
# Shorter gaps separate two kernels of a program, the longest ones two calls or two epochs.
_LIMITS_NS = (20_000, 200_000)
_LONGEST = 12
_Gap = tuple[float, float, str, str]


def gaps_between(operations: Sequence[Any]) -> list[_Gap]:
    """Returns begin, end, and the operations before and after each time without an operation.

    Args:
        operations: with `name`, `begin_ns` and `end_ns`, in any order; they may overlap.
    """
    gaps: list[_Gap] = []
    end_ns, last = float("inf"), ""
    for one in sorted(operations, key=lambda one: one.begin_ns):
        if one.begin_ns > end_ns:
            gaps.append((end_ns, one.begin_ns, last, one.name))
        if one.end_ns > end_ns or end_ns == float("inf"):
            end_ns, last = one.end_ns, one.name
    return gaps


def by_length(gaps: Sequence[_Gap]) -> dict[str, dict[str, float]]:
    """Returns number and sum of short, middle and long gaps."""
    shortest, longest = _LIMITS_NS
    bounds = {
        "short": (0, shortest),
        "middle": (shortest, longest),
        "long": (longest, float("inf")),
    }
    lengths = [end - begin for begin, end, *_ in gaps]
    found: dict[str, dict[str, float]] = {}
    for kind, (least, most) in bounds.items():
        several = [one for one in lengths if least <= one < most]
        found[kind] = {"count": len(several), "sum_ns": sum(several)}
    return found


@click.command()
@click.argument("side", type=click.Choice(list(_SIDES)))
@click.argument("model", type=click.Choice(list(MODELS)))
@click.option("--output", type=click.Path(path_type=Path), required=True, help="File of JSON.")
@click.option("--steps-per-call", default=8, help="Steps in a call of the host.")
@click.option("--data", type=click.Choice(["device", "host"]), default="device")
@click.option("--tiny", is_flag=True, help="Small sizes on the CPU.")
def main(
    side: str, model: str, output: Path, *, steps_per_call: int, data: str, tiny: bool
) -> None:
    """Times epochs of one side, then profiles two of them."""
    options = SideOptions(
        model=model,
        result=os.devnull,
        begun_s=time.time(),
        platform="cpu" if tiny else "gpu",
        steps_per_call=steps_per_call,
        data=data,
        is_tiny=tiny,
    )
    sizes = model_of(model, is_tiny=tiny)
    training = importlib.import_module(_SIDES[side]).prepare(options, sizes)
    training.first_call()
    training.train(1)
    epochs_s = [(count, _seconds_of(training, count)) for count in (1, 2, 4)]
    facts = {
        "side": side,
        "model": model,
        "steps_per_call": steps_per_call,
        "steps_per_epoch": sizes.steps_per_epoch,
        "device": training.device_kind,
        "epochs_s": epochs_s,
        **_profiled(training),
    }
    output.write_text(json.dumps(facts, indent=1))
    print(json.dumps({name: value for name, value in facts.items() if name != "longest"}))


def _seconds_of(training: Any, num_epochs: int) -> float:
    begin_s = time.perf_counter()
    training.train(num_epochs)
    return time.perf_counter() - begin_s


def _profiled(training: Any) -> dict[str, Any]:
    """Profiles two epochs; returns their gaps, the longest with their operations."""
    import jax

    from stratagem.observe.profiling import read_trace

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 2
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            training.train(2)
        trace = read_trace(next(Path(folder).rglob("*.xplane.pb")))
    (operations, *_) = trace.devices.values()
    gaps = gaps_between(operations)
    begin_ns = min(one.begin_ns for one in operations)
    longest = sorted(gaps, key=lambda gap: gap[0] - gap[1])[:_LONGEST]
    return {
        "num_operations": len(operations),
        "span_ns": max(one.end_ns for one in operations) - begin_ns,
        "gaps": by_length(gaps),
        "longest": [
            {"at_ns": begin - begin_ns, "length_ns": end - begin, "before": before, "after": after}
            for begin, end, before, after in longest
        ],
    }


if __name__ == "__main__":
    main()
