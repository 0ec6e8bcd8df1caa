"""Kernels of a fabricated GPU trace, beside the costs of their instructions."""

from __future__ import annotations

import pytest

from benchmarks.gpu_profile import kernels
from benchmarks.gpu_profile.kernels import Kernel, by_kind, host_calls, kernels_of, step_gaps
from stratagem.planning.accelerators import ACCELERATORS
from stratagem.planning.schedule import OperationCost
from tests.profiling.fabricated import Event, step, write, xspace

_H100 = ACCELERATORS["H100"]
# 100 us at the peak of the products, and 50 us at that of the memory.
_COST = OperationCost("bfloat16", 989.4e12 * 100e-6, int(3352.3e9 * 50e-6))


@pytest.fixture
def trace(tmp_path):
    gemm = {"hlo_op": "gemm.1", "hlo_module": "jit_step"}
    stream = [
        Event("sm90_gemm", 0, 150_000, gemm),
        Event("splitK", 150_000, 200_000, gemm),
        Event("sm90_gemm", 300_000, 450_000, gemm),
        Event("splitK", 450_000, 500_000, gemm),
        Event("loop_fusion", 500_000, 502_000),
    ]
    host = {"python": [step(0, 10_000), step(30_000, 50_000), step(60_000, 70_000)]}
    planes = {"/device:GPU:0": {"Stream #1(Compute)": stream}, "/host:CPU": host}
    return write(tmp_path / "vm.xplane.pb", xspace(planes))


@pytest.fixture
def found(trace, monkeypatch) -> list[Kernel]:
    costs = {"jit_step": {"gemm.1": ("product", _COST)}}
    monkeypatch.setattr(kernels, "costs_of_program", lambda name, ran: costs.get(name, {}))
    return kernels_of(trace, _H100)


def test_kernels_of_one_instruction_share_its_cost(found) -> None:
    assert [(one.name, one.count) for one in found] == [
        ("sm90_gemm", 2),
        ("splitK", 2),
        ("loop_fusion", 1),
    ]
    gemm = found[0]
    assert gemm.time_s == pytest.approx(300e-6)
    # Both kernels together take 200 us, where the peak of the products allows 100.
    assert gemm.instruction_s == pytest.approx(200e-6)
    assert (gemm.bound, gemm.share_of_peak) == ("products", pytest.approx(0.5))
    assert found[1].share_of_peak == pytest.approx(0.5)
    assert (found[2].kind, found[2].share_of_peak) == ("unknown", 0)


def test_kinds_hold_the_time_of_all_kernels(found) -> None:
    kinds = {row["kind"]: row for row in by_kind(found)}
    assert kinds["product, bound by products"]["time_s"] == pytest.approx(400e-6)
    assert kinds["product, bound by products"]["share_of_peak"] == pytest.approx(0.5)
    assert kinds["small unknown, bound by memory"]["num_kernels"] == 1


def test_work_of_the_host_between_two_steps(trace) -> None:
    gaps = step_gaps(trace)
    assert gaps["calls_s"] == pytest.approx([10e-6, 20e-6, 10e-6])
    assert gaps["between_s"] == pytest.approx([20e-6, 10e-6])
    (longest,) = host_calls(trace)
    assert (longest["thread"], longest["count"]) == ("/host:CPU python", 3)
