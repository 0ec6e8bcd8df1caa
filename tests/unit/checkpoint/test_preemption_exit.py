"""Agreement on the step to save, with no notice, one, several, and errors."""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import pytest

import stratagem as sg
from stratagem.checkpoint import preemption as preemption_exit
from stratagem.checkpoint.preemption import (
    AgreedStep,
    PreemptionAction,
    PreemptionExit,
    print_status,
)
from stratagem.cluster.preemption.configuration import TerminationConfig
from stratagem.errors import DeadlineExceededError, UnavailableError
from stratagem.group.verdict import GroupLimits
from tests.unit.checkpoint.groups import LIMIT_S, Bell, Line
from tests.unit.group.process_group.members import joined, together

SAVE, EXIT = PreemptionAction.SAVE, PreemptionAction.EXIT


class Several:
    """Agreed steps of the members of a line, each with its own bell."""

    def __init__(self, count: int, *, grace_s: float = 0.0, barrier_s: float = LIMIT_S) -> None:
        self.line = Line(count, barrier_s=barrier_s)
        self.bells = [Bell() for _ in range(count)]
        self.steps: list[Any] = []
        for bell, member in zip(self.bells, self.line.members, strict=True):
            config = TerminationConfig(sources=[bell], grace_period=grace_s)
            self.steps.append(AgreedStep(config, member))
        for step in self.steps:
            step.start()

    def begin(self, index: int, count: int) -> None:
        """Begins steps of one process."""
        assert [self.steps[index].next_step() for _ in range(count)] == [None] * count

    def next_steps(self) -> list[PreemptionAction | None]:
        """Returns what each process is to do."""
        return [step.next_step() for step in self.steps]

    def deliver(self, count: int) -> list[tuple[int, list[int]]]:
        return [self.line.deliver() for _ in range(count)]

    def stop(self) -> None:
        for step in self.steps:
            step.stop()


@pytest.fixture
def made() -> Iterator[Callable[..., Several]]:
    """Makes members, which are stopped at the end."""
    with contextlib.ExitStack() as stack:

        def make(count: int = 2, **options: float) -> Several:
            several = Several(count, **options)
            stack.callback(several.stop)
            return several

        yield make


@pytest.fixture
def two(made) -> Several:
    return made()


