"""Shares of a trace, compared with counts of single nanoseconds."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.profiler import ProfileData

from stratagem.observe.profiling.summary import PARTS, ProfiledOperation, ProfileSummary, summarize
from stratagem.observe.profiling.trace import DeviceOperation, DeviceTrace, parse_trace, union
from tests.unit.observe.profiling.fabricated import OPERATIONS, two_steps

_WHOLE_NS = 60
_SPAN = st.tuples(st.integers(0, _WHOLE_NS), st.integers(1, 12)).map(
    lambda one: (one[0], min(one[0] + one[1], _WHOLE_NS))
)
_SPANS = st.lists(_SPAN.filter(lambda one: one[0] < one[1]), max_size=6)


def _trace(operations, **fields) -> DeviceTrace:
    steps = fields.pop("steps", [((0, 1), 1)])
    given = {"input": [], "compilation": [], "end_ns": None, "executions": {}} | fields
    return DeviceTrace("gpu", operations, steps=steps, **given)


def _operation(begin, end, kind="compute", name="dot", module="jit_step", run=None):
    return DeviceOperation(name, module, begin, end, kind, run)


@settings(max_examples=60, deadline=None)
@given(_SPANS.filter(bool), _SPANS, _SPANS, _SPANS, _SPANS, _SPANS)
def test_each_nanosecond_counts_once(
    compute, collectives, copies, executed, waits, compiles
) -> None:
    operations = [_operation(*one) for one in compute]
    operations += [_operation(*one, "collective", "all-reduce") for one in collectives]
    operations += [_operation(*one, "copy", "MemcpyH2D") for one in copies]
    executions = {"gpu:0": union(executed) or [(0.0, 0.0)]}
    found = summarize(
        _trace(
            {"gpu:0": operations},
            executions=executions,
            input=union(waits),
            compilation=union(compiles),
            end_ns=_WHOLE_NS,
        )
    )
    causes = dict(
        zip(PARTS, (compute, collectives, copies, executed, waits, compiles), strict=False)
    )
    counted = dict.fromkeys(PARTS, 0)
    for nanosecond in range(_WHOLE_NS):
        holds = (
            part for part, spans in causes.items() if any(b <= nanosecond < e for b, e in spans)
        )
        counted[next(holds, "host")] += 1
    assert found.parts_s == pytest.approx({part: count * 1e-9 for part, count in counted.items()})
    assert sum(found.parts_s.values()) == pytest.approx(found.whole_s)
    in_flight = {n for begin, end in collectives for n in range(begin, end)}
    assert found.collectives_s == pytest.approx(len(in_flight) * 1e-9)


def test_two_steps_on_two_devices() -> None:
    summary = summarize(parse_trace(ProfileData.from_serialized_xspace(two_steps())), OPERATIONS)
    assert (summary.platform, summary.num_devices, summary.num_steps) == ("cpu", 2, 2)
    # From the first step's start to the end of the last operation, although the host ended before.
    assert summary.whole_s == pytest.approx(2000e-9)
    assert summary.step_s == pytest.approx(1000e-9)
    mean = {
        "compute": (400 + 700 + 600 + 600) / 2,
        "collectives": (200 + 300) / 2,
        "copies": 0,
        "launch": 0,
        "input": (150 + 150) / 2,  # 150 to 200, when operations begin, and 850 to 950
        "compilation": 30,
        "host": 0,
    }
    mean["host"] = 2000 - sum(mean.values())
    assert summary.parts_s == pytest.approx({name: ns * 1e-9 for name, ns in mean.items()})
    assert summary.busy_share == pytest.approx((1150 + 250) / 2000)
    assert summary.collectives_s == pytest.approx(350e-9)
    assert summary.overlapped_share == pytest.approx(100 / 350)
    dot, reduce = summary.operations
    assert (dot.name, dot.layer, dot.phase, dot.kind) == (
        "dot",
        "model/dense",
        "backward",
        "compute",
    )
    assert (dot.count, dot.time_s) == (2, pytest.approx(1150e-9))
    assert (reduce.kind, reduce.layer, reduce.count) == ("collective", "", 1)


def test_gaps_within_an_execution_are_launches() -> None:
    operations = [_operation(10, 20, run=1), _operation(25, 30, run=1), _operation(50, 60, run=2)]
    summary = summarize(_trace({"cpu:0": operations}))
    assert summary.parts_s["launch"] == pytest.approx(5e-9)
    assert summary.parts_s["host"] == pytest.approx(30e-9)


def test_without_executions_short_gaps_of_a_program_are_launches() -> None:
    gaps_ns = (3_000, 49_000, 51_000)
    operations, at = [], 0
    for gap_ns in (*gaps_ns, 0):
        operations.append(_operation(at, at + 1_000))
        at += 1_000 + gap_ns
    summary = summarize(_trace({"gpu:0": operations}))
    assert summary.parts_s["launch"] == pytest.approx(52e-6)
    assert summary.parts_s["host"] == pytest.approx(51e-6)


def test_loop_around_operations_is_no_operation() -> None:
    operations = [
        _operation(0, 100, name="while.1"),
        _operation(10, 40, name="all-reduce", kind="collective"),
        _operation(40, 60),
        _operation(100, 150, name="while.2"),  # without operations inside, it counts
    ]
    summary = summarize(_trace({"tpu:0": operations}, executions={"tpu:0": [(0, 150)]}))
    assert summary.parts_s["compute"] == pytest.approx(70e-9)
    assert summary.parts_s["collectives"] == pytest.approx(30e-9)
    assert summary.parts_s["launch"] == pytest.approx(50e-9)
    assert [one.name for one in summary.operations] == ["while.2", "all-reduce", "dot"]


def test_kind_of_instruction_decides_and_not_its_name() -> None:
    operations = [_operation(0, 10, name="reduce_sum.1"), _operation(10, 40, name="region.2")]
    instructions = {"jit_step": {"reduce_sum.1": ("all-reduce-start", "jit(step)/dense/psum")}}
    summary = summarize(_trace({"gpu:0": operations}), instructions)
    assert summary.parts_s["collectives"] == pytest.approx(10e-9)
    assert summary.operations[1].layer == "dense"


def test_operations_before_the_first_step_do_not_count() -> None:
    operations = [_operation(0, 50), _operation(100, 130)]
    summary = summarize(_trace({"gpu:0": operations}, steps=[((90, 95), 4)]))
    assert (summary.whole_s, summary.num_steps) == (pytest.approx(40e-9), 4)
    assert summary.operations[0].time_s == pytest.approx(30e-9)


def test_trace_without_marks_is_one_whole() -> None:
    summary = summarize(_trace({"gpu:0": [_operation(100, 130)]}, steps=[]))
    assert (summary.num_steps, summary.whole_s) == (0, pytest.approx(30e-9))
    assert summary.step_s == summary.whole_s


def test_empty_summary_has_no_shares() -> None:
    summary = ProfileSummary(
        platform="cpu",
        num_devices=1,
        num_steps=0,
        whole_s=0.0,
        parts_s=dict.fromkeys(PARTS, 0.0),
        collectives_s=0.0,
        operations=(),
    )
    assert (summary.busy_share, summary.overlapped_share) == (0, 0)


def test_dict_is_ready_for_json_and_has_the_longest_operations() -> None:
    summary = summarize(parse_trace(ProfileData.from_serialized_xspace(two_steps())))
    fields = summary.to_dict(top=1)
    assert [one["name"] for one in fields["operations"]] == ["dot"]
    assert fields["step_s"] == summary.step_s
    assert len(summary.to_dict()["operations"]) == 2
    assert isinstance(summary.operations[0], ProfiledOperation)


def test_cores_are_those_for_the_same_work_without_waiting() -> None:
    summary = ProfileSummary(
        platform="gpu",
        num_devices=1,
        num_steps=10,
        whole_s=10.0,
        parts_s=dict.fromkeys(PARTS, 0.0) | {"compute": 4.0, "input": 6.0},
        collectives_s=0.0,
        operations=(),
        processor_s=20.0,
        num_cores=2.0,
    )
    assert (summary.is_input_bound, summary.needed_cores) == (True, 5.0)
    assert summary.to_dict()["needed_cores"] == 5.0
    unknown = dataclasses.replace(summary, processor_s=None)
    assert (unknown.is_input_bound, unknown.needed_cores) == (True, None)
