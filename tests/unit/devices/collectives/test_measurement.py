"""Measurement of collectives, and the cache of times."""

from __future__ import annotations

import json
import math

import jax
import numpy as np
import pytest

from stratagem.devices.collectives import measurement
from stratagem.devices.collectives.choice import Algorithm, Choice
from stratagem.devices.collectives.measurement import (
    SIZES_BYTES,
    MeasuredChoice,
    measure_times,
    measured_choice,
)
from stratagem.devices.mesh import Topology
from tests.unit.devices.collectives.sharing import served
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
