"""Lines of tasks on the screen."""

from __future__ import annotations

import builtins
import io
import sys

import rich.jupyter

from stratagem.launch.tasks.output.screen import STDERR, STDOUT, Screen


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


def test_launcher_speaks_on_stderr(capsys) -> None:
    Screen([]).say(["one", "two"])
    assert capsys.readouterr() == ("", "[launch] one\n[launch] two\n")
