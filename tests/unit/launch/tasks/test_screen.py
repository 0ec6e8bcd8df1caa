"""Parsing of the tracebacks that real programs print."""

from __future__ import annotations

import builtins
import contextlib
import io
import sys
import textwrap
import traceback
from typing import Any

import pytest
import rich.jupyter

from stratagem.group.verdict import GroupLimits, MemberView, judge
from stratagem.launch.tasks import output as output_module
from stratagem.launch.tasks.exit_status import error_lines, failure_lines, has_lost_peer
from stratagem.launch.tasks.output import (
    STDERR,
    STDOUT,
    ProgressDisplay,
    RepeatedTracebacks,
    Screen,
    TaskOutput,
    is_foreign,
)

# What JAX 0.10's client prints before it aborts, cut.
JAX_ABORT = (
    "F0000 client.h:83] Terminating process because the JAX distributed service detected fatal "
    "errors. This most likely indicates that another task died; see the other task logs."
)


def stderr_of(program: str) -> list[str]:
    """The lines that a failing program leaves on stderr."""
    code = compile(
        f"from stratagem.errors import *\n{textwrap.dedent(program)}", "<string>", "exec"
    )
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        try:
            exec(code, {"__name__": "__main__"})
        except BaseException:  # noqa: BLE001 - as the interpreter prints it
            traceback.print_exc()
    assert "Error" in stderr.getvalue()
    return stderr.getvalue().splitlines()


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
        ("process 1", {"is_connected": False}, "died"),
        ("chief 0", {"error_text": QUOTED}, "ended with an error"),
    ],
)
def test_verdict_of_a_group_names_the_lost_task(name, view, how) -> None:
    """An error that it quotes is no other one."""
    members = [MemberView(f"{name.removesuffix(' 0')} (a:1)", **view), MemberView("worker 7 (b:1)")]
    verdict = judge(members, GroupLimits())
    lines = stderr_of(f"raise {type(verdict.exception()).__name__}({verdict.message!r})")
    loss = verdict.loss("worker 7 (b:1)")
    assert loss is not None
    named = name.replace("process", "worker")  # as the launcher of several nodes names it
    assert (loss.task, loss.how, loss.reported_by) == (named, how, "worker 7")
    assert how in error_lines(lines, loss)[0]


# Current lines of tasks in one display, and lines that are rewritten in place.


