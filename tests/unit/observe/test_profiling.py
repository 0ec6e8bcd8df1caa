"""Shares of a trace, compared with counts of single nanoseconds."""

from __future__ import annotations

import dataclasses
import io

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.profiler import ProfileData
from rich.console import Console

from stratagem.observe.hlo import period_of
from stratagem.observe.profiling import (
    END,
    PARTS,
    STEP,
    DeviceOperation,
    DeviceTrace,
    ProfileSummary,
    every_steps,
    find_traces,
    instructions_of,
    is_collective,
    layer_of,
    parse_trace,
    read_trace,
    show_profile,
    summarize,
)
from stratagem.observe.recorder import input_mark
from tests.unit.observe.fabricated_traces import (
    OPERATIONS,
    Event,
    cpu_operation,
    cpu_trace,
    end_mark,
    input_wait,
    step,
    two_steps,
    write,
    xspace,
)

_WHOLE_NS = 60
_SPAN = st.tuples(st.integers(0, _WHOLE_NS), st.integers(1, 12)).map(
    lambda one: (one[0], min(one[0] + one[1], _WHOLE_NS))
)
_SPANS = st.lists(_SPAN.filter(lambda one: one[0] < one[1]), max_size=6)


def _trace(operations, **fields) -> DeviceTrace:
    return DeviceTrace("gpu", operations, **{"steps": [((0, 1), 1)], **fields})


def _operation(begin, end, kind="compute", name="dot", module="jit_step"):
    return DeviceOperation(name, module, begin, end, kind)


@settings(max_examples=60, deadline=None)
@given(_SPANS.filter(bool), _SPANS, _SPANS, _SPANS)
def test_each_nanosecond_counts_once(compute, collectives, copies, waits) -> None:
    operations = [_operation(*one) for one in compute]
    operations += [_operation(*one, "collective", "all-reduce") for one in collectives]
    operations += [_operation(*one, "copy", "MemcpyH2D") for one in copies]
    found = summarize(_trace({"gpu:0": operations}, input=waits, end_ns=_WHOLE_NS))
    causes = dict(zip(PARTS, (compute, collectives, copies, waits), strict=False))
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
        "input": (150 + 150) / 2,  # 150 to 200, when operations begin, and 850 to 950
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


def test_loop_around_operations_is_no_operation() -> None:
    operations = [
        _operation(0, 100, name="while.1"),
        _operation(10, 40, name="all-reduce", kind="collective"),
        _operation(40, 60),
        _operation(100, 150, name="while.2"),  # without operations inside, it counts
    ]
    summary = summarize(_trace({"tpu:0": operations}))
    assert summary.parts_s["compute"] == pytest.approx(70e-9)
    assert summary.parts_s["collectives"] == pytest.approx(30e-9)
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


def test_empty_summary_has_no_shares(summary) -> None:
    parts_s = dict.fromkeys(PARTS, 0.0)
    empty = dataclasses.replace(summary, whole_s=0.0, parts_s=parts_s, collectives_s=0.0)
    assert (empty.busy_share, empty.overlapped_share) == (0, 0)


# Operations and marks in traces of each platform; GPU and TPU traces are by XLA's format alone.


def _parsed(content: bytes):
    return parse_trace(ProfileData.from_serialized_xspace(content))


def test_operation_of_a_cpu_lasts_until_its_end_on_another_thread() -> None:
    begin, end = cpu_operation("dot.1", 100, 700, device=1, returns_ns=150)
    trace = _parsed(cpu_trace([], [begin], [end]))
    assert trace.platform == "cpu"
    assert trace.devices == {"cpu:1": [DeviceOperation("dot.1", "jit_step", 100, 700, "compute")]}


def test_operation_without_an_end_lasts_as_long_as_its_call() -> None:
    begin, _ = cpu_operation("all-reduce.2", 100, 700)
    (one,) = _parsed(cpu_trace([], [begin])).devices["cpu:0"]
    assert (one.begin_ns, one.end_ns, one.kind) == (100, 700, "collective")


def test_marks_of_the_host() -> None:
    python = [step(10, 20, 4), step(0, 5), input_wait(6, 8), input_wait(7, 9), end_mark(30)]
    trace = _parsed(cpu_trace(python, cpu_operation("dot", 1, 2)))
    assert trace.steps == [((0, 5), 1), ((10, 20), 4)]
    assert sorted(trace.input) == [(6, 8), (7, 9)]
    assert trace.end_ns == 30


