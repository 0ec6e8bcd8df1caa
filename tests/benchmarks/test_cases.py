"""Which sides are compared, and what they are started with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks import callbacks, files, fit_overhead, fit_peers, input, loop, run_overhead
from benchmarks.cases import Case, Environments, Place
from benchmarks.scaling import efficiency
from stratagem.environment import size_cpu_thread_pool

CPUS = [Place("cpu", 1), Place("cpu", 2)]
NO_PEERS = Environments(peers=Path("nowhere"))
BENCHMARKS = [run_overhead, fit_overhead, callbacks, fit_peers, loop, input, files]


@pytest.mark.parametrize("benchmark_module", BENCHMARKS)
def test_case_names_are_unique_and_both_sides_do_the_same(benchmark_module) -> None:
    cases: list[Case] = benchmark_module.make_cases([*CPUS, Place("gpu", 1)], NO_PEERS)
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        ours = case.ours.options
        for side in case.references:
            assert side.options.workload == ours.workload, case.name
            assert side.options.device_names == ours.device_names, case.name


@pytest.mark.parametrize("benchmark_module", [*BENCHMARKS, efficiency])
def test_each_benchmark_has_a_main_case(benchmark_module) -> None:
    assert any(case.is_main for case in benchmark_module.make_cases(CPUS, NO_PEERS))


def test_resnet_runs_on_a_gpu_only() -> None:
    for benchmark_module in (fit_overhead, fit_peers):
        on_cpu = benchmark_module.make_cases(CPUS, NO_PEERS)
        on_gpu = benchmark_module.make_cases([Place("gpu", 1)], NO_PEERS)
        assert not any("ResNet" in case.name for case in on_cpu)
        assert any("ResNet" in case.name for case in on_gpu)


def test_peers_on_two_devices() -> None:
    case = fit_peers.make_cases([Place("cpu", 2)], NO_PEERS)[0]
    assert [side.name for side in case.references] == [
        "Keras DataParallel, 1 a call",
        "Keras DataParallel, 20 a call",
        "TF MirroredStrategy",
        "PyTorch DDP",
    ]


def test_jax_sides_have_the_thread_pool_that_we_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NPROC", raising=False)
    size_cpu_thread_pool(2)
    chosen = os.environ["NPROC"]
    monkeypatch.setenv("NPROC", "77")  # one from the shell reaches no worker
    for case in run_overhead.make_cases([Place("cpu", 2)], NO_PEERS):
        for side in (case.ours, *case.references):
            assert NO_PEERS.variables(side)["NPROC"] == chosen


def test_loops_by_hand_keep_freed_memory_and_peers_are_as_they_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=7")
    for benchmark_module in (run_overhead, fit_overhead, fit_peers, loop):
        for case in benchmark_module.make_cases(CPUS, NO_PEERS):
            for side in (case.ours, *case.references):
                tunables = NO_PEERS.variables(side).get("GLIBC_TUNABLES", "")
                assert ("mmap_max=0" in tunables) is ("by hand" in side.name)
                assert "arena_max=7" not in tunables


def test_keras_runs_in_our_environment(tmp_path: Path) -> None:
    """With TensorFlow beside it, it would import TensorFlow."""
    interpreter = tmp_path / "python"
    interpreter.touch()
    environments = Environments(peers=interpreter)
    for case in fit_peers.make_cases(CPUS, environments):
        for side in case.references:
            command = environments.command(side)[0]
            assert (command == str(environments.ours)) is side.name.startswith(
                ("Keras on JAX", "Keras DataParallel")
            )


@pytest.mark.parametrize(
    ("text", "place"),
    [("1", Place("cpu", 1)), ("cpu:4", Place("cpu", 4)), (" gpu", Place("gpu", 1))],
)
def test_place(text: str, place: Place) -> None:
    assert Place.parse(text) == place


@pytest.mark.parametrize("text", ["", "0", "tpu", "gpu:x", "-1"])
def test_no_place(text: str) -> None:
    with pytest.raises(ValueError, match="is no place to run"):
        Place.parse(text)
