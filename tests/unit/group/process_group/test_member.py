"""A group of three members: joining, exchanging values, and failures."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from stratagem.errors import DeadlineExceededError, UnavailableError
from stratagem.group.member import Group
from stratagem.group.verdict import Activity, GroupLimits
from tests.unit.group.process_group.members import (
    end_joining,
    free_port,
    identity,
    joined,
    together,
)
from tests.unit.launch.waiting import until

# So long that a test which waited for it would be noticed.
_LIMITS = GroupLimits(join_s=600, peer_s=600, stuck_s=600, barrier_s=600)


@contextlib.contextmanager
def _joined(limits: GroupLimits) -> Iterator[list[Group]]:
    groups = joined(3, limits)
    try:
        yield groups
    finally:
        for group in groups:
            group.abandon()


@pytest.fixture
def members() -> Iterator[list[Group]]:
    with _joined(_LIMITS) as groups:
        yield groups


def test_all_get_the_values_of_all_in_order(members) -> None:
    def exchange(index: int) -> list:
        return [members[index].exchange("place", (index, np.full(2, index))) for _ in range(20)][-1]

    for received in together(3, exchange):
        assert [index for index, _ in received] == [0, 1, 2]
        assert [array.tolist() for _, array in received] == [[0, 0], [1, 1], [2, 2]]


def test_streams_of_two_threads_do_not_disturb_each_other(members) -> None:
    def act(index: int) -> tuple:
        beside = members[index].stream("dataset 1").exchange(10 + index)
        return beside, members[index].exchange("place", index)

    assert together(3, act) == [([10, 11, 12], [0, 1, 2])] * 3


@pytest.mark.parametrize("lost", [1, 2])
def test_broken_connection_is_reported_to_all_at_once(members, lost) -> None:
    members[lost].begin_step()
    members[lost].abandon()
    others = [index for index in range(3) if index != lost]
    for error in together(2, lambda i: members[others[i]].exchange("place", None)):
        assert isinstance(error, UnavailableError)
        assert f"worker {lost} (host{lost}:1) died" in str(error)
        assert ", at 'place' before any shared program." in str(error)  # of the one that raises


def test_loss_of_process_0_is_noticed_by_each(members) -> None:
    members[0].abandon()
    for error in together(2, lambda i: members[i + 1].exchange("place", None)):
        assert isinstance(error, UnavailableError)
        assert "worker 0 (host0:1) died" in str(error)


def test_different_calls_are_reported_to_all(members) -> None:
    names = ["save", "save", "evaluate"]
    for error in together(3, lambda i: members[i].exchange(names[i], None)):
        assert type(error) is RuntimeError
        # Whoever came first is told last.
        assert "worker 2 (host2:1)" in str(error).splitlines()[0]
        assert "called 'evaluate'" in str(error).splitlines()[0]


def test_one_that_makes_no_progress_is_named_to_all_that_wait() -> None:
    with _joined(dataclasses.replace(_LIMITS, stuck_s=1.5)) as members:
        members[2].begin_step()

        def wait(index: int) -> None:
            number = members[index].begin_step()
            members[index].wait_for_step(number, "train", lambda: False)

        errors = together(2, wait)
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
def test_error_in_the_program_is_reported(members, act) -> None:
    members[0].mark_reported()
    assert not members[0].is_reported, "there is nothing to tell"
    members[1].abandon()
    members[0].wait_for_verdict()
    act(members[0])
    assert members[0].is_reported


def test_error_of_one_is_the_reason_that_others_give(members) -> None:
    members[1].report_error("Traceback: ValueError: a bug")
    for error in together(2, lambda i: members[2 * i].exchange("place", None)):
        assert isinstance(error, UnavailableError)
        assert "worker 1 (host1:1) ended with an error" in str(error)
        assert "ValueError: a bug" in str(error)


def test_all_leave_together(members) -> None:
    assert together(3, lambda i: members[i].leave()) == [True] * 3


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


def test_transport_error_is_explained_by_the_lost_process(members) -> None:
    members[1].abandon()
    error = members[0].explain_loss(OSError("reset by peer"))
    assert isinstance(error, UnavailableError)
    assert "worker 1 (host1:1) died" in str(error)


def test_broken_transport_of_living_members_says_that_all_answer(members) -> None:
    members[0].limits = dataclasses.replace(_LIMITS, peer_s=0.5)  # here only
    error = members[0].explain_loss(OSError("reset by peer"))
    assert isinstance(error, UnavailableError)
    assert "worker 0 (host0:1) lost a connection to another process: reset by peer" in str(error)


@pytest.mark.slow
def test_process_that_does_not_join_is_named_after_progress(capsys) -> None:
    port, said = free_port(), []
    limits = dataclasses.replace(_LIMITS)

    def act(index: int) -> Group | None:
        if index < 2:
            return Group(identity(index, 3, port), limits)

        def have_said() -> bool:
            said.append(capsys.readouterr().err)
            return all(
                f"worker {one} (host{one}:1): 2 of 3 joined" in "".join(said) for one in (0, 1)
            )

        until(have_said)
        return end_joining(limits)

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


def test_taken_port_raises(members) -> None:
    port = members[0].identity.port
    with pytest.raises(ValueError, match=rf"cannot listen on port {port}(?s:.)*free port"):
        Group(identity(0, 3, port), _LIMITS)


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
