"""Tables of a profile."""

from __future__ import annotations

import dataclasses
import io

import pytest
from jax.profiler import ProfileData
from rich.console import Console

from stratagem.observe.profiling.report import show
from stratagem.observe.profiling.summary import ProfileSummary, summarize
from stratagem.observe.profiling.trace import parse_trace
from tests.unit.observe.profiling.fabricated import OPERATIONS, two_steps


@pytest.fixture(scope="module")
def summary() -> ProfileSummary:
    """A hundred thousand times as long as `two_steps`."""
    found = summarize(parse_trace(ProfileData.from_serialized_xspace(two_steps())), OPERATIONS)
    return dataclasses.replace(
        found,
        whole_s=found.whole_s * 1e5,
        parts_s={name: part_s * 1e5 for name, part_s in found.parts_s.items()},
        collectives_s=found.collectives_s * 1e5,
        operations=tuple(
            dataclasses.replace(one, time_s=one.time_s * 1e5) for one in found.operations
        ),
    )


def _shown(summary: ProfileSummary, top: int = 10, width: int = 80) -> list[str]:
    text = io.StringIO()
    show(summary, "Worker 0", top=top, console=Console(width=width, file=text))
    return text.getvalue().splitlines()


def _row(lines: list[str], name: str) -> list[str]:
    (line,) = [line for line in lines if line.startswith(f"│ {name} ")]
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_shares_and_times_are_of_one_step(summary) -> None:
    lines = _shown(summary)
    assert lines[0] == "Worker 0: 2 steps of 100.00 ms, 2 CPU devices, busy 70%"
    # 115 of 200 ms are 57.5 ms of each step.
    assert _row(lines, "compute")[1:3] == ["57.5%", "57.50 ms"]
    assert _row(lines, "collectives")[1:3] == ["12.5%", "12.50 ms"]
    assert _row(lines, "compilation")[1:3] == ["1.5%", "1.50 ms"]
    assert not any("copies" in line for line in lines)  # none were made
    assert "Collectives take 17.50 ms; compute hides 29%." in lines
    assert _row(lines, "dot") == ["dot", "model/dense", "backward", "57.50 ms", "57.5%"]
    assert _row(lines, "all-reduce")[1:3] == ["-", "-"]


def test_top_limits_the_operations(summary) -> None:
    assert not any("all-reduce" in line for line in _shown(summary, top=1))
    assert not any("Longest operations" in line for line in _shown(summary, top=0))


def test_long_names_fit_the_terminal(summary) -> None:
    long = dataclasses.replace(summary.operations[0], name="void cutlass::Kernel<" + "x" * 90)
    lines = _shown(dataclasses.replace(summary, operations=(long,)))
    assert max(map(len, lines)) <= 80
    assert any("…" in line for line in lines)


def test_trace_without_marks_has_no_steps(summary) -> None:
    lines = _shown(dataclasses.replace(summary, num_steps=0, num_devices=1, platform="gpu"))
    assert lines[0] == "Worker 0: 200.00 ms, without marks of steps, 1 GPU device, busy 70%"
    assert lines[1].strip() == "Time"


@pytest.mark.parametrize(
    ("processor_s", "num_cores", "expected"),
    [
        (None, None, "Input-bound: the devices wait 60% of the time for batches."),
        (0.48, 2.0, "for batches. The host needs 6.0 cores, and has 2."),
        (0.08, 2.0, "for batches. The host needs 1.0 of its 2 cores: read in more threads or"),
    ],
)
def test_input_that_limits_says_what_it_needs(
    summary, processor_s: float | None, num_cores: float | None, expected: str
) -> None:
    parts_s = dict.fromkeys(summary.parts_s, 0.0) | {"compute": 0.08, "input": 0.12}
    limited = dataclasses.replace(
        summary, whole_s=0.2, parts_s=parts_s, processor_s=processor_s, num_cores=num_cores
    )
    assert expected in " ".join(_shown(limited, width=200))


def test_input_that_is_fast_enough_is_not_mentioned(summary) -> None:
    assert not any("Input-bound" in line for line in _shown(summary))