def test_streams_of_a_gpu_as_cupti_writes_them() -> None:
    program = {"hlo_module": "jit__one_step", "program_id": 12}
    details = "regs:32 static_shared:0 dynamic_shared:0 grid:8,1,1 block:128,1,1 occ_pct:100"

    def of(op: str, correlation: int) -> dict[str, object]:
        kernel = {"correlation_id": correlation, "context_id": "$$1", "kernel_details": details}
        return {**kernel, "hlo_op": op, "name": op, "tf_op": "jit(step)/dot:", **program}

    copied = "kind_src:pinned kind_dst:device size:4 dest:0 async:1"
    planned = {"correlation_id": 7, "cuda_graph_id": 3, "cuda_graph_node_id": 9}
    lines = {
        "Stream #13(Compute,MemcpyD2D,MemoryAlloc,Memset)": [
            Event("sm90_xmma_gemm_bf16bf16_bf16f32", 100, 300, of("cublas-gemm.4", 1)),
            Event("splitKreduce_kernel", 300, 320, of("cublas-gemm.4", 2)),
            Event("MemcpyD2D", 320, 330, of("copy.5", 3) | {"memcpy_details": copied}),
            Event("Memset", 330, 335, {"memset_details": "kind:device num_bytes:4 async:1"}),
            Event("MemoryAlloc", 0, 5000, {"memalloc_details": "kind:device num_bytes:4"}),
            Event("MemoryFree", 0, 5000, {"memfree_details": "kind:device num_bytes:4"}),
            Event("loop_add_fusion", 340, 360, planned),
        ],
        "Stream #21(MemcpyH2D)": [Event("MemcpyH2D", 10, 40, {"memcpy_details": copied})],
        "Stream #22(Compute)": [
            Event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 300, 500, of("psum.1", 4))
        ],
        "Steps": [Event("0", 0, 1000)],
        "CUPTI overhead": [Event("BUFFER_FLUSH", 0, 9000)],
        "XLA Modules": [Event("jit__one_step(12)", 100, 360)],
        "XLA Ops": [Event("cublas-gemm.4", 100, 320)],
    }
    host = {"python": [step(0, 60), end_mark(400)], "pool": cpu_operation("dot", 0, 9000)}
    driver = {"Host Threads/77": [Event("cuLaunchKernel", 20, 30, {"correlation_id": 1})]}
    planes = {"/device:GPU:0": lines, "/host:CPU": host, "/host:CUPTI": driver}
    trace = _parsed(xspace(planes))
    found = [
        (one.name, one.module, one.kind, (one.begin_ns, one.end_ns))
        for one in trace.devices["gpu:0"]
    ]
    assert found == [
        ("cublas-gemm.4", "jit__one_step", "compute", (100, 300)),
        ("cublas-gemm.4", "jit__one_step", "compute", (300, 320)),
        ("copy.5", "jit__one_step", "compute", (320, 330)),
        ("Memset", "", "compute", (330, 335)),
        ("loop_add_fusion", "", "compute", (340, 360)),
        ("MemcpyH2D", "", "copy", (10, 40)),
        ("psum.1", "jit__one_step", "collective", (300, 500)),
    ]
    assert (trace.platform, list(trace.devices)) == ("gpu", ["gpu:0"])  # "pool" is no device
    assert (trace.steps, trace.end_ns) == ([((0, 60), 1)], 400)


def test_lines_of_a_tpu() -> None:
    lines = {
        "Steps": [Event("1", 0, 900)],
        "XLA Modules": [Event("jit_step(123)", 90, 800)],
        "XLA Ops": [
            Event("%while.1 = (s32[]) while(%tuple)", 100, 700),
            Event("%fusion.5 = f32[8]{0:T(8,128)} fusion(%x), kind=kLoop", 100, 400),
            Event("%all-reduce-done.1 = f32[8] all-reduce-done(%y)", 400, 500),
        ],
        "Async XLA Ops": [
            Event("%all-reduce-start.1 = f32[8] all-reduce-start(%z)", 200, 500),
            Event("%copy-start.4 = (f32[8]) copy-start(%w)", 150, 300),
        ],
    }
    trace = _parsed(xspace({"/device:TPU:0": lines, "/device:TPU:0 SparseCore 1": lines}))
    assert trace.platform == "tpu"
    assert list(trace.devices) == ["tpu:0"]
    assert [(one.name, one.kind) for one in trace.devices["tpu:0"]] == [
        ("while.1", "compute"),
        ("fusion.5", "compute"),
        ("all-reduce-done.1", "collective"),
        ("all-reduce-start.1", "collective"),
        ("copy-start.4", "copy"),
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("all-reduce.7", True),
        ("reduce-scatter-start", True),
        ("ncclDevKernel_AllGather", True),
        ("collective-permute-done.1", True),
        ("reduce.7", False),
        ("fusion_all-reduce", False),
        ("dot", False),
    ],
)
def test_collectives_by_name(name, expected) -> None:
    assert is_collective(name) is expected


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (cpu_trace([step(0, 10)], []), r"lists no operations of a device\.\nExpected an \.xplane"),
        (b"\xff\xff\xff", "cannot be read as a trace"),
        (two_steps()[:-20], "cannot be read as a trace"),
    ],
    ids=["no operations", "no trace", "cut off"],
)
def test_file_that_is_no_trace_is_an_error(content, words, tmp_path) -> None:
    path = write(tmp_path / "vm.xplane.pb", content)
    with pytest.raises(ValueError, match=words):
        read_trace(path)


