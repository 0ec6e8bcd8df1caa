"""Current lines of tasks in one display, and lines that are rewritten in place."""

from __future__ import annotations

from typing import Any

import pytest

from stratagem.launch.tasks.output import screen
from stratagem.launch.tasks.output import screen as progress_display
from stratagem.launch.tasks.output import task_output as line_buffer
from stratagem.launch.tasks.output.screen import (
    STDERR,
    STDOUT,
    ProgressDisplay,
    Screen,
    open_progress_display,
)
from stratagem.launch.tasks.output.task_output import TaskOutput
from tests.unit.launch.tasks.output.test_task_output import a_plan


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
    monkeypatch.setattr(progress_display, "_UPDATE_EVERY_S", 0.0)
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


def test_updates_are_rare_and_the_last_one_is_shown(module, monkeypatch) -> None:
    monkeypatch.setattr(progress_display, "_UPDATE_EVERY_S", 1000.0)
    display = ProgressDisplay(module)
    display._shown_at_s = -2000.0
    for number in range(100):
        display.show("worker 0", f"{number}")
    assert module.shown == ["[worker 0] 0"]
    display.show("worker 0", "")
    assert module.shown == ["[worker 0] 0", ""]


def test_bar_is_displayed_and_its_end_printed(module, monkeypatch, capsys) -> None:
    monkeypatch.setattr(screen, "open_progress_display", lambda: ProgressDisplay(module))
    monkeypatch.setattr(line_buffer, "PATIENCE_S", 0.0)
    output = TaskOutput(a_plan(), Screen(["worker 0"]), None)
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


def test_display_is_empty_when_a_task_ends_within_a_bar(module, monkeypatch, capsys) -> None:
    monkeypatch.setattr(screen, "open_progress_display", lambda: ProgressDisplay(module))
    output = TaskOutput(a_plan(), Screen(["worker 0"]), None)
    output.take(b"\r1/3", 0.0, stream=STDOUT)
    output.show_overdue(0.1)
    output.show_rest(0.2)
    assert module.shown == ["[worker 0] 1/3", ""]
    assert capsys.readouterr().out == "[worker 0] 1/3\n"


def test_terminal_and_file_have_no_display() -> None:
    assert open_progress_display() is None
