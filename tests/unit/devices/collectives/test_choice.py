"""Measurement of collectives, and the cache of times."""

from __future__ import annotations

import json
import math
import platform
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices.collectives import elastic_rounds, measurement
from stratagem.devices.collectives import shared_sums as denormals
from stratagem.devices.collectives.choice import Algorithm, Choice, choose
from stratagem.devices.collectives.elastic_rounds import RoundOperation, Rounds, serve_rounds
from stratagem.devices.collectives.measurement import (
    SIZES_BYTES,
    MeasuredChoice,
    measure_times,
    measured_choice,
)
from stratagem.devices.collectives.shared_sums import flush_denormals
from stratagem.devices.finding import find_devices
from stratagem.devices.mesh import Topology
from stratagem.group.elastic.group import ElasticGroup
from stratagem.launch.plan.ports import free_ports
from stratagem.strategies.base.automatic import AutomaticOps
from stratagem.strategies.base.strategy import Strategy
from tests.unit.devices.collectives.sharing import served
from tests.unit.group.elastic.members import Cluster
from tests.unit.observe.run_events.test_wait_clock import ticking

TIMES_S = {
    algorithm.value: {str(size): place + size / 2**30 for size in SIZES_BYTES}
    for place, algorithm in enumerate(Algorithm)
}


@pytest.mark.slow
def test_every_algorithm_is_timed_at_every_size(monkeypatch) -> None:
    monkeypatch.setattr(measurement, "time", ticking())
    times_s = measure_times(Topology(tuple(jax.devices()[:4])), (64, 256), num_rounds=1)
    assert set(times_s) == set(Algorithm) - {Algorithm.SHARED_MEMORY}
    for times in times_s.values():
        assert set(times) == {64, 256}
        assert all(time_s > 0 and math.isfinite(time_s) for time_s in times.values())


@pytest.mark.parametrize(
    ("own_s", "other_s", "expected"),
    [(1e-6, 1e-6, 15), (0.01, 0.1, 8), (0.1, 0.01, 8), (1.9, 1.0, 3), (1.0, 9.0, 1)],
)
def test_rounds_are_as_many_as_fit_on_the_slowest(own_s, other_s, expected, monkeypatch) -> None:
    class Two:
        def exchange(self, name, value):
            return [value, other_s]

    monkeypatch.setattr(measurement, "current_group", Two)
    assert measurement._num_rounds(measurement._slowest("a round", own_s)) == expected


@pytest.mark.parametrize(
    ("size", "sum_s", "expected"),
    [(4096, 1e-4, 20), (2**18, 1e-3, 16), (2**24, 1e-2, 2), (4096, 0.05, 1), (2**24, 1.5, 1)],
)
def test_long_sums_are_timed_one_at_a_time(size, sum_s, expected) -> None:
    assert measurement._num_sums(size, sum_s) == expected


def test_measured_choice_has_the_times_of_the_chosen_algorithm_at_each_size() -> None:
    times_s = {Algorithm.COMPILER: {4: 3.0, 64: 4.0}, Algorithm.RING: {4: 1.0, 64: 8.0}}
    choice = Choice(limits=((8, Algorithm.RING),))
    assert MeasuredChoice(choice, times_s, "measured").fastest_s == {4: 1.0, 64: 4.0}


def test_of_two_replicas_only_algorithms_that_differ_are_timed() -> None:
    times_s = measure_times(Topology(tuple(jax.devices()[:2])), (64,), num_rounds=1)
    assert set(times_s) == {Algorithm.COMPILER, Algorithm.RING, Algorithm.TO_ONE_DEVICE}


def test_shared_memory_is_timed_where_it_is_shared(monkeypatch) -> None:
    topology = Topology(tuple(jax.devices()[:2]))
    monkeypatch.setattr(measurement, "is_connected", lambda of: of is topology)
    with served(2):
        times_s = measure_times(topology, (64, 256), num_rounds=1)
    assert set(times_s) == set(Algorithm) - {Algorithm.HIERARCHICAL, Algorithm.TWO_STAGE}


def test_nothing_is_measured_in_a_process_by_itself(tmp_path) -> None:
    assert measured_choice(Topology(tuple(jax.devices()[:2])), tmp_path) is None
    assert not list(tmp_path.iterdir())


