"""A group of three members: joining, exchanging values, and failures."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import queue
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from stratagem.errors import DeadlineExceededError, UnavailableError
from stratagem.group.member import Group
from stratagem.group.verdict import Activity, GroupLimits, Loss
from tests.unit.group.process_group.members import (
    end_joining,
    free_port,
    identity,
    running,
    together,
)
from tests.unit.launch.waiting import until

# So long that a test which waited for it would be noticed.
_LIMITS = GroupLimits(join_s=600, peer_s=600, stuck_s=600, barrier_s=600)


@pytest.fixture
def members() -> Iterator[list[Group]]:
    with running(3, _LIMITS) as groups:
        yield groups


def test_all_get_the_values_of_all_in_order_in_each_stream(members) -> None:
    def exchange(index: int) -> tuple:
        beside = members[index].stream("dataset 1").exchange(10 + index)
        return beside, [
            members[index].exchange("place", (index, np.full(2, index))) for _ in range(20)
        ][-1]

    for beside, received in together(3, exchange):
        assert beside == [10, 11, 12]
        assert [index for index, _ in received] == [0, 1, 2]
        assert [array.tolist() for _, array in received] == [[0, 0], [1, 1], [2, 2]]


def test_member_of_the_next_start_waits_until_the_group_before_has_ended(monkeypatch) -> None:
    """Its launcher saw a loss that process 0 has not seen yet."""
    port = free_port()
    before = together(2, lambda index: Group(identity(index, 2, port), _LIMITS))
    monkeypatch.setenv("STRATAGEM_RESTART_COUNT", "1")
    with concurrent.futures.ThreadPoolExecutor() as executor:
        waiting = executor.submit(Group, identity(1, 2, port), _LIMITS)
        with pytest.raises(TimeoutError):
            waiting.result(1.0)
        assert together(2, lambda index: before[index].exchange("place", index)) == [[0, 1]] * 2
        for group in reversed(before):
            group.abandon()
        after = [Group(identity(0, 2, port), _LIMITS), waiting.result()]
    assert together(2, lambda index: after[index].exchange("place", index)) == [[0, 1]] * 2
    for group in reversed(after):
        group.abandon()


def test_member_waits_for_process_0_longer_than_a_silence_may_last(monkeypatch) -> None:
    """Process 0 has asked it to come back, and takes its time to start again."""
    port = free_port()
    before = together(2, lambda index: Group(identity(index, 2, port), _LIMITS))
    monkeypatch.setenv("STRATAGEM_RESTART_COUNT", "1")
    impatient = dataclasses.replace(_LIMITS, peer_s=0.2)
    with concurrent.futures.ThreadPoolExecutor() as executor:
        waiting = executor.submit(Group, identity(1, 2, port), impatient)
        with pytest.raises(TimeoutError):
            waiting.result(1.0)
        for group in reversed(before):
            group.abandon()
        with pytest.raises(TimeoutError):
            waiting.result(1.0)
        leader = Group(identity(0, 2, port), _LIMITS)
        with contextlib.suppress(UnavailableError):  # silent for 0.2 s while it joins, under load
            waiting.result().abandon()
        leader.abandon()


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_broken_connection_is_reported_to_all_at_once(members, lost, capfd) -> None:
    members[lost].begin_step()
    members[lost].abandon()
    others = [index for index in range(3) if index != lost]
    for error in together(2, lambda i: members[others[i]].exchange("place", None)):
        assert isinstance(error, UnavailableError)
        assert f"worker {lost} (host{lost}:1) died" in str(error)
        if lost:
            assert ", at 'place' before any shared program." in str(error)  # of the one that raises
    assert "stacks" not in capfd.readouterr().err


def test_different_calls_are_reported_to_all(members) -> None:
    names = ["save", "save", "evaluate"]
    for error in together(3, lambda i: members[i].exchange(names[i], None)):
        assert type(error) is RuntimeError
        # Whoever came first is told last.
        assert "worker 2 (host2:1)" in str(error).splitlines()[0]
        assert "called 'evaluate'" in str(error).splitlines()[0]


def test_one_that_makes_no_progress_is_named_to_all_that_wait(capfd) -> None:
    """And each process prints its stacks, also the one that does not wait."""
    with running(3, dataclasses.replace(_LIMITS, stuck_s=1.5)) as members:
        members[2].begin_step()

        def wait(index: int) -> None:
            number = members[index].begin_step()
            members[index].wait_for_step(number, "train", lambda: False)

        errors = together(2, wait)
        members[2].wait_for_verdict()
    printed = capfd.readouterr().err
    for index in range(3):
        assert f"worker {index} (host{index}:1): stacks at the time limit.\n" in printed
    assert printed.count(" in wait_for_step\n") >= 2
    for error in errors:
        assert isinstance(error, DeadlineExceededError)
        assert "worker 2 (host2:1) has made no progress" in str(error)
        assert "STRATAGEM_STUCK_TIMEOUT_S" in str(error)
        assert "in shared program 1 (train)" in str(error)


def test_missing_one_is_named_when_a_limit_of_the_call_is_over(members) -> None:
    hub = members[0]._connection._hub

    def act(index: int) -> None:
        with (
            members[index].at(Activity.COMPILE, "program")
            if index == 1
            else contextlib.nullcontext()
        ):
            if index != 1:  # once process 0 has heard what the missing one does
                until(lambda: hub._members[1].position.kind is Activity.COMPILE)
                members[index].exchange("save", None, timeout_s=0.5, setting="my setting")
            else:
                members[index].wait_for_verdict()

    errors = together(3, act)
    assert errors[1] is None
    for error in (errors[0], errors[2]):
        assert isinstance(error, DeadlineExceededError)
        assert "for worker 1 (host1:1) (compiling" in str(error)
        assert "my setting" in str(error)
    with pytest.raises(DeadlineExceededError, match="This is worker 1"):
        members[1].begin_step()


def test_error_of_a_thread_is_reported_once_it_reaches_the_program(members) -> None:
    """Until then the program may be blocked inside JAX, and must be ended there."""
    members[1].abandon()
    (error,) = together(1, lambda _: members[0].stream("dataset 0 (1)").exchange(1))
    assert isinstance(error, UnavailableError)
    assert not members[0].is_reported
    members[0].mark_reported()
    assert members[0].is_reported


def _check(member: Group) -> None:
    with pytest.raises(UnavailableError, match="died"):
        member.check()


def _exchange(member: Group) -> None:
    with pytest.raises(UnavailableError, match="died"):
        member.exchange("place", None)


def _explain_loss(member: Group) -> None:
    assert "died" in str(member.explain_loss(OSError("reset by peer")))


@pytest.mark.parametrize("act", [_check, _exchange, _explain_loss])
def test_error_in_the_program_is_reported_and_recorded(members, act, tmp_path, monkeypatch) -> None:
    members[0].mark_reported()
    assert not members[0].is_reported, "there is nothing to tell"
    members[1].abandon()
    members[0].wait_for_verdict()
    record = tmp_path / "worker-0.json"
    monkeypatch.setenv("STRATAGEM_LOSS_FILE", str(record))
    act(members[0])
    assert members[0].is_reported
    assert [*tmp_path.iterdir()] == [record]
    loss = Loss.from_json(record.read_text())
    assert (loss.task, loss.how, loss.reported_by) == ("worker 1", "died", "worker 0")
    assert loss.message == members[0].verdict.message


@pytest.mark.parametrize("folder", [None, "missing", ""])
def test_loss_that_cannot_be_recorded_is_the_same_error(
    members, folder, tmp_path, monkeypatch
) -> None:
    if folder is not None:
        monkeypatch.setenv("STRATAGEM_LOSS_FILE", str(tmp_path / folder / "worker-0.json"))
    if folder == "":
        (tmp_path / "worker-0.json").mkdir()
    members[1].abandon()
    members[0].wait_for_verdict()
    _check(members[0])


def test_error_of_one_is_the_reason_that_others_give(members) -> None:
    members[1].report_error("Traceback: ValueError: a bug")
    for error in together(2, lambda i: members[2 * i].exchange("place", None)):
        assert isinstance(error, UnavailableError)
        assert "worker 1 (host1:1) ended with an error" in str(error)
        assert "ValueError: a bug" in str(error)


def test_one_that_leaves_while_others_need_it_is_named(members) -> None:
    def act(index: int) -> object:
        if index == 2:
            return members[2].leave()
        number = members[index].begin_step()
        return members[index].wait_for_step(number, "train", lambda: False)

    *errors, left = together(3, act)
    assert left is False
    for error in errors:
        assert isinstance(error, UnavailableError)
        assert "worker 2 (host2:1) left early: it is at its end before any shared program" in str(
            error
        )


def test_broken_transport_of_living_members_says_that_all_answer(members) -> None:
    members[0].limits = dataclasses.replace(_LIMITS, peer_s=0.5)  # here only
    error = members[0].explain_loss(OSError("reset by peer"))
    assert isinstance(error, UnavailableError)
    assert "worker 0 (host0:1) lost a connection to another process: reset by peer" in str(error)


@pytest.mark.slow
def test_process_that_does_not_join_is_named_after_progress(capsys) -> None:
    port, said = free_port(), []
    limits = dataclasses.replace(_LIMITS)
    begun_s = time.monotonic()

    def act(index: int) -> Group | None:
        if index < 2:
            return Group(identity(index, 3, port), limits)

        def have_said() -> bool:
            said.append(capsys.readouterr().err)
            return all(
                f"worker {one} (host{one}:1): 2 of 3 joined" in "".join(said) for one in (0, 1)
            )

        until(have_said)
        return end_joining(limits, time.monotonic() - begun_s)

    *errors, _ = together(3, act)
    for error in errors:
        assert isinstance(error, DeadlineExceededError)
        assert "2 of 3 joined" in str(error)
        assert "worker 2 (host2:1) did not" in str(error)
        assert "STRATAGEM_JOIN_TIMEOUT_S" in str(error)
    waiting = r"worker 0 \(host0:1\): 2 of 3 joined, waiting for worker 2 \(host2:1\) for \d+ s"
    assert re.search(waiting, "".join(said))


def test_missing_process_0_is_named(capsys) -> None:
    with pytest.raises(
        DeadlineExceededError, match=r"waited 3 s for worker 0 \(host0:1\)(?s:.)*can be reached"
    ):
        Group(identity(1, 2, free_port()), GroupLimits(join_s=0.5))
    assert "1 of 2 joined, waiting for worker 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda port: identity(1, 3, port), "worker 1.* has joined already, from host"),
        (lambda port: identity(1, 2, port), "Process 1 of 2 asked to join a group of 3"),
    ],
)
def test_process_with_a_wrong_identity_is_rejected_with_the_reason(make, message) -> None:
    """The wrong one may come first, and then it is the other one that is rejected."""
    port, is_rejected = free_port(), threading.Event()
    right = [identity(index, 3, port, jax="0.10") for index in range(3)]

    def act(index: int) -> object:
        if index == 3:  # so that the others wait no longer
            assert is_rejected.wait(120)
            return Group(right[2], _LIMITS)
        try:
            return Group(right[index] if index < 2 else make(port), _LIMITS)
        except ValueError:
            is_rejected.set()
            raise

    results = together(4, act)
    for one in results:
        if isinstance(one, Group):
            one.abandon()
    errors = [error for error in results if isinstance(error, ValueError)]
    assert errors
    for error in errors:
        assert re.search(message, str(error))


def test_difference_between_processes_ends_all_at_once() -> None:
    port = free_port()
    limits = GroupLimits(join_s=600)
    errors = together(
        3, lambda i: Group(identity(i, 3, port, jax="0.9" if i == 2 else "0.10"), limits)
    )
    for error in errors:
        assert isinstance(error, ValueError)
        assert "has jax 0." in str(error)


# Streams left early by this process, by another, or with an error.

_LIMIT_S = 120.0


class _Waiting:
    """A thread that calls a function, like one that reads ahead."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._result: list[Any] = []
        self._thread = threading.Thread(target=self._run, args=(function, *arguments))
        self._thread.start()

    def _run(self, function: Any, *arguments: Any) -> None:
        try:
            self._result.append(function(*arguments))
        except Exception as error:  # noqa: BLE001 - looked at by the test
            self._result.append(error)

    def result(self) -> Any:
        """Returns the result or the exception."""
        self._thread.join(_LIMIT_S)
        assert self._result, "it still waits"
        return self._result[0]