class Module:
    """The part of `IPython.display` that is used."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.html = ""
        self.num_displays = 0

    def display(self, content: Any, *, display_id: bool) -> Module:
        assert display_id
        self.num_displays += 1
        self.update(content)
        return self

    def update(self, content: Any) -> None:
        self.shown.append(repr(content))
        self.html = content._repr_html_()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    monkeypatch.setattr(output_module, "_UPDATE_EVERY_S", 0.0)
    return Module()


def test_one_display_is_updated(module) -> None:
    display = ProgressDisplay(module)
    display.show("worker 0", "")
    assert module.num_displays == 0
    display.show("worker 0", "\x1b[1m1 < 2\x1b[0m")
    display.show("worker 1", "3")
    display.show("worker 1", "3")
    assert module.shown == ["[worker 0] 1 < 2", "[worker 0] 1 < 2\n[worker 1] 3"]
    assert module.html == "<pre>[worker 0] 1 &lt; 2\n[worker 1] 3</pre>"
    display.show("worker 0", "")
    display.show("worker 1", "")
    assert module.shown[2:] == ["[worker 1] 3", ""]
    assert module.html == "<span></span>"
    assert module.num_displays == 1


def test_bar_is_displayed_and_its_end_printed(module, monkeypatch, capsys) -> None:
    monkeypatch.setattr(output_module, "open_progress_display", lambda: ProgressDisplay(module))
    monkeypatch.setattr(output_module, "PATIENCE_S", 0.0)
    output = TaskOutput("worker 0", Screen(["worker 0"]))
    output.take(b"begin\x1b[2K\n\r1/3", 0.0, stream=STDOUT)
    output.show_overdue(10.0)
    output.take(b"\r2/3", 11.0, stream=STDOUT)
    output.take(b"prompt", 11.0, stream=STDERR)
    output.show_overdue(20.0)
    assert module.shown == ["[worker 0] 1/3", "[worker 0] 2/3"]
    output.take(b"\r3/3\nend\n", 21.0, stream=STDOUT)
    output.show_overdue(22.0)
    assert module.shown[-1] == ""
    printed = "[worker 0] begin\n[worker 0] 3/3\n[worker 0] end\n"
    assert capsys.readouterr() == (printed, "[worker 0] prompt\n")


# Repeated tracebacks are shown once, and no line is lost.

HEAD = "Traceback (most recent call last):"
FRAMES = [HEAD, '  File "train.py", line 3, in <module>', "    raise ValueError(3)"]
ERROR = [*FRAMES, "ValueError: 3"]


@pytest.fixture
def tracebacks() -> RepeatedTracebacks:
    return RepeatedTracebacks()


def shown_by_second(tracebacks: RepeatedTracebacks, first: list[str], second: list[str]) -> list:
    """What the second task shows, whose lines come one by one."""
    assert tracebacks.pass_on("worker 0", first, 0.0) + tracebacks.rest("worker 0") == first
    shown = [line for one in second for line in tracebacks.pass_on("worker 1", [one], 0.0)]
    return shown + tracebacks.rest("worker 1")


@pytest.mark.parametrize(
    ("before", "after_0", "after_1"), [(["step 1"], [], []), ([], ["bye from 0"], ["bye from 1"])]
)
def test_same_traceback_is_shown_once(tracebacks, before, after_0, after_1) -> None:
    shown = shown_by_second(tracebacks, [*before, *ERROR, *after_0], [*before, *ERROR, *after_1])
    assert shown == [*before, "ValueError: 3 (the same traceback as worker 0)", *after_1]


@pytest.mark.parametrize(
    "second", [[*FRAMES, "ValueError: 4"], [HEAD, "  other"], [*FRAMES], [HEAD]]
)
def test_traceback_that_differs_is_shown_whole(tracebacks, second) -> None:
    assert shown_by_second(tracebacks, ERROR, second) == second


def test_traceback_is_shown_a_second_later_while_its_task_goes_on(tracebacks) -> None:
    assert tracebacks.pass_on("worker 0", ["before", *ERROR], 0.0) == ["before"]
    assert tracebacks.overdue("worker 0", 0.9) == []
    assert tracebacks.overdue("worker 0", 1.0) == ERROR
    assert tracebacks.pass_on("worker 0", ["after"], 1.1) == ["after"]


def test_chained_errors_are_compared_to_the_last_one(tracebacks) -> None:
    link = ["", "The above exception was the direct cause of the following exception:", ""]
    first = [*ERROR, *link, HEAD, "  ...", "RuntimeError: 1"]
    assert shown_by_second(tracebacks, first, first) == [
        "RuntimeError: 1 (the same traceback as worker 0)"
    ]
    other = [*first[:-1], "RuntimeError: 2"]
    assert shown_by_second(RepeatedTracebacks(), first, other) == other


def test_many_lines_do_not_wait(tracebacks) -> None:
    long = [HEAD, *(f"  {number}" for number in range(1_000))]
    assert shown_by_second(tracebacks, long, long) == long


# Lines of tasks on the screen.


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_has_coloured_names_and_no_colour_goes_on(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    terminal, plain = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", plain)
    screen = Screen(["worker 0", "worker 1"])
    for name in ("worker 0", "worker 1"):
        for stream in (STDOUT, STDERR):
            screen.show(name, ["\x1b[31mred", "plain"], stream=stream)
    first, second, third, _ = terminal.getvalue().splitlines()
    assert first == "\x1b[36m[worker 0] \x1b[0m\x1b[31mred\x1b[0m"
    assert second == "\x1b[36m[worker 0] \x1b[0mplain"
    assert third.startswith("\x1b[32m[worker 1] ")
    assert plain.getvalue().splitlines()[:2] == ["[worker 0] \x1b[31mred", "[worker 0] plain"]


def test_terminal_of_few_characters_gets_a_question_mark(monkeypatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    Screen(["worker 0"]).show("worker 0", ["50 % ━━━"])
    assert written.getvalue() == b"[worker 0] 50 % ???\n"


def test_notebook_shows_lines_and_nothing_else(monkeypatch, capsys) -> None:
    displayed = []
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    monkeypatch.setattr(rich.jupyter, "display", lambda *segments: displayed.append(segments))
    Screen(["worker 0"]).show("worker 0", ["one"])
    assert (displayed, capsys.readouterr().out) == ([], "[worker 0] one\n")


# Log lines of JAX's libraries that are left out, and lines that only look like them.

SERVICE = (
    "W0102 03:04:05.678901    1234 coordination_service.cc:711] "
    "Job: jax. Using experimental recoverable task feature. More text."
)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (SERVICE, True),
        ("[Gloo] Rank 3 is connected to 7 peer ranks. Expected", True),
        # Two threads at once.
        ("[Gloo] Rank [Gloo] Rank 0 is connected to 1 peer ranks. Expected number of", True),
        ("1 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1", True),
        ("", False),
        (f"my script prints: {SERVICE}", False),
        (SERVICE.replace("W0102", "E0102"), False),
        (SERVICE.replace("experimental", "stable"), False),
        ("[Gloo] Rank 3 is connected to no peer ranks.", False),
        ("[Gloo] connection of rank 3 failed", False),
    ],
)
def test_line_of_a_library_is_foreign(line, expected) -> None:
    assert is_foreign(line) is expected
