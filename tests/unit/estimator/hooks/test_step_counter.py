"""CheckpointSaverHook saves and calls listeners at the same steps as TensorFlow's."""

from __future__ import annotations

import logging
import types
from typing import Any

import numpy as np
import pytest

import stratagem as sg
from stratagem.devices.collectives import host
from stratagem.estimator.hooks import (
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StopAtStepHook,
)
from stratagem.estimator.saving_hooks import (
    CheckpointSaverHook,
    CheckpointSaverListener,
    StepCounterHook,
    SummaryOutput,
    SummarySaverHook,
)
from tests.unit.estimator.hooks.fake_loop import FakeClock, FakeSession
from tests.unit.estimator.hooks.read_scalars import read_scalars
from tests.unit.execution.summary.events import Read


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
    [
        (0, 7, [0, 3, 6, 7]),
        (0, 6, [0, 3, 6]),
        (5, 4, [5, 8, 9]),
        (0, 1, [0, 1]),
        (0, 0, [0]),
    ],
)
def test_saves_at_the_start_every_n_steps_and_at_the_end(start, num_steps, saved) -> None:
    session = FakeSession(global_step=start)
    session.loop([CheckpointSaverHook("model", save_steps=3)], num_steps)
    assert session.saved == saved


def test_saves_every_n_seconds() -> None:
    clock = FakeClock()

    def pass_4_seconds(step: int) -> None:
        clock.now_s += 4

    session = FakeSession(on_step=pass_4_seconds)
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


def test_last_step_is_saved_once() -> None:
    session = FakeSession()
    session.loop([CheckpointSaverHook("model", save_steps=2), StopAtStepHook(last_step=4)], 100)
    assert session.saved == [0, 2, 4]


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


def test_second_run_saves_its_start() -> None:
    hook, session = CheckpointSaverHook("model", save_steps=5), FakeSession()
    session.loop([hook], 2)
    session.loop([hook], 2)
    assert session.saved == [0, 2, 2, 4]


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


def test_scaffold_without_saver_leaves_it_to_the_session() -> None:
    session = FakeSession()
    hook = CheckpointSaverHook("model", save_steps=2, scaffold=sg.estimator.Scaffold())
    session.loop([hook], 2)
    assert session.saved == [0, 2]


def test_saver_and_scaffold_are_an_error() -> None:
    with pytest.raises(ValueError, match="received both a saver and a scaffold"):
        CheckpointSaverHook("model", save_steps=2, saver=Saver(), scaffold=Saver())


def test_other_name_without_saver_is_an_error() -> None:
    with pytest.raises(ValueError, match="checkpoint_basename='mine' is set without a saver"):
        CheckpointSaverHook("model", save_steps=2, checkpoint_basename="mine")


def test_other_folder_without_saver_is_an_error() -> None:
    hook = CheckpointSaverHook("other", save_steps=2)
    with pytest.raises(ValueError, match="checkpoint_dir='other' is not the Estimator's folder"):
        FakeSession().loop([hook], 2)
    session = FakeSession("model/../model/")
    session.loop([CheckpointSaverHook("model", save_steps=2)], 1)
    assert session.saved == [0, 1]


@pytest.mark.parametrize("given", [{}, {"save_secs": 1, "save_steps": 1}])
def test_interval_has_to_be_one_of_two(given) -> None:
    with pytest.raises(ValueError, match="A timer received every_secs="):
        CheckpointSaverHook("model", **given)


@pytest.mark.parametrize("listeners", [[object()], Listener(), [Listener]])
def test_other_listeners_are_an_error(listeners) -> None:
    with pytest.raises(
        TypeError, match=r"listeners=.* is not a list of CheckpointSaverListener objects"
    ):
        CheckpointSaverHook("model", save_steps=1, listeners=listeners)


# SummarySaverHook writes summaries that TensorBoard reads.


def session_of(tmp_path, **options) -> FakeSession:
    values = options.pop("values", lambda name, step: np.float32(step / 4))
    return FakeSession(str(tmp_path / "model"), values=values, **options)


def test_writes_the_first_step_and_every_nth(tmp_path) -> None:
    session = session_of(tmp_path, global_step=10)
    op = {"my_loss": "loss", "other": "x"}
    session.loop([SummarySaverHook(3, output_dir=tmp_path / "logs", summary_op=op)], 5)
    points = [(11, 2.75), (14, 3.5)]
    assert read_scalars(tmp_path / "logs") == {"my_loss": points, "other": points}
    assert [step for step, _ in session.fetched] == [11, 14]


def test_writes_every_n_seconds(tmp_path) -> None:
    clock = FakeClock()

    def pass_a_second(step: int) -> None:
        clock.now_s += 1

    session = session_of(tmp_path, on_step=pass_a_second)
    hook = SummarySaverHook(
        save_secs=2.5, output_dir=tmp_path / "logs", summary_op="loss", clock=clock
    )
    session.loop([hook], 9)
    assert [step for step, _ in read_scalars(tmp_path / "logs")["loss"]] == [1, 5, 9]


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


def test_own_writer_is_made_anew_in_a_second_run(tmp_path) -> None:
    hook, session = SummarySaverHook(1, None, tmp_path / "logs", summary_op="loss"), None
    session = session_of(tmp_path)
    session.loop([hook], 1)
    session.loop([hook], 1)
    assert [step for step, _ in read_scalars(tmp_path / "logs")["loss"]] == [1, 2]