def _hub_knows(members: list[Group]) -> tuple[int, int]:
    """Returns the numbers of open exchanges and of partly closed streams on process 0."""
    exchanges = members[0]._connection._hub._exchanges
    return len(exchanges._open), len(exchanges._left)


def test_closing_wakes_the_thread_that_waits_and_ends_the_stream_for_good(members) -> None:
    stream = members[1].stream("dataset 0 (1)")
    waiting = _Waiting(stream.exchange, 4)
    stream.close()
    stream.close()
    assert waiting.result() is None
    assert stream.exchange(4) is None


def test_all_that_leave_early_go_on_together_and_nothing_is_kept(members) -> None:
    """Each reads ahead by a different number of batches when its program stops."""
    for epoch in range(3):
        streams = [member.stream(f"dataset 0 ({epoch})") for member in members]
        received = together(
            3, lambda i, streams=streams: [streams[i].exchange(i) for _ in range(2)]
        )
        assert received == [[[0, 1, 2]] * 2] * 3
        ahead = [_Waiting(streams[i].exchange, i) for i in range(2)]
        for stream in streams:
            stream.close()
        assert [one.result() for one in ahead] == [None, None]
        assert together(3, lambda i: members[i].exchange("after", i)) == [[0, 1, 2]] * 3
    # What was sent before an exchange has arrived before it was complete.
    assert _hub_knows(members) == (0, 0)
    for member in members:
        assert list(member._streams._open) == ["main"]
        assert member._main.answers == {}


