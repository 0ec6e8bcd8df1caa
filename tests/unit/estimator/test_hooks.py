"""Timers follow TensorFlow's SecondOrStepTimer, and one clock across processes."""

from __future__ import annotations

import itertools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stratagem.errors import DeadlineExceededError
from stratagem.estimator import hooks as hooks_module
from stratagem.estimator.hooks import (
    FinalOpsHook,
    GlobalStepWaiterHook,
    LoggingTensorHook,
    NanLossDuringTrainingError,
    NanTensorHook,
    SecondOrStepTimer,
    SessionRunArgs,
    StopAtStepHook,
    SynchronizedTimer,
)
from stratagem.estimator.saving_hooks import (
    CheckpointSaverHook,
    ProfilerHook,
    StepCounterHook,
    SummarySaverHook,
)
from stratagem.strategies.collectives import host
from tests.unit.estimator.fake_loop import FakeClock, FakeSession


def triggered(timer, steps, *, before_each=lambda: None) -> list[int]:
    found = []
    for step in steps:
        before_each()
        if timer.should_trigger_for_step(step):
            timer.update_last_triggered_step(step)
            found.append(step)
    return found


@pytest.mark.parametrize("kind", [SecondOrStepTimer, SynchronizedTimer])
def test_steps_trigger_at_the_first_and_then_after_each_interval(kind) -> None:
    timer = kind(every_steps=3)
    assert triggered(timer, [1, 2, 3, 4, 5, 6, 7, 20, 21, 23]) == [1, 4, 7, 20, 23]
    timer.reset()
    assert triggered(timer, [5, 6]) == [5]


@pytest.mark.parametrize("kind", [SecondOrStepTimer, SynchronizedTimer])
def test_seconds_trigger_when_they_are_over(kind) -> None:
    clock = FakeClock()
    timer = kind(every_secs=10, clock=clock)
    assert triggered(timer, range(8), before_each=clock.passing(4)) == [0, 3, 6]


def test_tells_what_passed_since_it_was_triggered() -> None:
    clock = FakeClock()
    timer = SecondOrStepTimer(every_secs=1, clock=clock)
    assert timer.last_triggered_step() is None
    assert timer.update_last_triggered_step(5) == (None, None)
    clock.now_s += 2.5
    assert timer.update_last_triggered_step(15) == (2.5, 10)
    assert timer.last_triggered_step() == 15
    clock.now_s += 100
    assert not timer.should_trigger_for_step(15)
    assert timer.should_trigger_for_step(16)


class Processes:
    """Several timers in lockstep that count their broadcasts."""

    def __init__(self, monkeypatch, clocks) -> None:
        self.timers = [SynchronizedTimer(every_secs=10, clock=clock) for clock in clocks]
        self.num_told = 0
        self._asking, self._told = 0, {}
        monkeypatch.setattr(hooks_module, "current_group", lambda: "a group")
        monkeypatch.setattr(host, "broadcast_object", self._broadcast)

    def _broadcast(self, value, *, name):
        assert name == "whether a hook is due"
        if self._asking == 0:
            self.num_told += 1
            self._told = value
        return self._told

    def triggered_at(self, step) -> list[bool]:
        found = []
        for index, timer in enumerate(self.timers):
            self._asking = index
            found.append(timer.should_trigger_for_step(step))
            if found[-1]:
                timer.update_last_triggered_step(step)
        return found


def test_processes_trigger_at_the_same_steps_whatever_their_clocks_say(monkeypatch) -> None:
    clocks = [FakeClock(), FakeClock()]
    processes, steps = Processes(monkeypatch, clocks), []
    for step in range(1000):
        clocks[0].now_s += 0.1
        clocks[1].now_s += 0.9
        found = processes.triggered_at(step)
        assert found[0] == found[1]
        steps += [step] if found[0] else []
    gaps = {after - before for before, after in itertools.pairwise(steps)}
    # 10 s are 100 steps; it is looked once in 10 steps, so it can be late by so many.
    assert steps[0] == 0
    assert gaps <= set(range(100, 111))
    assert processes.num_told <= 1000 / 10 + 10


# LoggingTensorHook logs at the same steps as TensorFlow's.


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="stratagem.estimator")
    return lambda: [record.getMessage() for record in caplog.records]


def fetched_steps(session) -> list[int]:
    return [step for step, _ in session.fetched]


def test_every_n_iterations_begin_with_the_first(lines) -> None:
    clock = FakeClock()
    session = FakeSession(global_step=50, on_step=clock.passing(0.5))
    hook = LoggingTensorHook({"b": "loss", "a": "global_step"}, every_n_iter=3, clock=clock)
    session.loop([hook], 8)
    assert fetched_steps(session) == [51, 54, 57]
    assert lines() == ["a = 51, b = 51", "a = 54, b = 54 (1.500 sec)", "a = 57, b = 57 (1.500 sec)"]


