"""Frames of the terminal view."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from stratagem.observe.goodput.account import account_for
from stratagem.observe.monitoring.run_state import RunState
from stratagem.observe.monitoring.terminal_view import frame
from stratagem.observe.run_events.reader import ProcessEvents
from stratagem.observe.run_events.records import StepEvent
from tests.unit.observe.goodput.runs import (
    EPOCH_S,
    first_step,
    gang_restart,
    members_come_and_go,
    process,
    progress,
    run,
    steps,
    straggling,
)


def shown(events, second: float, account=None) -> str:
    state = RunState()
    state.add(events.processes, EPOCH_S + second)
    console = Console(file=io.StringIO(), width=140)
    account = account or account_for(events)
    console.print(frame("runs/digits", state.snapshot(EPOCH_S + second), account))
    return console.file.getvalue()


def row(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"│ {name}")]
    return [cell.strip() for cell in line.split("│")[1:-1]]


def test_frame_shows_a_straggler_and_all_figures() -> None:
    text = shown(straggling(), 41)
    assert text.startswith("runs/digits  finished  41.0 s since the start\n")
    assert "101 of 101" in text
    assert "2.5 steps/s" in text
    assert "Goodput after start-up: " in text
    assert "start-up took 10.0 s" in text
    assert "start-up 10.0 s" in text
    assert row(text, "worker 1") == [
        "worker 1",
        "finished",
        "101",
        "-",
        "200 ms",
        "300 MiB",
        "0 MiB of 0 MiB",
        "",
    ]
    assert "worker 1 is slow: the others wait 200 ms of each 400 ms step for it.\n" in text
    assert "2 warnings, the last ones" in text
    assert "12.0 s worker 1 UserWarning: slow <data>" in text
    values = [line.split()[0] for line in text.splitlines() if line.startswith(("loss", "acc"))]
    assert values == ["loss", "accuracy"]
    assert "█▁" in text


def test_running_worker_says_when_it_was_heard() -> None:
    text = shown(run(process("worker 0", 0, first_step(5, 1))), 9)
    assert text.startswith("runs/digits  running  9.0 s since the start\n")
    assert row(text, "worker 0")[1:5] == ["running", "1", "4 s ago", "-"]


def test_launcher_has_no_row_and_restarts_are_counted() -> None:
    text = shown(gang_restart(), 78)
    assert "launcher" not in text
    assert ", 1 restart\n" in text


@pytest.mark.parametrize("loss", [1.0, None])
def test_value_that_is_not_finite_is_named(loss) -> None:
    text = shown(run(process("worker 0", 0, progress(5, 1, loss=loss))), 6)
    assert ("not finite" in text) is (loss is None)


def test_only_some_of_many_workers_have_a_row() -> None:
    text = shown(run(*(process(f"worker {index}", 0) for index in range(40))), 5)
    assert "and 8 more" in text
    assert text.count("│ starting") == 32


def test_text_of_a_run_is_not_markup_and_problems_are_shown() -> None:
    events = straggling()
    account = dataclasses.replace(account_for(events), problems=("[bold]torn[/bold]",))
    assert "Unreadable: [bold]torn[/bold]" in shown(events, 41, account)


def test_cause_of_a_slow_worker_is_in_its_row() -> None:
    events = run(
        *(
            process(f"worker {rank}", 0, first_step(10, 1), measured(input_s))
            for rank, input_s in enumerate((1.0, 11.0))
        )
    )
    text = shown(events, 21)
    assert row(text, "worker 0")[4] == "0 ms"
    assert row(text, "worker 1")[4] == "200 ms (input)"
    assert "worker 1 is slow in input: the others wait 200 ms of each 400 ms step" in text


def measured(input_s: float) -> StepEvent:
    """50 steps in 20 s, with 5 s of computing and some of input."""
    line = steps(10, 30, 2, 51, waited=15.0 - input_s)
    return dataclasses.replace(line, input_s=input_s)


def before(second: float):
    """The events of a run with changes of members, up to a moment."""
    whole = members_come_and_go()
    return run(
        *(
            ProcessEvents(
                start=one.start,
                events=tuple(event for event in one.events if event.monotonic_s <= second),
            )
            for one in whole.processes
            if one.start.monotonic_s <= second
        )
    )


def test_members_of_a_group_are_counted() -> None:
    text = shown(before(21.75), 21.75)
    assert text.startswith("runs/digits  running  21.8 s since the start, 2 of 3 workers\n")
    assert row(text, "worker 1")[1] == "lost"
    assert row(text, "worker 1")[-1] == "the others continue"
    assert "2 of 3 members; lost 1 time, joined 0 times; training stood still for 1.0 s" in text
    text = shown(before(32), 32)
    assert text.startswith("runs/digits  running  32.0 s since the start, 3 of 3 workers\n")
    assert "workers" not in shown(gang_restart(), 30).splitlines()[0]