class GroupOfOne:
    """A group that hears its own values only."""

    process_id = 0

    def __init__(self) -> None:
        self.forgotten = 0

    def exchange(self, name, value):
        json.dumps(value)
        return [value]

    def return_to_step(self, number) -> None:
        assert number == 0
        self.forgotten += 1


@pytest.fixture
def group(monkeypatch) -> GroupOfOne:
    group = GroupOfOne()
    monkeypatch.setattr(measurement, "current_group", lambda: group)
    monkeypatch.setattr(Topology, "spans_processes", True)
    monkeypatch.setattr(
        measurement, "measure_times", lambda topology, sizes: measurement._parse_times(TIMES_S)
    )
    return group


def test_times_are_kept_and_found_again(group, tmp_path) -> None:
    topology = Topology(tuple(jax.devices()[:2]))
    first = measured_choice(topology, tmp_path / "not yet there")
    assert first.source == "measured at the start of this run"
    assert group.forgotten == 1
    again = measured_choice(topology, tmp_path / "not yet there")
    assert again.source == "cached by process 0"
    assert (again.choice, again.times_s) == (first.choice, first.times_s)
    assert group.forgotten == 1
    np.testing.assert_allclose(first.times_s[Algorithm.RING][4096], 1 + 4096 / 2**30)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"ring": {"4096": 1}}', '{"compiler": {"4096": 1}}', '{"compiler": {"x": 1}}'],
)
def test_what_cannot_be_used_is_measured_again(group, tmp_path, text) -> None:
    topology = Topology(tuple(jax.devices()[:2]))
    measured_choice(topology, tmp_path)
    [file] = tmp_path.iterdir()
    file.write_text(text)
    assert measured_choice(topology, tmp_path).source == "measured at the start of this run"
    assert measured_choice(topology, tmp_path).source == "cached by process 0"


def test_unwritable_folder_is_not_an_error(group, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    topology = Topology(tuple(jax.devices()[:2]))
    for _ in range(2):
        measured = measured_choice(topology, tmp_path / "file")
        assert measured.source == "measured at the start of this run"


# Rounds of a compiled program, of a single member; several are in tests/multiprocess.


@pytest.fixture
def group_of_elastic_rounds() -> Iterator[ElasticGroup]:
    with Cluster(free_ports(1)) as cluster:
        (member,) = cluster.started(1)
        serve_rounds(member)
        yield member


def _all_operations(x: Any) -> Any:
    rounds = Rounds()
    total = rounds.combine(RoundOperation.SUM, x)
    largest = rounds.combine(RoundOperation.MAX, total)
    smallest = rounds.combine(RoundOperation.MIN, largest)
    rows = rounds.gather(smallest, 1)
    swapped = rounds.all_to_all(rows)
    return swapped, rounds.commit()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_operations_run_in_order_and_keep_dtypes(group_of_elastic_rounds, dtype) -> None:
    x = jnp.asarray([[0, 1], [1, 0]], dtype)
    for number in (1, 2):
        group_of_elastic_rounds.begin_round("step")
        result, is_committed = jax.jit(_all_operations)(x)
        assert bool(is_committed)
        assert result.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(np.asarray(result[0]), np.asarray(x))
        assert group_of_elastic_rounds._num_rounds == number


def test_denormal_numbers_are_zero_after_an_operation_as_before_it(group_of_elastic_rounds) -> None:
    """A program continues in a thread of ours, which must compute as one of XLA's does."""
    x = jnp.full(1000, 2e-38)

    @jax.jit
    def step(x: Any) -> Any:
        rounds = Rounds()
        total = rounds.combine(RoundOperation.SUM, x)
        return x * 0.01, total * 0.01, jnp.where(rounds.commit(), total, x) * 0.01

    for _ in range(20):
        group_of_elastic_rounds.begin_round("step")
        np.testing.assert_array_equal(step(x), np.zeros((3, 1000)))


def test_a_broken_round_ends_with_zeros_and_is_not_committed(
    group_of_elastic_rounds, monkeypatch
) -> None:
    monkeypatch.setattr(group_of_elastic_rounds, "operate", lambda *arguments: False)
    monkeypatch.setattr(group_of_elastic_rounds, "commit", lambda: False)
    result, is_committed = jax.jit(_all_operations)(jnp.ones((2, 2)))
    assert not bool(is_committed)
    assert not np.asarray(result).any()


def test_an_error_of_the_group_ends_the_program(group_of_elastic_rounds, monkeypatch) -> None:
    def fail(*arguments: object) -> bool:
        raise ValueError("no such operation")

    monkeypatch.setattr(group_of_elastic_rounds, "operate", fail)
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="no such operation"):
        jax.block_until_ready(jax.jit(_all_operations)(jnp.ones((2, 2))))
    assert isinstance(elastic_rounds.error_of_rounds(), ValueError)
    assert elastic_rounds.error_of_rounds() is None