@pytest.mark.parametrize("noticed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_largest_number_of_begun_steps_is_agreed_on(two, noticed) -> None:
    two.begin(0, 5)
    two.begin(1, 6)
    assert two.line.sent.empty()  # without notice
    two.bells[noticed].ring()
    assert two.deliver(3) == [(noticed, [1]), (0, [1, 5, 1]), (1, [1, 6, 1])]
    for numbers in ([], [1, 2], [1, 2, 3, 4], [7]):  # not valid, and ignored
        two.line.members[0].listener(1, numbers)
    two.begin(0, 1)
    assert two.next_steps() == [EXIT, EXIT]


def test_no_process_begins_a_step_before_all_have_reported_theirs(two) -> None:
    two.begin(0, 5)
    two.begin(1, 5)
    two.bells[1].ring()
    two.line.deliver(to=[0])
    asked: list[Any] = []
    thread = threading.Thread(target=lambda: asked.append(two.steps[0].next_step()), daemon=True)
    thread.start()
    two.begin(1, 1)  # has not heard of it yet, and is a step further now
    two.line.members[1].listener(1, [1])
    assert two.deliver(2) == [(0, [1, 5, 1]), (1, [1, 6, 1])]
    thread.join(LIMIT_S)
    assert asked == [None]
    assert two.next_steps() == [EXIT, EXIT]


def test_two_notices_at_once_are_one_agreement(two) -> None:
    two.begin(0, 3)
    two.begin(1, 4)
    for bell in two.bells:
        bell.ring()
        bell.ring()
    two.line.wait_for(2)
    delivered = two.deliver(4)
    assert sorted(delivered) == [(0, [1]), (0, [1, 3, 1]), (1, [1]), (1, [1, 4, 1])]
    two.begin(0, 1)
    assert two.next_steps() == [EXIT, EXIT]
    for index in range(2):  # `exit_fn` has returned
        two.begin(index, 3)
    assert two.line.sent.empty()


def test_process_that_stopped_or_ended_its_loop_still_reports_its_step(two) -> None:
    for index in range(2):
        two.begin(index, 2)
    two.steps[0].stop()
    two.bells[1].ring()
    assert two.deliver(3)[1:] == [(0, [1, 2, 1]), (1, [1, 2, 1])]


def test_end_of_the_group_ends_the_wait(two) -> None:
    two.line.members[0].error = UnavailableError("worker 1 (host1:1) died")
    two.bells[0].ring()
    two.line.deliver()
    with pytest.raises(UnavailableError, match="worker 1"):
        two.steps[0].next_step()


def test_grace_is_trained_through_until_it_is_nearly_over(made) -> None:
    several = made(grace_s=3600)
    several.begin(0, 2)
    several.begin(1, 2)
    several.bells[1].ring()
    assert several.deliver(3)[1:] == [(0, [1, 2, 0]), (1, [1, 2, 0])]
    assert several.next_steps() == [SAVE, SAVE]
    several.begin(0, 10)
    several.begin(1, 11)
    assert several.line.sent.empty()
    several.bells[0].ring(ago_s=3600)  # a later notice to another process leaves no time
    assert several.deliver(3) == [(0, [2]), (0, [2, 12, 1]), (1, [2, 13, 1])]
    several.begin(0, 1)
    assert several.next_steps() == [EXIT, EXIT]


def test_steps_and_saves_that_take_long_shorten_the_grace(made) -> None:
    several = made(grace_s=3600)
    several.bells[0].ring()
    several.deliver(3)
    assert several.next_steps() == [SAVE, SAVE]
    several.begin(0, 1)
    assert several.line.sent.empty()
    several.steps[0].save_s = 1801.0
    assert several.deliver(3) == [(0, [2]), (0, [2, 1, 1]), (1, [2, 0, 1])]


def test_notice_that_leaves_no_time_is_to_leave_at_once_whatever_the_grace(made) -> None:
    several = made(grace_s=3600)
    several.bells[0].ring(ago_s=60, grace_s=30)
    assert several.deliver(3)[1:] == [(0, [1, 0, 1]), (1, [1, 0, 0])]
    assert several.next_steps() == [EXIT, EXIT]


def test_process_that_has_not_saved_yet_receives_the_last_agreement(made) -> None:
    several = made(grace_s=3600)
    several.begin(0, 1)
    several.begin(1, 2)
    several.bells[1].ring()
    several.deliver(3)
    assert several.steps[1].next_step() is SAVE
    several.bells[1].ring(ago_s=3600)
    assert several.deliver(3) == [(1, [2]), (0, [2, 1, 1]), (1, [2, 2, 1])]
    several.begin(0, 1)
    assert [several.steps[0].next_step() for _ in range(2)] == [SAVE, EXIT]
    assert several.steps[1].next_step() is EXIT


def test_one_that_does_not_say_how_far_it_is_is_named(made) -> None:
    several = made(3, barrier_s=0.05)
    several.bells[0].ring()
    several.line.deliver(to=[0, 2])
    several.deliver(2)
    with pytest.raises(
        DeadlineExceededError,
        match=r"but worker 1 \(host1:1\) did not report its step within 0.05 s(?s:.)*every process",
    ):
        several.steps[0].next_step()


def test_error_of_the_watcher_is_raised_where_the_steps_are() -> None:
    def watch() -> bool:
        raise OSError("no such file: /run/notice")

    step = AgreedStep(TerminationConfig(watch))
    step.start()
    for thread in threading.enumerate():
        if thread.name == "stratagem-notice-poll":
            thread.join(LIMIT_S)
    with pytest.raises(OSError, match="/run/notice"):
        step.next_step()
    step.stop()


@pytest.mark.parametrize("seed", range(8))
def test_all_leave_after_one_step_whose_parts_wait_for_each_other(seed) -> None:
    """Real groups with one thread per process; a step ends when all have begun it."""
    chance = random.Random(seed)
    count = 3
    groups = joined(
        count, GroupLimits(join_s=LIMIT_S, peer_s=LIMIT_S, stuck_s=600, barrier_s=LIMIT_S)
    )
    bells = [Bell() for _ in range(count)]
    noticed = {index: chance.randrange(50) for index in chance.sample(range(count), 1 + seed % 2)}
    barrier = threading.Barrier(count)

    def train(index: int) -> int:
        config = TerminationConfig(sources=[bells[index]], grace_period=0)
        step = AgreedStep(config, groups[index])
        step.start()
        try:
            for number in range(100_000):
                if step.next_step() is EXIT:
                    return number
                if noticed.get(index) == number:
                    bells[index].ring()
                barrier.wait(LIMIT_S)
        finally:
            step.stop()
        raise AssertionError("nobody left")

    left = together(count, train)
    for group in groups:
        group.abandon()
    assert len(set(left)) == 1, left
    assert left[0] > min(noticed.values())


# Save and exit between steps, as the agreed step asks for it.


def test_state_is_saved_once_then_written_and_the_process_exits(monkeypatch, capsys) -> None:
    monkeypatch.setattr(preemption_exit, "expect_exit", lambda code: None)
    synced: list[int] = []
    manager: Any = types.SimpleNamespace(sync=lambda: synced.append(1))

    def leaving(bell: Bell, **options: Any) -> PreemptionExit:
        config = TerminationConfig(sources=[bell], grace_period=3600, **options)
        return PreemptionExit(config, manager, "Backup")

    bell, saves = Bell(), list[int]()
    other, exit_ = leaving(Bell()), leaving(bell)
    assert exit_._agreed_step._name != other._agreed_step._name  # a topic of its own
    other.stop()

    def save() -> bool:
        saves.append(3)
        bell.ring(ago_s=3600)  # the grace period ends meanwhile
        return True

    exit_.before_step(2, save)
    bell.ring()
    with pytest.raises(SystemExit) as caught:
        exit_.before_step(3, save)
    exit_.stop()
    assert (saves, synced, caught.value.code) == ([3], [1], 42)
    assert capsys.readouterr().err == "Backup: saved after step 3: The bell was rung.\n"

    def fail() -> None:
        raise KeyError("own")

    bell = Bell()
    exit_ = leaving(bell, exit_fn=fail)
    bell.ring(ago_s=3600)
    with pytest.raises(KeyError, match="own"):
        exit_.before_step(0, lambda: False)
    exit_.stop()
    assert len(synced) == 2
    assert capsys.readouterr().err == ""  # there was nothing to save
    monkeypatch.setattr(preemption_exit, "current_group", lambda: Line(2).members[1])
    print_status("Backup", "saved")
    assert capsys.readouterr().err == "Backup: worker 1 (host1:1): saved\n"


# Restore status: assertions on restored values, and a warning at deletion.


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A checkpoint of two variables."""
    one, two = sg.Variable(1.0), sg.Variable(2.0)
    return sg.train.Checkpoint(one=one, two=two).save(tmp_path / "ckpt")


def test_all_is_restored(path: str) -> None:
    checkpoint = sg.train.Checkpoint(one=sg.Variable(0.0), two=sg.Variable(0.0))
    for status in (checkpoint.restore(path), checkpoint.read(path)):
        assert status.assert_consumed() is status
        assert status.assert_existing_objects_matched() is status
        assert status.assert_nontrivial_match() is status
        assert status.expect_partial() is status
    status = sg.train.Checkpoint().read(path).expect_partial().assert_existing_objects_matched()
    with pytest.raises(AssertionError, match="No object matches"):
        status.assert_nontrivial_match()


def test_value_without_an_object(path: str) -> None:
    status = sg.train.Checkpoint(one=sg.Variable(0.0)).restore(path).expect_partial()
    status.assert_existing_objects_matched().assert_nontrivial_match()
    with pytest.raises(
        AssertionError, match=r"Values without an object: two/value\. Objects without values: none"
    ):
        status.assert_consumed()
    assert "waiting=1" in repr(status)


def test_object_without_a_value_keeps_its_own(path: str) -> None:
    one, new = sg.Variable(0.0), sg.Variable(7.0)
    checkpoint = sg.train.Checkpoint(one=one, two=sg.Variable(0.0), new=new)
    status = checkpoint.restore(path).expect_partial().assert_nontrivial_match()
    assert [float(one.value), float(new.value)] == [1.0, 7.0]
    with pytest.raises(AssertionError, match=r"ckpt-1 holds no values for new\.\nExpected"):
        status.assert_existing_objects_matched()
    with pytest.raises(
        AssertionError, match=r"Values without an object: none\. Objects without values: new"
    ):
        status.assert_consumed()


def test_optimizer_that_was_not_saved_is_an_object_without_a_value(tmp_path: Path) -> None:
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    path = sg.train.Checkpoint(model=model).save(tmp_path / "ckpt")
    model.compile("adam", "mse")
    status = sg.train.Checkpoint(model=model).restore(path).expect_partial()
    with pytest.raises(AssertionError, match=r"holds no values for model\.optimizer"):
        status.assert_existing_objects_matched()


@pytest.mark.parametrize("is_expected", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_unused_values_are_warned_of_once_nothing_can_use_them(
    is_expected: bool, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "stratagem")

    def recorded() -> list[str]:
        gc.collect()
        return [message for message in caplog.messages if path in message]

    checkpoint = sg.train.Checkpoint(one=sg.Variable(0.0), new=sg.Variable(0.0))
    status = checkpoint.restore(path)
    if is_expected:
        status.expect_partial()
    del status
    assert not recorded()  # an object may still be set
    del checkpoint
    messages = recorded()
    assert len(messages) == (0 if is_expected else 1)
    for message in messages:
        assert "Values without an object: two/value." in message
        assert "Objects without values: new." in message
