"""Whatever one worker does, the others end within the limit with an error that names it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from stratagem.observe.events import EndEvent, FailureEvent, StepEvent, read_run
from tests.multiprocess.cluster import PROGRAMS, Ended, ended, started
from tests.multiprocess.namespaces import can_make_hosts, hosts

pytestmark = pytest.mark.slow

_PROGRAM = str(PROGRAMS / "failing.py")
_LIMITS = {
    "STRATAGEM_PEER_TIMEOUT_S": "4",
    "STRATAGEM_STUCK_TIMEOUT_S": "4",
    "STRATAGEM_BARRIER_TIMEOUT_S": "20",
}
# What it does, what the others say of it, and how they end at most so many seconds later.
_WAYS = {
    "kill": ("UnavailableError", "died"),
    "stop": ("UnavailableError", "has not answered for"),
    "stuck": ("DeadlineExceededError", "has made no progress for"),
    "leave": ("UnavailableError", "left early"),
    "error": ("UnavailableError", "a bug of one worker"),
    "other length": ("RuntimeError", "worker 1"),
    "other program": ("RuntimeError", "worker 1"),
}
# Where `fit` compares what is known before the first step.
_WAYS_IN_FIT = _WAYS | {"other length": ("ValueError", "40 on worker 1")}


def _run(how: str, loop: str, *, num_workers: int, culprit: int, **variables: str) -> list[Ended]:
    """Runs the workers; returns how those ended that did nothing wrong."""
    variables = {"CULPRIT": str(culprit), **_LIMITS, **variables}
    with started([_PROGRAM, how, loop], num_workers, **variables) as processes:
        others = [ended(p) for index, p in enumerate(processes) if index != culprit]
        if how == "stop":  # nothing else ends it
            os.kill(processes[culprit].pid, signal.SIGKILL)
        return others


def _check(how: str, loop: str, *, num_workers: int, culprit: int, **variables: str) -> None:
    error, words = (_WAYS_IN_FIT if loop == "fit" else _WAYS)[how]
    for other in _run(how, loop, num_workers=num_workers, culprit=culprit, **variables):
        assert other.code == 1, other.errors
        message = other.errors.split(f"{error}: ")[-1]
        assert f"worker {culprit} (127.0.0.1:" in message, other.errors
        assert words.replace("worker 1", f"worker {culprit}") in message
        assert "done" not in other.output


@pytest.mark.parametrize(
    ("how", "loop"),
    [("kill", "fit"), ("other program", "loop")],
)
def test_others_end_with_an_error_that_names_the_worker(
    how: str, loop: str, tmp_path: Path
) -> None:
    """And their events tell of it: who was lost, where one was."""
    _check(how, loop, num_workers=2, culprit=1, STRATAGEM_RUN_DIR=str(tmp_path))
    run = read_run(tmp_path)
    (survivor,) = [one for one in run.processes if one.task == "worker 0"]
    (failure,) = [event for event in survivor.events if isinstance(event, FailureEvent)]
    assert failure.lost == ("worker 1" if how == "kill" else None)
    assert _WAYS[how][1] in failure.reason
    assert isinstance(survivor.events[-1], EndEvent)
    assert survivor.events[-1].code == 1
    if loop == "fit":
        assert any(isinstance(event, StepEvent) for event in survivor.events)
        assert survivor.start.num_processes == 2


@pytest.mark.parametrize("how", _WAYS)
@pytest.mark.parametrize("loop", ["fit", "loop"])
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_every_failure_of_every_worker_is_named(how: str, loop: str, culprit: int) -> None:
    if how == "other program" and loop == "fit":
        how = "error"
    _check(how, loop, num_workers=3, culprit=culprit)


@pytest.mark.parametrize("how", ["kill", "stop", "stuck", "leave", "error"])
def test_every_failure_is_named_where_others_wait_for_its_data_ahead_of_their_steps(
    how: str,
) -> None:
    _check(how, "input", num_workers=2, culprit=1)


@pytest.mark.skipif(not can_make_hosts(), reason="network namespaces need root and iproute2")
@pytest.mark.parametrize("loop", ["fit", "loop"])
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_worker_whose_link_is_down_is_named(loop: str, culprit: int) -> None:
    """And so is process 0 by the worker that hears nobody any more."""
    with (
        hosts(3) as three,
        started(
            [_PROGRAM, "link down", loop], 3, three, CULPRIT=str(culprit), LINK="eth0", **_LIMITS
        ) as processes,
    ):
        every = [ended(process) for process in processes]
    for index, one in enumerate(every):
        named = culprit if index != culprit else 0 if culprit else 1
        message = one.errors.split("UnavailableError: ")[-1]
        assert one.code == 1, one.errors
        assert f"worker {named} (10.77.0.{named + 1}:2222) has not answered for" in message


def test_program_that_catches_the_loss_does_not_wait_in_jax_without_end() -> None:
    """The step that needs the stopped worker never ends, and JAX waits for it uninterrupted."""
    with started([str(PROGRAMS / "catching.py")], 2, **_LIMITS) as processes:
        first = ended(processes[0])
        os.kill(processes[1].pid, signal.SIGKILL)
    assert "caught True" in first.output
    assert "total" not in first.output
    assert "is stuck inside JAX, which cannot be interrupted, and exits now" in first.errors
    assert first.code == 1