def test_a_version_without_handlers_is_refused(group_of_elastic_rounds, monkeypatch) -> None:
    monkeypatch.setattr(elastic_rounds, "handlers_work", lambda: False)
    with pytest.raises(RuntimeError, match="does not call handlers as expected"):
        serve_rounds(group_of_elastic_rounds)


# Selection of an algorithm by size, from times.

COMPILER, RING, ONE = Algorithm.COMPILER, Algorithm.RING, Algorithm.TO_ONE_DEVICE


def test_fastest_is_chosen_for_each_size_with_limits_between_the_sizes() -> None:
    times_s = {
        COMPILER: {4: 3.0, 64: 4.0, 1024: 4.0},
        RING: {4: 2.0, 64: 2.0, 1024: 8.0},
        ONE: {4: 1.0, 64: 4.0, 1024: 9.0},
    }
    choice = choose(times_s)
    assert choice == Choice(COMPILER, ((16, ONE), (256, RING)))
    for size, expected in [(0, ONE), (16, ONE), (17, RING), (256, RING), (257, COMPILER)]:
        assert choice.algorithm(size) is expected


@pytest.mark.parametrize(
    ("small_s", "large_s"),
    # Ring: time per message, and per megabyte.
    [(0.2, 10.0), (0.9, 2.1), (0.5, 3.0)],
)
def test_limit_is_where_times_cross(small_s: float, large_s: float) -> None:
    small, large = 2**10, 2**20
    steepness = np.log(large_s / small_s) / np.log(large / small)
    expected = small * (1.0 / small_s) ** (1 / (steepness - np.log(2.0) / np.log(large / small)))
    times_s = {COMPILER: {small: 1.0, large: 2.0}, RING: {small: small_s, large: large_s}}

    choice = choose(times_s)

    ((limit, algorithm),) = choice.limits
    assert (algorithm, choice.default) == (RING, COMPILER)
    np.testing.assert_allclose(limit, expected, atol=0.5)


@pytest.mark.parametrize(("ring_s", "expected"), [(0.94, RING), (0.96, COMPILER), (1.5, COMPILER)])
def test_compiler_stands_unless_another_is_clearly_faster(ring_s, expected) -> None:
    assert choose({COMPILER: {8: 1.0}, RING: {8: ring_s}}) == Choice(expected)


def test_no_limits_where_one_is_always_the_fastest() -> None:
    times_s = {COMPILER: {4: 2.0, 64: 2.0}, RING: {4: 1.0, 64: 1.0}}
    assert choose(times_s) == Choice(RING)
    assert Choice().algorithm(2**40) is COMPILER


def test_arrays_come_to_one_device_only_up_to_the_largest_size_that_was_measured() -> None:
    times_s = {COMPILER: {4: 2.0, 64: 2.0}, RING: {4: 3.0, 64: 1.9}, ONE: {4: 4.0, 64: 1.0}}
    assert choose(times_s) == Choice(COMPILER, ((16, COMPILER), (64, ONE)))
    times_s[RING][64] = 1.5
    assert choose(times_s) == Choice(RING, ((16, COMPILER), (64, ONE)))


def test_limit_is_the_lower_size_where_the_compiler_stands_though_another_is_as_fast() -> None:
    assert choose({COMPILER: {4: 1.0, 64: 2.0}, RING: {4: 0.98, 64: 1.0}}) == Choice(
        RING, ((4, COMPILER),)
    )


