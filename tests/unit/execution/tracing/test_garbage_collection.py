"""Pause of garbage collection."""

from __future__ import annotations

import gc
import threading

import pytest

import stratagem as sg
from stratagem.execution.tracing.garbage_collection import paused_garbage_collection


def test_collection_is_paused_while_a_step_is_traced_and_goes_on_after() -> None:
    seen = []
    strategy = sg.OneDeviceStrategy("cpu:0")
    strategy.run(lambda: seen.append(gc.isenabled()))
    assert seen == [False]
    assert gc.isenabled()


def test_an_error_in_the_step_ends_the_pause() -> None:
    def step() -> None:
        raise ValueError("of the step")

    with pytest.raises(ValueError, match="of the step"):
        sg.OneDeviceStrategy("cpu:0").run(step)
    assert gc.isenabled()


def test_collection_that_the_program_turned_off_stays_off() -> None:
    gc.disable()
    try:
        with paused_garbage_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_last_of_two_threads_ends_the_pause() -> None:
    inside, may_leave = threading.Event(), threading.Event()

    def trace() -> None:
        with paused_garbage_collection():
            inside.set()
            may_leave.wait(120)

    thread = threading.Thread(target=trace)
    thread.start()
    assert inside.wait(120)
    with paused_garbage_collection():
        pass
    assert not gc.isenabled()
    may_leave.set()
    thread.join()
    assert gc.isenabled()
