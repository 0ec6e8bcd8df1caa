"""Programs of eight GPUs, compiled ahead: the sums that are sent, and those that overlap."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any
from unittest import mock

import stratagem as sg
from benchmarks.gpu_profile.models import CASES
from stratagem.planning import compilers, planner
from stratagem.planning.schedule import Reduction, Schedule
from stratagem.planning.step_time import message_s

__all__ = ["describe_eight", "write_eight"]


def describe_eight(
    name: str, shard_state: str | None, output: Path, *, is_tiny: bool, is_fused: bool
) -> dict[str, Any]:
    """Plans a model for eight H100; writes the compiled text, and returns what it sends.

    Args:
        name: of the case.
        shard_state: as in `MirroredStrategy`.
        output: folder of the compressed text.
        is_tiny: sizes for a test.
        is_fused: attention in one kernel.
    """
    case = CASES[is_tiny][name]
    kept: list[Any] = []

    def keep(step: Any, target: Any) -> Any:
        # A plan does not carry the text of its program.
        kept.append(compilers.compile_step(step, target))
        return kept[-1]

    begin_s = time.perf_counter()
    with mock.patch.object(planner, "compile_step", keep):
        plan = sg.plan(
            lambda: case.build(is_fused), case.shapes(8), "8xH100", shard_state=shard_state
        )
    for program in kept[-1].device_programs:
        path = output / f"{name}-{shard_state}-{program.name}.hlo.gz"
        path.write_bytes(gzip.compress(program.text.encode()))
    sent = [one for one in plan.reductions if one.num_bytes > 1024]
    times_s = [one.times * message_s(one, plan.target, plan.assumptions) for one in sent]
    return {
        "model": name,
        "shard_state": shard_state,
        "is_fused": is_fused,
        "compiler": plan.compiler,
        "notes": list(plan.notes),
        "seconds": time.perf_counter() - begin_s,
        "is_scheduled": plan.is_scheduled,
        "num_messages": len(sent),
        "num_overlapped": sum(bool(one.behind) for one in sent),
        "sent_bytes": plan.reduced_bytes,
        "overlapped_share_of_bytes": plan.hidden_share,
        "overlapped_share_of_time": _share(times_s, [bool(one.behind) for one in sent]),
        "predicted": {
            "compute_s": plan.step.compute_s,
            "launch_s": plan.step.launch_s,
            "reduction_s": plan.step.reduction_s,
            "hidden_s": plan.step.hidden_s,
            "efficiency": plan.step.efficiency,
        },
        "memory": {"total_bytes": plan.memory.total_bytes, "parts": dict(plan.memory.parts())},
        "messages": [_fields(one, seconds) for one, seconds in zip(sent, times_s, strict=True)],
        "async_starts": sum(
            "-start" in one.name
            for program in kept[-1].device_programs
            for one in Schedule(program.text).reductions()
        ),
    }


def _fields(one: Reduction, seconds: float) -> dict[str, Any]:
    return {
        "name": one.name,
        "kind": one.kind,
        "bytes": one.num_bytes,
        "times": one.times,
        "num_behind": len(one.behind),
        "seconds": seconds,
    }


def _share(times_s: list[float], overlapped: list[bool]) -> float:
    whole_s = sum(times_s)
    hidden_s = sum(one for one, is_hidden in zip(times_s, overlapped, strict=True) if is_hidden)
    return hidden_s / whole_s if whole_s else 0.0


def write_eight(name: str, shard_state: str | None, output: Path, *, is_tiny: bool) -> None:
    """Writes the description of a program of eight GPUs.

    A compiler without the device may refuse attention in one kernel, which cuDNN compiles: then the
    products of attention are apart.

    Args:
        name: of the case.
        shard_state: as in `MirroredStrategy`.
        output: folder.
        is_tiny: sizes for a test.
    """
    try:
        facts = describe_eight(name, shard_state, output, is_tiny=is_tiny, is_fused=True)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is written down
        facts = describe_eight(name, shard_state, output, is_tiny=is_tiny, is_fused=False)
        facts["fused_attention_failed"] = f"{type(error).__name__}: {error}"[:2000]
    path = output / f"eight-{name}-{shard_state}.json"
    path.write_text(json.dumps(facts, indent=1))
