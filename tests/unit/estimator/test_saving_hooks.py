"""CheckpointSaverHook saves and calls listeners at the same steps as TensorFlow's."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import stratagem as sg
from stratagem.estimator.hooks import StopAtStepHook
from stratagem.estimator.saving_hooks import (
    CheckpointSaverHook,
    CheckpointSaverListener,
    StepCounterHook,
    SummarySaverHook,
)
from stratagem.strategies.collectives import host
from tests.unit.estimator.fake_loop import FakeClock, FakeSession
from tests.unit.estimator.read_scalars import read_scalars


class Listener(CheckpointSaverListener):
    def __init__(self, *, stops_at: int = -1) -> None:
        self.calls = []
        self._stops_at = stops_at

    def begin(self) -> None:
        self.calls.append("begin")

    def before_save(self, session, global_step_value) -> None:
        self.calls.append(("before", global_step_value, list(session.saved)))

    def after_save(self, session, global_step_value):
        self.calls.append(("after", global_step_value, list(session.saved)))
        return global_step_value == self._stops_at

    def end(self, session, global_step_value) -> None:
        self.calls.append(("end", global_step_value))


@pytest.mark.parametrize(
    ("start", "num_steps", "saved"),
    [(0, 7, [0, 3, 6, 7]), (0, 6, [0, 3, 6]), (5, 4, [5, 8, 9]), (0, 1, [0, 1]), (0, 0, [0])],
)
def test_saves_at_the_start_every_n_steps_and_at_the_end(start, num_steps, saved) -> None:
    session = FakeSession(global_step=start)
    hook = CheckpointSaverHook("model", save_steps=3, scaffold=sg.estimator.Scaffold())
    session.loop([hook], num_steps)
    assert session.saved == saved
    session.loop([hook], 1)  # a second run saves its start
    assert session.saved[len(saved) :] == [saved[-1], saved[-1] + 1]


def test_saves_every_n_seconds() -> None:
    clock = FakeClock()
    session = FakeSession(on_step=clock.passing(4))
    session.loop([CheckpointSaverHook("model", save_secs=10, clock=clock)], 8)
    assert session.saved == [0, 3, 6, 8]


def test_listeners_are_called_around_each_save() -> None:
    listener = Listener()
    hook = CheckpointSaverHook("model", save_steps=2, listeners=[listener])
    FakeSession().loop([hook], 3)
    assert listener.calls == [
        "begin",
        ("before", 0, []),
        ("after", 0, [0]),
        ("before", 2, [0]),
        ("after", 2, [0, 2]),
        ("before", 3, [0, 2]),
        ("after", 3, [0, 2, 3]),
        ("end", 3),
    ]


def test_listener_ends_training() -> None:
    listeners = [Listener(stops_at=4), Listener()]
    hook = CheckpointSaverHook("model", save_steps=2, listeners=listeners)
    session = FakeSession()
    assert session.loop([hook], 100) == 4
    assert session.saved == [0, 2, 4]
    assert listeners[1].calls[-1] == ("end", 4)


def test_listener_of_another_process_ends_training(monkeypatch) -> None:
    monkeypatch.setattr(
        host, "all_gather_object", lambda own, name: [own, session.global_step == 4]
    )
    session = FakeSession()
    assert session.loop([CheckpointSaverHook("model", save_steps=2)], 100) == 4


class Saver:
    def __init__(self) -> None:
        self.sessions = []

    def save(self, session) -> str:
        self.sessions.append((session, session.global_step))
        return "path"


def test_saver_saves_instead_of_the_session() -> None:
    saver, scaffolds, session = Saver(), Saver(), FakeSession()
    scaffold = sg.estimator.Scaffold(saver=scaffolds)
    hooks = [
        CheckpointSaverHook("other", save_steps=2, saver=saver, checkpoint_basename="mine"),
        CheckpointSaverHook("other", save_steps=2, scaffold=scaffold),
    ]
    session.loop(hooks, 2)
    assert session.saved == []
    assert saver.sessions == scaffolds.sessions == [(session, 0), (session, 2)]


def test_other_folder_without_saver_is_an_error() -> None:
    hook = CheckpointSaverHook("other", save_steps=2)
    with pytest.raises(ValueError, match="checkpoint_dir='other' is not the Estimator's folder"):
        FakeSession().loop([hook], 2)
    session = FakeSession("model/../model/")
    session.loop([CheckpointSaverHook("model", save_steps=2)], 1)
    assert session.saved == [0, 1]


@pytest.mark.parametrize("listeners", [[object()], Listener(), [Listener]])
def test_other_listeners_are_an_error(listeners) -> None:
    with pytest.raises(
        TypeError, match=r"listeners=.* is (?s:.)*a list or tuple of CheckpointSaverListener"
    ):
        CheckpointSaverHook("model", save_steps=1, listeners=listeners)


# SummarySaverHook writes summaries that TensorBoard reads.


def session_of(tmp_path, **options) -> FakeSession:
    values = options.pop("values", lambda name, step: np.float32(step / 4))
    return FakeSession(str(tmp_path / "model"), values=values, **options)


def test_writes_the_first_step_and_every_nth(tmp_path) -> None:
    session = session_of(tmp_path, global_step=10)
    op = {"my_loss": "loss", "other": "x"}
    hook = SummarySaverHook(3, output_dir=tmp_path / "logs", summary_op=op)
    session.loop([hook], 5)
    session.loop([hook], 1)  # with a writer of its own
    points = [(11, 2.75), (14, 3.5), (16, 4.0)]
    assert read_scalars(tmp_path / "logs") == {"my_loss": points, "other": points}
    assert [step for step, _ in session.fetched] == [11, 14, 16]


@pytest.mark.parametrize("is_given", [True, False])
def test_writer_is_the_given_one_or_the_sessions(tmp_path, is_given) -> None:
    session = session_of(tmp_path)
    writer = sg.summary.create_file_writer(str(tmp_path / "here"))
    options = {"summary_writer": writer}
    if not is_given:
        session.summary_writer, options = writer, {"output_dir": session.model_dir}
    session.loop([SummarySaverHook(1, summary_op=["loss"], **options)], 2)
    assert read_scalars(tmp_path / "here") == {"loss": [(1, 0.25), (2, 0.5)]}
    with writer.as_default(3):  # it is not the hook's to close
        sg.summary.scalar("loss", 0.75)
    writer.close()


def test_only_the_chief_writes(tmp_path) -> None:
    session = session_of(tmp_path)
    session.is_chief = False
    session.loop([SummarySaverHook(1, output_dir=tmp_path / "logs", summary_op="loss")], 2)
    assert not (tmp_path / "logs").exists()


# StepCounterHook logs steps per second and writes summaries.


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="stratagem.estimator")
    return lambda: [record.getMessage() for record in caplog.records]


def session_in_time(tmp_path, clock, seconds_per_step: float) -> FakeSession:
    return FakeSession(str(tmp_path / "model"), on_step=clock.passing(seconds_per_step))


def test_counts_every_n_steps(tmp_path, lines) -> None:
    clock = FakeClock()
    session = session_in_time(tmp_path, clock, 0.25)
    session.loop([StepCounterHook(3, output_dir=tmp_path / "logs", clock=clock)], 8)
    assert lines() == ["global_step/sec: 4"] * 2
    assert read_scalars(tmp_path / "logs") == {"global_step/sec": [(4, 4.0), (7, 4.0)]}
    assert session.fetched == []


def test_counts_every_n_seconds(tmp_path, lines) -> None:
    clock = FakeClock()
    hook = StepCounterHook(None, 1.5, clock=clock)
    session_in_time(tmp_path, clock, 0.5).loop([hook], 7)
    still = StepCounterHook(1, clock=clock)
    session_in_time(tmp_path, clock, 0.0).loop([still], 4)  # gives no number
    assert lines() == ["global_step/sec: 2", "global_step/sec: 2"]


@pytest.mark.parametrize(
    ("limit", "num_steps"), [({"num_steps": 4}, 4), ({"last_step": 13}, 3), ({"last_step": 5}, 1)]
)
def test_training_stops_at_the_step(limit, num_steps) -> None:
    session = FakeSession(global_step=10)
    assert session.loop([StopAtStepHook(**limit)], 100) == num_steps
    assert session.global_step == 10 + num_steps
