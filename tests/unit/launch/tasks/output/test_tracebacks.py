"""Parsing of the tracebacks that real programs print."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from stratagem.group.verdict import GroupLimits, MemberView, judge
from stratagem.launch.tasks.output.tracebacks import (
    LostPeer,
    error_lines,
    failure_lines,
    has_lost_peer,
    lost_peer,
)

# What JAX 0.10's client prints before it aborts, cut.
JAX_ABORT = (
    "F0000 client.h:83] Terminating process because the JAX distributed service detected fatal "
    "errors. This most likely indicates that another task died; see the other task logs."
)


def stderr_of(program: str) -> list[str]:
    """The lines that a failing program leaves, in the interpreter's own form."""
    program = f"from stratagem.errors import *\n{textwrap.dedent(program)}"
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert process.returncode == 1, process.stderr
    return process.stderr.splitlines()


def test_last_traceback_is_what_tells_why() -> None:
    lines = stderr_of(
        """
        import sys, traceback
        try:
            raise KeyError("early")
        except KeyError:
            traceback.print_exc()
        print("going on", file=sys.stderr)
        def step():
            raise ValueError("loss is nan")
        step()
        """
    )
    words = failure_lines(lines)
    assert words[0] == "Traceback (most recent call last):"
    assert words[-1] == "ValueError: loss is nan"
    assert any("in step" in line for line in words)
    assert not any("early" in line or "going on" in line for line in words)


@pytest.mark.parametrize("chain", ["from error", ""])
def test_traceback_comes_with_those_it_is_chained_to(chain) -> None:
    lines = stderr_of(
        f"""
        import sys
        print("before", file=sys.stderr)
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") {chain}
        """
    )
    assert failure_lines(lines) == tuple(lines[1:])
    assert "KeyError: 'first'" in lines


def test_group_of_exceptions_is_shown_whole() -> None:
    lines = stderr_of(
        """
        try:
            raise ValueError("inner")
        except ValueError as error:
            raise ExceptionGroup("both", [error, TypeError("other")]) from None
        """
    )
    assert failure_lines(lines) == tuple(lines)


def test_without_a_traceback_the_last_lines_tell() -> None:
    assert failure_lines([]) == ()
    assert failure_lines(["one", "two"]) == ("one", "two")
    assert failure_lines([str(i) for i in range(300)])[0] == "280"


def test_middle_of_a_long_traceback_is_left_out() -> None:
    lines = ["Traceback (most recent call last):", *(f"  {i}" for i in range(298)), "ValueError"]
    words = failure_lines(lines)
    assert len(words) == 101
    assert words[0] == lines[0]
    assert words[50] == "... 200 lines left out ..."
    assert words[-1] == "ValueError"


@pytest.mark.parametrize(
    ("program", "lost"),
    [
        ("raise UnavailableError('worker 2 is gone')", True),
        ("raise DeadlineExceededError('worker 2 did not answer')", True),
        ("raise ConnectionResetError(104, 'reset')", True),
        ("raise RuntimeError('Gloo AllReduce failed: Connection closed by peer [::1]:3')", True),
        ("raise RuntimeError('UNAVAILABLE: failed to connect to all addresses')", True),
        ("try:\n  raise UnavailableError('x')\nexcept Exception:\n  raise KeyError('y')", True),
        ("raise ValueError('loss is nan')", False),
        ("raise MemoryError", False),
        # It stands in the source only.
        ("if True: raise ValueError  # not an UnavailableError", False),
        # An error before the last one, which was dealt with.
        (
            "import traceback\ntry:\n  raise UnavailableError('x')\n"
            "except Exception:\n  traceback.print_exc()\nraise ValueError('y')",
            False,
        ),
    ],
)
def test_task_that_lost_a_peer_is_recognized_by_its_errors(program, lost) -> None:
    assert has_lost_peer(stderr_of(program)) is lost


def test_task_that_jax_aborts_has_lost_a_peer() -> None:
    assert has_lost_peer(["step 3", JAX_ABORT, "*** Check failure stack trace: ***"])
    assert not has_lost_peer(["step 3", "Fatal Python error: Segmentation fault"])
    assert not has_lost_peer([])


QUOTED = "Traceback (most recent call last):\nOSError: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    ("name", "view", "how"),
    [
        ("worker 1", {"silent_s": 31.0}, "has not answered for 31 s"),
        ("worker 1", {"is_connected": False}, "died"),
        ("chief 0", {"error_text": QUOTED}, "ended with an error"),
    ],
)
def test_verdict_of_a_group_names_the_lost_task(name, view, how) -> None:
    """The words are those of the group itself, and an error that it quotes is no other one."""
    members = [MemberView(f"{name.removesuffix(' 0')} (a:1)", **view), MemberView("worker 7 (b:1)")]
    verdict = judge(members, GroupLimits())
    assert verdict is not None
    lines = stderr_of(f"raise {type(verdict.exception()).__name__}({verdict.message!r})")
    assert lost_peer(lines) == LostPeer(name, how)
    assert has_lost_peer(lines)
    assert how in error_lines(lines)[0]


def test_other_errors_name_no_lost_task() -> None:
    lines = stderr_of('raise UnavailableError("worker 1 is out of step")')
    assert lost_peer(lines) is None
    assert has_lost_peer(lines)
