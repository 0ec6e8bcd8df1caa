"""What workers on JAX tell of their device, and gaps on it over whole epochs.

A profile of steps in the middle of an epoch does not show the time between calls and between
epochs. The difference of the gaps of ours and of the scan by hand is ours to remove.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
# Shorter gaps separate two kernels of a program, the longest ones two calls or two epochs.
_BOUNDS_NS = {"short": (0, 2e4), "middle": (2e4, 2e5), "long": (2e5, float("inf"))}
_NUM_LONGEST = 12


def details_of(platform: str) -> Callable[[], dict[str, Any]]:
    """Returns what tells the device's kind, its peak of memory, and seconds of compilation."""
    durations: list[float] = []

    def note(event: str, duration_s: float, **_: Any) -> None:
        if event == _COMPILE_EVENT:  # loading from a cache, too
            durations.append(duration_s)

    jax.monitoring.register_event_duration_secs_listener(note)

    def details() -> dict[str, Any]:
        device = jax.local_devices(backend=platform)[0]
        peak_bytes = (device.memory_stats() or {}).get("peak_bytes_in_use")
        told = {"device_kind": device.device_kind, "compile_s": sum(durations)}
        return {**told, "peak_bytes": peak_bytes}

    return details


def gaps_between(operations: Sequence[Any]) -> list[tuple[float, float, str, str]]:
    """Returns begin, end, and the operations before and after each time without an operation."""
    gaps: list[tuple[float, float, str, str]] = []
    end_ns, last = float("inf"), ""
    for one in sorted(operations, key=lambda one: one.begin_ns):
        if one.begin_ns > end_ns:
            gaps.append((end_ns, one.begin_ns, last, one.name))
        if one.end_ns > end_ns or end_ns == float("inf"):
            end_ns, last = one.end_ns, one.name
    return gaps


def profile_of(run_epochs: Callable[[int], float]) -> dict[str, Any]:
    """Profiles two epochs; returns the gaps by length, and the longest."""
    from stratagem.observe.profiling import read_trace

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 2
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run_epochs(2)
        trace = read_trace(next(Path(folder).rglob("*.xplane.pb")))
    (operations, *_) = trace.devices.values()
    gaps = gaps_between(operations)
    lengths = [end - begin for begin, end, *_ in gaps]
    begin_ns = min(one.begin_ns for one in operations)
    return {
        "num_operations": len(operations),
        "span_ns": max(one.end_ns for one in operations) - begin_ns,
        "gaps": {
            name: _summed([one for one in lengths if least <= one < most])
            for name, (least, most) in _BOUNDS_NS.items()
        },
        "longest_gaps": [
            {"at_ns": begin - begin_ns, "length_ns": end - begin, "before": before, "after": after}
            for begin, end, before, after in sorted(gaps, key=lambda gap: gap[0] - gap[1])
        ][:_NUM_LONGEST],
    }


def _summed(lengths_ns: Sequence[float]) -> dict[str, float]:
    return {"count": len(lengths_ns), "sum_ns": sum(lengths_ns)}