@pytest.mark.parametrize("left_first", [False, True])
def test_process_that_needs_a_batch_of_a_closed_loop_learns_who_left(
    members, left_first, monkeypatch
) -> None:
    monkeypatch.setattr("stratagem.group.member._ERROR_REPORT_S", 0.05)
    streams = [member.stream("dataset 3 (1)") for member in members]
    together(3, lambda i: streams[i].exchange(i))
    if left_first:
        streams[1].close()
        waiting = _Waiting(streams[0].exchange, 0)
    else:
        waiting = _Waiting(streams[0].exchange, 0)
        streams[1].close()
    with pytest.raises(
        RuntimeError,
        match=r"worker 1 \(host1:1\) left the loop over dataset 3 \(1\), but "
        r"worker 0 \(host0:1\) needs batch 2",
    ):
        raise waiting.result()
    # The group itself goes on.
    assert together(3, lambda i: members[i].exchange("after", i)) == [[0, 1, 2]] * 3
    for stream in streams:
        stream.close()
    together(3, lambda i: members[i].exchange("end", i))
    assert _hub_knows(members) == (0, 0)


def test_one_that_leaves_a_loop_by_an_error_is_known_by_its_error(members) -> None:
    streams = [member.stream("dataset 0 (1)") for member in members]
    waiting = _Waiting(streams[0].exchange, 0)
    streams[2].close()
    members[2].report_error("Traceback: ValueError: a bug")
    error = waiting.result()
    assert isinstance(error, UnavailableError)
    assert "ValueError: a bug" in str(error)