def test_where_memory_cannot_be_shared_the_best_of_the_others_is_used() -> None:
    shared = Algorithm.SHARED_MEMORY
    times_s = {
        COMPILER: {4: 2.0, 2**18: 2.0, 2**20: 2.0},
        ONE: {4: 1.0, 2**18: 1.5, 2**20: 3.0},
        shared: {4: 0.5, 2**18: 1.0, 2**20: 0.5},
    }
    choice = choose(times_s)
    # The smallest sums do not wait for the GIL.
    assert [choice.algorithm(size) for size in times_s[ONE]] == [ONE, shared, shared]
    del times_s[shared]
    assert choice.elsewhere == choose(times_s)
    assert choose(times_s).elsewhere is None


# Output of `sg.collectives.explain`.

FOUR = [f"cpu:{index}" for index in range(4)]


def lines(capsys, strategy) -> list[str]:
    sg.collectives.explain(strategy)
    return capsys.readouterr().out.splitlines()


def test_named_algorithm_and_its_packs(capsys) -> None:
    strategy = sg.MirroredStrategy(FOUR, cross_device_ops=sg.RingAllReduce(num_packs=2))
    assert lines(capsys, strategy)[:3] == [
        "4 replicas on 1 process, cpu",
        "algorithm: ring",
        "gradients: in 2 packs",
    ]
    unpacked = sg.MirroredStrategy(FOUR, cross_device_ops=sg.HierarchicalCopyAllReduce(0))
    assert "not packed" in lines(capsys, unpacked)[2]


def test_function_of_the_user(capsys) -> None:
    ops = sg.ReductionToOneDevice(accumulation_fn=sum)
    shown = lines(capsys, sg.MirroredStrategy(FOUR, cross_device_ops=ops))
    assert shown[1:] == ["algorithm: custom function of the values of all replicas"]


def test_measured_times_and_the_rule_made_of_them(capsys) -> None:
    times_s = {
        Algorithm.COMPILER: {2**12: 0.002, 2**22: 0.01},
        Algorithm.RING: {2**12: 0.0005, 2**22: 0.02},
    }
    measured = MeasuredChoice(choose(times_s), times_s, "cached by process 0")
    options = sg.CommunicationOptions(reduction_dtype="bfloat16")
    topology = Topology(find_devices(FOUR[:1]))
    shown = lines(capsys, Strategy(topology, AutomaticOps(options, measured)))
    assert shown[0] == "1 replica on 1 process, cpu"
    assert shown[1] == "algorithm: ring up to 406.4 KiB, compiler above"
    assert shown[3].startswith("float32 gradients: sent as bfloat16")
    assert shown[4] == "Milliseconds per float32 sum, cached by process 0:"
    assert shown[5].split() == ["4", "KiB", "4", "MiB"]
    assert [line.split() for line in shown[6:]] == [
        ["compiler", "2.000", "10.000"],
        ["ring", "0.500", "20.000"],
    ]


def test_option_names_the_algorithm_whatever_was_measured(capsys) -> None:
    for name, expected in [
        ("RING", "ring"),
        ("HIERARCHICAL", "hierarchical"),
        ("NCCL", "compiler"),
    ]:
        options = sg.CommunicationOptions(implementation=name)
        strategy = sg.MultiWorkerMirroredStrategy(communication_options=options)
        assert lines(capsys, strategy)[1] == f"algorithm: {expected}"


# Threads that compute as XLA's do.

_SMALLEST = np.finfo(np.float32).tiny


def _halved(*, is_flushed: bool) -> np.ndarray:
    found = []

    def halve() -> None:
        if is_flushed:
            flush_denormals()
        found.append(np.full(100, _SMALLEST) * np.float32(0.5))

    thread = threading.Thread(target=halve)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in denormals._CONTROLS,
    reason="the mode can be set on Linux, on x86-64 and ARM",
)
def test_a_thread_that_flushes_computes_as_xla() -> None:
    of_xla = jax.jit(lambda x: x * 0.5)(np.full(100, _SMALLEST))
    np.testing.assert_array_equal(_halved(is_flushed=True), of_xla)


def test_other_threads_keep_their_mode() -> None:
    _halved(is_flushed=True)
    assert _halved(is_flushed=False).all()


def test_another_system_keeps_its_mode(monkeypatch) -> None:
    monkeypatch.setattr(denormals.sys, "platform", "darwin")
    assert _halved(is_flushed=True).all()