def test_wrong_arguments_are_errors() -> None:
    with pytest.raises(ValueError, match="SummarySaverHook received summary_op=None"):
        SummarySaverHook(1)
    with pytest.raises(ValueError, match="received summary_op='loss', scaffold=<"):
        SummarySaverHook(1, summary_op="loss", scaffold=sg.estimator.Scaffold())
    with pytest.raises(ValueError, match="A timer received every_secs="):
        SummarySaverHook(summary_op="loss")


# Writer of a hook: its own, the session's, or none, and who closes it.


class Writer:
    """Counts the calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")


def session(folder: Any, *, is_chief: bool = True) -> Any:
    return types.SimpleNamespace(model_dir=str(folder), summary_writer=Writer(), is_chief=is_chief)


def test_external_writer_is_used_and_only_flushed(tmp_path) -> None:
    writer = Writer()
    output = SummaryOutput(tmp_path / "other", writer)
    output.open(session(tmp_path))
    output.close()
    output.close()
    assert writer.calls == ["flush"]
    assert not (tmp_path / "other").exists()


def test_writer_of_the_session_is_used_for_its_folder(tmp_path) -> None:
    output, own = SummaryOutput(tmp_path / "a" / "..", None), session(tmp_path)
    (tmp_path / "a").mkdir()
    output.open(own)
    output.close()
    assert own.summary_writer.calls == ["flush"]


def test_another_folder_gets_a_file_of_its_own(tmp_path) -> None:
    output = SummaryOutput(str(tmp_path / "other"), None)
    output.open(session(tmp_path))
    output.write({"steps_per_s": 2.5}, 7)
    output.close()
    assert Read(tmp_path / "other").numbers("steps_per_s") == [(7, 2.5)]


@pytest.mark.parametrize(
    ("folder", "is_chief"), [(None, True), ("other", False)], ids=["no folder", "no chief"]
)
def test_otherwise_nothing_is_written(folder, is_chief, tmp_path) -> None:
    output = SummaryOutput(folder and tmp_path / folder, None)
    output.open(session(tmp_path, is_chief=is_chief))
    with sg.summary.create_noop_writer().as_default():
        output.write({"loss": 1.0}, 1)
    output.close()
    assert list(tmp_path.iterdir()) == []


# StepCounterHook logs steps per second and writes summaries.


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="stratagem.estimator")
    return lambda: [record.getMessage() for record in caplog.records]


def session_of_of_step_counter(tmp_path, clock, seconds_per_step: float) -> FakeSession:
    def pass_time(step: int) -> None:
        clock.now_s += seconds_per_step

    return FakeSession(str(tmp_path / "model"), on_step=pass_time)


def test_counts_every_n_steps(tmp_path, lines) -> None:
    clock = FakeClock()
    session = session_of_of_step_counter(tmp_path, clock, 0.25)
    session.loop([StepCounterHook(3, output_dir=tmp_path / "logs", clock=clock)], 8)
    assert lines() == ["global_step/sec: 4"] * 2
    assert read_scalars(tmp_path / "logs") == {"global_step/sec": [(4, 4.0), (7, 4.0)]}
    assert session.fetched == []


def test_counts_every_n_seconds(tmp_path, lines) -> None:
    clock = FakeClock()
    hook = StepCounterHook(None, 1.5, clock=clock)
    session_of_of_step_counter(tmp_path, clock, 0.5).loop([hook], 7)
    assert lines() == ["global_step/sec: 2", "global_step/sec: 2"]


def test_time_that_stands_still_gives_no_number(tmp_path, lines) -> None:
    clock = FakeClock()
    session_of_of_step_counter(tmp_path, clock, 0.0).loop([StepCounterHook(1, clock=clock)], 4)
    assert lines() == []


@pytest.mark.parametrize("given", [{"every_n_secs": 1}, {"every_n_steps": None}])
def test_step_counter_interval_has_to_be_one_of_two(given) -> None:
    with pytest.raises(ValueError, match="StepCounterHook received every_n_steps="):
        StepCounterHook(**given)


# Base class of hooks, and its arguments and values.


def test_hook_that_overrides_nothing_asks_for_nothing() -> None:
    hook = SessionRunHook()
    context = SessionRunContext(SessionRunArgs("loss"), "session")
    hook.begin()
    hook.after_create_session("session", None)
    assert hook.before_run(context) is None
    hook.after_run(context, SessionRunValues(None))
    hook.end("session")
    assert not context.stop_requested


def test_context_tells_its_session_and_the_stop() -> None:
    context = SessionRunContext(SessionRunArgs("loss"), "session")
    context.request_stop()
    assert context.stop_requested
    assert (context.session, context.original_args.fetches) == ("session", "loss")


def test_feeding_is_an_error() -> None:
    with pytest.raises(NotImplementedError, match=r"feed_dict=.* is not supported"):
        SessionRunArgs("loss", feed_dict={"x": 1})


# StopAtStepHook stops at the right step.


def test_num_steps_count_from_the_begin() -> None:
    session = FakeSession(global_step=10)
    assert session.loop([StopAtStepHook(num_steps=4)], 100) == 4
    assert session.global_step == 14


def test_last_step_is_the_global_step() -> None:
    session = FakeSession(global_step=10)
    assert session.loop([StopAtStepHook(last_step=13)], 100) == 3


def test_step_that_is_past_ends_after_one() -> None:
    assert FakeSession(global_step=10).loop([StopAtStepHook(last_step=5)], 100) == 1


@pytest.mark.parametrize("given", [{}, {"num_steps": 1, "last_step": 1}])
def test_neither_and_both_are_errors(given) -> None:
    with pytest.raises(ValueError, match="StopAtStepHook received num_steps="):
        StopAtStepHook(**given)
