"""Operations and marks in traces of each platform; GPU and TPU traces are by XLA's format alone."""

from __future__ import annotations

import pytest
from jax.profiler import ProfileData

from stratagem.observe.profiling.trace import (
    DeviceOperation,
    is_collective,
    parse_trace,
    read_trace,
)
from tests.unit.observe.profiling.fabricated import (
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


def _parsed(content: bytes):
    return parse_trace(ProfileData.from_serialized_xspace(content))


def test_operation_of_a_cpu_lasts_until_its_end_on_another_thread() -> None:
    begin, end = cpu_operation("dot.1", 100, 700, device=1, run=5, returns_ns=150)
    trace = _parsed(cpu_trace([], [begin], [end]))
    assert trace.platform == "cpu"
    assert trace.devices == {
        "cpu:1": [DeviceOperation("dot.1", "jit_step", 100, 700, "compute", 5)]
    }


def test_operation_without_an_end_lasts_as_long_as_its_call() -> None:
    begin, _ = cpu_operation("all-reduce.2", 100, 700)
    (one,) = _parsed(cpu_trace([], [begin])).devices["cpu:0"]
    assert (one.interval, one.kind) == ((100, 700), "collective")


def test_marks_of_the_host() -> None:
    python = [step(10, 20, 4), step(0, 5), input_wait(6, 8), input_wait(7, 9), end_mark(30)]
    trace = _parsed(cpu_trace(python, cpu_operation("dot", 1, 2)))
    assert trace.steps == [((0, 5), 1), ((10, 20), 4)]
    assert trace.input == [(6, 9)]
    assert trace.end_ns == 30


def test_streams_of_a_gpu() -> None:
    gemm = {"hlo_op": "gemm_fusion.3", "hlo_module": "jit_step"}
    reduce = {"hlo_op": "psum.1", "hlo_module": "jit_step"}
    lines = {
        "Stream #13(Compute)": [
            Event("void cutlass::Kernel<128>(Params)", 100, 400, gemm),
            Event("fusion_7", 400, 450),
        ],
        "Stream #20(MemcpyH2D)": [Event("MemcpyH2D", 50, 90)],
        "Stream #21(Compute)": [Event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 300, 500, reduce)],
        "XLA Ops": [Event("derived", 0, 1000)],
        "Steps": [Event("0", 0, 1000)],
    }
    host = {"python": [step(0, 60)], "pool": cpu_operation("dot", 0, 9000)}
    trace = _parsed(xspace({"/device:GPU:1": lines, "/host:CPU": host}))
    assert trace.platform == "gpu"
    assert trace.steps == [((0, 60), 1)]
    assert [(one.name, one.kind, one.interval) for one in trace.devices["gpu:1"]] == [
        ("gemm_fusion.3", "compute", (100, 400)),
        ("fusion_7", "compute", (400, 450)),
        ("MemcpyH2D", "copy", (50, 90)),
        ("psum.1", "collective", (300, 500)),
    ]
    assert list(trace.devices) == ["gpu:1"]  # what the host runs for it is no other device


def test_stream_of_a_gpu_as_cupti_writes_it() -> None:
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
        "CUPTI overhead": [Event("BUFFER_FLUSH", 0, 9000)],
        "XLA Modules": [Event("jit__one_step(12)", 100, 360)],
        "XLA Ops": [Event("cublas-gemm.4", 100, 320)],
    }
    host = {"python": [step(0, 60), end_mark(400)]}
    driver = {"Host Threads/77": [Event("cuLaunchKernel", 20, 30, {"correlation_id": 1})]}
    planes = {"/device:GPU:0": lines, "/host:CPU": host, "/host:CUPTI": driver}
    trace = _parsed(xspace(planes))
    found = [(one.name, one.module, one.kind, one.interval) for one in trace.devices["gpu:0"]]
    assert found == [
        ("cublas-gemm.4", "jit__one_step", "compute", (100, 300)),
        ("cublas-gemm.4", "jit__one_step", "compute", (300, 320)),
        ("copy.5", "jit__one_step", "compute", (320, 330)),
        ("Memset", "", "compute", (330, 335)),
        ("loop_add_fusion", "", "compute", (340, 360)),
        ("MemcpyH2D", "", "copy", (10, 40)),
    ]
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
    assert trace.executions == {"tpu:0": [(90, 800)]}
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


def test_trace_without_operations_is_an_error(tmp_path) -> None:
    path = write(tmp_path / "vm.xplane.pb", cpu_trace([step(0, 10)], []))
    with pytest.raises(ValueError, match=r"lists no operations of a device\.\nExpected a trace"):
        read_trace(path)


@pytest.mark.parametrize(
    "content", [b"\xff\xff\xff", two_steps()[:-20]], ids=["no trace", "cut off"]
)
def test_damaged_file_is_an_error(content, tmp_path) -> None:
    path = write(tmp_path / "vm.xplane.pb", content)
    with pytest.raises(ValueError, match="cannot be read as a trace"):
        read_trace(path)