def test_every_n_seconds(lines) -> None:
    clock = FakeClock()
    session = FakeSession(on_step=clock.passing(1))
    session.loop([LoggingTensorHook(["loss"], every_n_secs=2.5, clock=clock)], 9)
    # The clock is asked before a step, and started anew after it.
    assert lines() == ["loss = 1", "loss = 5 (4.000 sec)", "loss = 9 (4.000 sec)"]


def test_at_end_and_every_n_iterations(lines) -> None:
    session = FakeSession()
    session.loop([LoggingTensorHook(["loss"], every_n_iter=4, at_end=True)], 6)
    session.loop([LoggingTensorHook(["loss"], at_end=True)], 5)
    assert fetched_steps(session) == [1, 5, 6, 11]
    assert lines()[-1] == "loss = 11"


def test_second_run_begins_anew(lines) -> None:
    hook, session = LoggingTensorHook(["loss"], every_n_iter=10), FakeSession()
    session.loop([hook], 3)
    session.loop([hook], 3)
    assert fetched_steps(session) == [1, 4]


def test_formatter_makes_the_line(lines) -> None:
    hook = LoggingTensorHook(["x"], 1, formatter=lambda values: f"<{values['x']}> 100%")
    FakeSession(values=lambda name, step: np.float32(0.5)).loop([hook], 1)
    plain = LoggingTensorHook(["x"], 1)
    FakeSession(values=lambda name, step: np.array([0.0001, 1.0])).loop([plain], 1)
    assert lines() == ["<0.5> 100%", "x = [0.0001 1.    ]"]


# ProfilerHook profiles single steps.


def test_profiles_the_first_step_and_every_nth(tmp_path, monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder, **options: calls.append(folder))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    session = FakeSession(global_step=20)
    session.loop([ProfilerHook(save_steps=3, output_dir=tmp_path)], 5)
    first, second = tmp_path / "timeline-21", tmp_path / "timeline-24"
    assert calls == [first, "stop", second, "stop"]
    assert session.fetched == [(21, "loss"), (24, "loss")]


def test_profile_of_a_step_is_written(tmp_path) -> None:
    session = FakeSession(on_step=lambda step: jax.jit(jnp.sin)(jnp.ones(3)).block_until_ready())
    session.mode = "infer"
    session.loop([ProfilerHook(save_steps=100, output_dir=tmp_path)], 2)
    (trace,) = tmp_path.glob("timeline-1/plugins/profile/*/perfetto_trace.json.gz")
    assert trace.stat().st_size > 0
    assert session.fetched == [(1, "global_step")]