# Tables of a profile.


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
    show_profile(summary, "Worker 0", top=top, console=Console(width=width, file=text))
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


def test_input_that_limits_is_named(summary) -> None:
    parts_s = dict.fromkeys(summary.parts_s, 0.0) | {"compute": 0.08, "input": 0.12}
    limited = dataclasses.replace(summary, whole_s=0.2, parts_s=parts_s)
    assert limited.is_input_bound
    assert "Input-bound: the devices wait 60% of the time for batches." in _shown(limited)


# Layers and passes read from scopes as JAX and Keras write them.

_PROGRAM = """
HloModule jit__one_step, is_scheduled=true

%fused_computation.1 (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %neg.1 = f32[4]{0} negate(%p), metadata={op_name="jit(step)/jvp(model)/dense/neg"}
  ROOT %add.1 = f32[4]{0} add(%neg.1, %p), metadata={op_name="jit(step)/jvp(model)/dense/neg"}
}

ENTRY %main.1 (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0), metadata={op_name="arrays[0][1]"}
  %fusion = f32[4]{0:T(8,128)} fusion(%x), kind=kLoop, calls=%fused_computation.1
  %psum.3 = (f32[4]{0}, f32[2]{0}) all-reduce(%fusion, %x), metadata={op_name="jit(step)/psum"}
  ROOT %copy.2 = f32[4]{0} copy(%fusion)
}
"""


@pytest.mark.parametrize(
    ("scope", "layer", "phase"),
    [
        (
            "jit(_one_step)/shard_map/jvp(sequential)/dense/dot_general",
            "sequential/dense",
            "forward",
        ),
        (
            "jit(_one_step)/shard_map/transpose(jvp(sequential))/dense_1/jit(relu)/max",
            "sequential/dense_1",
            "backward",
        ),
        ("jit(train_step)/jvp()/dense_3/dot_general", "dense_3", "forward"),
        ("jit(_one_step)/shard_map/adam/sub", "adam", ""),
        ("jit(_many_steps)/while/body/closed_call/adam/add", "adam", ""),
        (
            "jit(step)/transpose(jvp(model))/rematted_computation/block/add",
            "model/block",
            "backward",
        ),
        ("jit(_one_step)/shard_map/psum", "", ""),
        ("arrays[0][19]", "", ""),
        ("", "", ""),
    ],
)
def test_layers_and_passes(scope, layer, phase) -> None:
    assert layer_of(scope) == (layer, phase)


def test_instructions_have_their_kind_and_scope() -> None:
    found = instructions_of(_PROGRAM)
    assert found["psum.3"] == ("all-reduce", "jit(step)/psum")
    # A fusion without a scope has the one that is most common inside.
    assert found["fusion"] == ("fusion", "jit(step)/jvp(model)/dense/neg")
    assert found["copy.2"] == ("copy", "")


def test_period_is_read_from_the_compiled_program() -> None:
    def step(number, array):
        with every_steps(25):
            return jax.lax.cond(number % 25 == 0, jnp.sin, lambda x: x, array)

    text = jax.jit(step).lower(1, jnp.ones(3)).compile().as_text()
    (line,) = [line for line in text.splitlines() if " conditional(" in line]
    assert period_of(line) == 25
    assert {period_of(line) for line in text.splitlines() if "iota" in line} <= {1, 25}


# Marks in a trace that JAX's profiler really writes.


def test_marks_are_read_back_with_operations(tmp_path) -> None:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(str(tmp_path), profiler_options=options):
        with jax.profiler.StepTraceAnnotation(STEP, step_num=7, num_steps=3):
            with input_mark():
                x = jnp.ones((8, 8))
            jax.block_until_ready(jax.jit(lambda x: x @ x + 3)(x))
        with jax.profiler.TraceAnnotation(END):
            pass
    (path,) = find_traces(tmp_path)
    trace = read_trace(path)
    (((begin, end), num_steps),) = trace.steps
    assert num_steps == 3
    assert trace.end_ns is not None
    assert trace.end_ns >= end
    ((first, last),) = trace.input
    assert begin <= first <= last <= end
    (operations,) = trace.devices.values()
    assert {one.module for one in operations} >= {"jit__lambda"}
    assert all(begin <= one.begin_ns < one.end_ns <= end for one in operations)
