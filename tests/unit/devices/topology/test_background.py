"""Programs beside later ones: which may be, how they start, and the threads that they need."""

from __future__ import annotations

import os

import jax.numpy as jnp
import pytest

from stratagem.devices import background
from stratagem.devices.finding import find_devices
from stratagem.devices.lockstep import wait_for_background
from stratagem.devices.mesh import Topology


@pytest.fixture(autouse=True)
def _no_flights():
    yield
    background.background_flights.clear()


def test_devices_of_one_process_run_no_program_beside() -> None:
    assert not background.can_run_beside(Topology(find_devices(["cpu:0", "cpu:1"])))
    assert not background.can_run_beside(Topology(None))


def test_a_program_starts_in_another_thread_and_is_in_flight() -> None:
    value = jnp.ones(3)
    outputs = background.start_beside("double", lambda: (2 * value, value))
    assert outputs.tolist() == [2, 2, 2]
    (flight,) = background.background_flights
    assert flight.name == "double"
    assert flight.token is value


def test_an_error_of_the_start_is_raised_and_nothing_is_in_flight() -> None:
    def fail():
        raise ValueError("too large")

    with pytest.raises(ValueError, match="too large"):
        background.start_beside("fail", fail)
    assert not background.background_flights


def test_waiting_ends_with_the_program_of_a_token() -> None:
    tokens = [jnp.zeros(()) for _ in range(3)]
    for token in tokens:
        background.start_beside("program", lambda token=token: (None, token))
    wait_for_background(tokens[1])
    assert [one.token for one in background.background_flights] == tokens[2:]
    wait_for_background()
    assert not background.background_flights


@pytest.mark.parametrize(
    ("cores", "num_devices", "given", "expected"),
    [({0}, 1, None, "2"), ({0}, 1, "7", "7"), ({0}, 2, None, None), ({0, 1}, 1, None, None)],
)
def test_one_core_gets_a_second_thread(cores, num_devices, given, expected, monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores, raising=False)
    monkeypatch.setattr(background, "num_cpu_devices", lambda: num_devices)
    monkeypatch.setenv("NPROC", given or "")
    if given is None:
        monkeypatch.delenv("NPROC")
    background.add_thread_for_background()
    assert os.environ.get("NPROC") == expected