def test_profile_whose_step_does_not_come_is_ended(tmp_path, monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder, **options: calls.append("go"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    hook, session = ProfilerHook(save_steps=1), FakeSession()

    class EndOfDataError(Exception):
        pass

    def fail(step: int) -> None:
        raise EndOfDataError

    failing = FakeSession(on_step=fail)
    with pytest.raises(EndOfDataError):
        failing.loop([hook], 1)
    hook.end(session)
    assert calls == ["go", "stop"]


# GlobalStepWaiterHook waits for other workers' steps.


class Others:
    """Advances the global step while the hook waits."""

    def __init__(self, session, clock, *, steps_per_look: int, stops_at: int = 10**9) -> None:
        self.session, self.clock, self.looks = session, clock, 0
        self._steps, self._stops_at = steps_per_look, stops_at

    def __call__(self, seconds: float) -> None:
        self.looks += 1
        self.clock.now_s += seconds
        new = self.session.global_step + self._steps
        self.session.global_step = min(new, max(self._stops_at, self.session.global_step))


@pytest.mark.parametrize(("wait_until", "looks"), [(0, 0), (-5, 0), (10, 3), (12, 3), (13, 4)])
def test_waits_until_the_global_step_is_there(wait_until, looks) -> None:
    session, clock = FakeSession(), FakeClock()
    others = Others(session, clock, steps_per_look=4)
    hook = GlobalStepWaiterHook(wait_until, timeout_s=60, clock=clock, sleep=others)
    session.loop([hook], 5)
    assert others.looks == looks
    session.loop([hook], 1)
    assert others.looks == looks


def test_global_step_that_does_not_move_is_an_error() -> None:
    session, clock = FakeSession(), FakeClock()
    others = Others(session, clock, steps_per_look=4, stops_at=8)
    hook = GlobalStepWaiterHook(100, timeout_s=60, clock=clock, sleep=others)
    with pytest.raises(DeadlineExceededError, match="The global step stayed at 8 for 60 s"):
        session.loop([hook], 5)
    assert others.looks == 122  # 60 s after the second look, in which it moved for the last time


def test_limit_is_that_of_joining(monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_JOIN_TIMEOUT_S", "2")
    session, clock = FakeSession(), FakeClock()
    others = Others(session, clock, steps_per_look=0)
    hook = GlobalStepWaiterHook(1, clock=clock, sleep=others)
    with pytest.raises(DeadlineExceededError, match="The global step stayed at 0 for 2 s"):
        session.loop([hook], 5)


# NanTensorHook fails or stops on NaN losses.


def nan_at(bad_step: int):
    return lambda name, step: np.float32("nan" if step == bad_step else 0.5)


def test_nan_is_an_error() -> None:
    session = FakeSession(values=nan_at(3))
    with pytest.raises(NanLossDuringTrainingError, match="became NaN at global step"):
        session.loop([NanTensorHook("loss")], 10)
    assert session.global_step == 3


def test_nan_ends_training_where_it_may_not_fail(caplog) -> None:
    caplog.set_level(logging.WARNING, logger="stratagem.estimator")
    session = FakeSession(values=nan_at(3))
    assert session.loop([NanTensorHook("loss", fail_on_nan_loss=False)], 10) == 3
    assert "The loss became NaN at global step 3: stopping training." in caplog.text


def test_numbers_and_infinity_pass() -> None:
    session = FakeSession(values=lambda name, step: np.float32("inf"))
    assert session.loop([NanTensorHook("loss")], 4) == 4
    assert [fetches for _, fetches in session.fetched] == [{"loss": "loss"}] * 4


# FinalOpsHook.


def test_values_are_those_of_the_last_step() -> None:
    hook = FinalOpsHook({"a": "loss", "b": ["x", "y"]})
    session = FakeSession(values=lambda name, step: f"{name} at {step}")
    session.loop([hook], 3)
    assert hook.final_ops_values == {"a": "loss at 3", "b": ["x at 3", "y at 3"]}
    assert len(session.fetched) == 1
    nothing = FinalOpsHook(None)
    session.loop([nothing], 3)
    assert nothing.final_ops_values is None
    assert len(session.fetched) == 1
    assert hook.tensors == {"final['a']": "loss", "final['b'][0]": "x", "final['b'][1]": "y"}


# Arguments that hooks refuse.

BOTH = {"every_n_iter": 1, "every_n_secs": 1}
WRONG = [
    (lambda: SecondOrStepTimer(), "A timer received every_secs=None and every_steps=None"),
    (lambda: SecondOrStepTimer(1, 1), "A timer received every_secs=1 and every_steps=1"),
    (lambda: SecondOrStepTimer(every_steps=-1), "every_steps=-1"),
    (lambda: SecondOrStepTimer(every_secs=-0.5), "every_secs=-0.5"),
    (lambda: LoggingTensorHook(["loss"]), "LoggingTensorHook received every_n_iter=None"),
    (lambda: LoggingTensorHook(["loss"], **BOTH), "LoggingTensorHook received every_n_iter=1"),
    (lambda: LoggingTensorHook(["loss"], at_end=True, **BOTH), "received every_n_iter=1"),
    (lambda: LoggingTensorHook(["loss"], every_n_iter=0), "every_n_iter=0"),
    (lambda: ProfilerHook(), "A timer received every_secs="),
    (lambda: CheckpointSaverHook("model"), "A timer received every_secs="),
    (lambda: StepCounterHook(every_n_secs=1), "A timer received every_secs=1"),
    (lambda: StepCounterHook(None), "A timer received every_secs=None"),
    (lambda: SummarySaverHook(summary_op="loss"), "A timer received every_secs="),
    (lambda: SummarySaverHook(1), "summary_op is missing"),
    (lambda: StopAtStepHook(), "StopAtStepHook received num_steps=None"),
    (lambda: StopAtStepHook(1, 1), "StopAtStepHook received num_steps=1"),
    (lambda: CheckpointSaverHook("model", 1, saver=object(), scaffold=object()), "received saver="),
    (
        lambda: CheckpointSaverHook("model", 1, checkpoint_basename="a"),
        "='a' is set without a saver",
    ),
]


@pytest.mark.parametrize(("make", "words"), WRONG, ids=range(len(WRONG)))
def test_wrong_arguments_are_errors(make, words) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("kind", [FinalOpsHook, SessionRunArgs])
def test_feeding_is_an_error(kind) -> None:
    with pytest.raises(NotImplementedError, match=r"feed_dict=.* is not supported"):
        kind("loss", {"x": 1})


def test_scaffold_has_no_summaries() -> None:
    with pytest.raises(NotImplementedError, match=r"scaffold=<.* is not supported"):
        SummarySaverHook(1, summary_op="loss", scaffold=object())
