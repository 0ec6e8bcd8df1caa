"""CheckpointSaverHook saves and calls listeners at the same steps as TensorFlow's."""

from __future__ import annotations

import pytest

import stratagem as sg
from stratagem.devices.collectives import host
from stratagem.estimator.hooks.checkpoint_saver import CheckpointSaverHook, CheckpointSaverListener
from stratagem.estimator.hooks.session_run_hook import StopAtStepHook
from tests.unit.estimator.hooks.fake_loop import FakeClock, FakeSession


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
