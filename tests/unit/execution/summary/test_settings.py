"""The default writer, step and condition of the innermost block, per thread."""

from __future__ import annotations

import threading
from pathlib import Path

import jax
import numpy as np
import pytest

import stratagem as sg
from tests.unit.execution.summary.events import Read

set_step, get_step = sg.summary.experimental.set_step, sg.summary.experimental.get_step


@pytest.fixture(autouse=True)
def no_step_is_left():
    yield
    set_step(None)


def test_step_of_the_innermost_block_counts(tmp_path: Path) -> None:
    writer = sg.summary.create_file_writer(tmp_path)
    set_step(1)
    with writer.as_default():
        sg.summary.scalar("a", 0.0)
        with writer.as_default(step=5):
            sg.summary.scalar("a", 0.0)
            set_step(6)
            sg.summary.scalar("a", 0.0)
            sg.summary.scalar("a", 0.0, step=9)
        sg.summary.scalar("a", 0.0)
    assert get_step() == 1
    writer.close()
    assert Read(tmp_path).steps("a") == [1, 5, 6, 9, 1]


def test_step_may_be_a_variable(tmp_path: Path) -> None:
    count, writer = sg.Variable(0, dtype="int32"), sg.summary.create_file_writer(tmp_path)
    with writer.as_default(step=count):
        assert get_step() is count
        for _ in range(3):
            sg.summary.scalar("a", sg.Variable(2.5))
            count.assign_add(2)
    writer.close()
    assert Read(tmp_path).numbers("a") == [(0, 2.5), (2, 2.5), (4, 2.5)]


@pytest.mark.parametrize("step", [1.5, "3", True, np.array([1, 2]), sg.Variable(1.0)])
def test_step_that_is_not_an_integer_is_refused(step) -> None:
    with pytest.raises(TypeError, match="Expected an integer, or an integer variable"):
        set_step(step)
    with pytest.raises(TypeError, match="Expected an integer, or an integer variable"):
        sg.summary.create_noop_writer().as_default(step).__enter__()


def test_condition_of_the_innermost_block_counts(tmp_path: Path) -> None:
    writer = sg.summary.create_file_writer(tmp_path)
    for step in range(4):
        even = lambda step=step: step % 2 == 0  # noqa: E731
        with writer.as_default(step), sg.summary.record_if(even):
            assert sg.summary.should_record_summaries() is (step % 2 == 0)
            assert sg.summary.scalar("even", 0.0) is (step % 2 == 0)
            with sg.summary.record_if(condition=True):
                sg.summary.scalar("all", 0.0)
            with sg.summary.record_if(np.bool_(False)):
                sg.summary.scalar("none", 0.0)
            with sg.summary.record_if(jax.numpy.asarray(step) > 2):
                sg.summary.scalar("late", 0.0)
    writer.close()
    found = Read(tmp_path)
    assert found.tags == ["all", "even", "late"]
    assert [found.steps(tag) for tag in found.tags] == [[0, 1, 2, 3], [0, 2], [3]]


@pytest.mark.parametrize("condition", [1, "yes", None, np.ones(2, bool)])
def test_condition_that_is_invalid_is_refused(condition) -> None:
    with (
        pytest.raises(TypeError, match="Expected a bool, a traced scalar boolean"),
        sg.summary.record_if(condition),
    ):
        pass


def test_settings_are_those_of_a_thread(tmp_path: Path) -> None:
    seen = []
    with sg.summary.create_file_writer(tmp_path).as_default(step=1):
        thread = threading.Thread(target=lambda: seen.append(get_step()))
        thread.start()
        thread.join()
        assert get_step() == 1
    assert seen == [None]