# Announcements: receivers, order, and announcements before a listener exists.


def heard_by(member: Group, topic: str) -> queue.Queue[tuple[int, list[int]]]:
    """Announcements that a member receives from now on."""
    heard: queue.Queue[tuple[int, list[int]]] = queue.Queue()
    member.listen(topic, lambda process_id, numbers: heard.put((process_id, numbers)))
    return heard


def test_all_hear_all_in_one_order(members) -> None:
    heard = [heard_by(member, "topic") for member in members]
    together(3, lambda i: [members[i].announce("topic", [i, n]) for n in range(10)])
    (first, *others) = [[one.get(timeout=_LIMIT_S) for _ in range(30)] for one in heard]
    assert sorted(first) == [(i, [i, n]) for i in range(3) for n in range(10)]
    assert [other == first for other in others] == [True, True]


def test_earlier_announcements_reach_a_later_listener(members) -> None:
    early = heard_by(members[0], "topic")
    members[2].announce("topic", (7,))
    members[2].announce("another", [])
    assert early.get(timeout=_LIMIT_S) == (2, [7])
    together(3, lambda i: members[i].exchange("all have heard it", None))
    late, another = heard_by(members[1], "topic"), heard_by(members[1], "another")
    assert (late.get_nowait(), another.get_nowait()) == ((2, [7]), (2, []))
    assert late.empty()
    assert another.empty()


def test_announcements_reach_processes_that_are_alive(members) -> None:
    heard = [heard_by(members[index], "topic") for index in (0, 2)]
    members[1].abandon()
    for index in (0, 2):
        members[index].wait_for_verdict()
    members[2].announce("topic", [1])
    assert [one.get(timeout=_LIMIT_S) for one in heard] == [(2, [1])] * 2


def test_announcing_does_not_block_without_a_connection(members) -> None:
    members[0].abandon()
    members[1].wait_for_verdict()
    heard = heard_by(members[1], "topic")
    members[1].announce("topic", [1])
    members[1].abandon()
    members[1].announce("topic", [2])
    assert heard.empty()
