"""Terminal views: tables of goodput, and the frames of a run."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from stratagem.observe import terminal as live_view
from stratagem.observe.events import ProcessEvents, StepEvent, encode
from stratagem.observe.goodput import account_for
from stratagem.observe.run_state import RunState, Watcher
from stratagem.observe.terminal import duration_text, frame, show_account
from tests.unit.observe.runs import (
    EPOCH_S,
    account_of,
    end,
    failure,
    first_step,
    gang_restart,
    long_run,
    members_come_and_go,
    notice,
    process,
    progress,
    run,
    steps,
    straggling,
    write,
)

# Tables of a run's goodput.


def shown(account) -> str:
    console = Console(file=io.StringIO(), width=100)
    show_account(account, console)
    return console.file.getvalue()


def rows(text: str) -> dict[str, list[str]]:
    """The cells of the tables by the first one of each row."""
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    return {row[0]: row[1:] for row in cells if row}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0004, "0 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (100 * 3600, "100 h 00 min"),
    ],
)
def test_duration_is_rounded_into_the_next_unit(seconds, text) -> None:
    assert duration_text(seconds) == text


def test_tables_show_the_account() -> None:
    text = shown(account_for(gang_restart()))
    assert text.startswith(
        "Goodput after start-up: 0.588 (40.0 s useful of 1 min 08 s)\n"
        "Goodput with start-up:  0.513 (40.0 s useful of 1 min 18 s; start-up took 10.0 s)\n"
        "42 steps, 10 repeated, 1 failure, 5 processes\n"
    )
    table = rows(text)
    assert table["useful"][:2] == ["40.0 s", "51.3%"]
    assert table["repeated"][:2] == ["10.0 s", "12.8%"]
    assert table["detecting"][:2] == ["5.0 s", "6.4%"]
    assert table["restarting"][:2] == ["13.0 s", "16.7%"]
    assert table["45.0 s"] == ["5.0 s", "13.0 s", "worker 1 lost"]
    assert table["median"][:2] == table["worst"][:2] == ["5.0 s", "13.0 s"]


def test_unknown_times_are_dashes() -> None:
    events = run(process("worker 0", 0, failure(1)), process("worker 1", 0, failure(2)))
    text = shown(account_for(events))
    assert rows(text)["1.0 s"][:2] == ["-", "-"]
    assert rows(text)["worst"][:2] == ["-", "-"]
    assert "still running or killed" in text


def test_run_before_its_first_step_has_no_goodput_yet() -> None:
    text = shown(account_of(process("worker 0", 0, notice(8))))
    assert text.startswith("Goodput after start-up: none yet\nStart-up has taken 8.0 s.\n")


def test_only_the_first_of_many_failures_are_listed() -> None:
    text = shown(account_for(long_run(40, 1200)))
    assert text.count("worker 1 lost") == 20
    assert rows(text)["..."][-1] == "and 20 more"


def test_text_of_a_run_is_not_markup() -> None:
    account = account_of(process("worker 0", 0, failure(1, "[red]worker[/red]")))
    account = dataclasses.replace(account, problems=("[bold]torn[/bold]",))
    text = shown(account)
    assert "[red]worker[/red] lost" in text
    assert "Unreadable: [bold]torn[/bold]" in text


# Frames of the terminal view.


def framed(events, second: float, account=None) -> str:
    console = Console(file=io.StringIO(), width=140)
    state = RunState()
    state.add(events.processes, EPOCH_S + second)
    snapshot = state.snapshot(EPOCH_S + second)
    console.print(frame("runs/digits", snapshot, account or account_for(events)))
    return console.file.getvalue()


def row(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"│ {name}")]
    return [cell.strip() for cell in line.split("│")[1:-1]]


def test_frame_shows_a_straggler_and_all_figures() -> None:
    text = framed(straggling(), 41)
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
    values = [line.split()[0] for line in text.splitlines() if line.startswith(("loss", "acc"))]
    assert values == ["loss", "accuracy"]


def test_running_worker_says_when_it_was_heard() -> None:
    text = framed(run(process("worker 0", 0, first_step(5, 1))), 9)
    assert text.startswith("runs/digits  running  9.0 s since the start\n")
    assert row(text, "worker 0")[1:5] == ["running", "1", "4 s ago", "-"]


@pytest.mark.parametrize("loss", [1.0, None])
def test_value_that_is_not_finite_is_named(loss) -> None:
    text = framed(run(process("worker 0", 0, progress(5, 1, loss=loss))), 6)
    assert ("not finite" in text) is (loss is None)


def test_launcher_has_no_row_and_only_some_of_many_workers_have_one() -> None:
    text = framed(gang_restart(), 78)
    assert "launcher" not in text
    assert ", 1 restart\n" in text
    text = framed(run(*(process(f"worker {index}", 0) for index in range(40))), 5)
    assert "and 8 more" in text
    assert text.count("│ starting") == 32


def test_cause_of_a_slow_worker_is_in_its_row() -> None:
    events = run(
        *(
            process(f"worker {rank}", 0, first_step(10, 1), measured(input_s))
            for rank, input_s in enumerate((1.0, 11.0))
        )
    )
    text = framed(events, 21)
    assert row(text, "worker 0")[4] == "-"
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
    text = framed(before(21.75), 21.75)
    assert text.startswith("runs/digits  running  21.8 s since the start, 2 of 3 workers\n")
    assert row(text, "worker 1")[1] == "lost"
    assert row(text, "worker 1")[-1] == "the others continue"
    assert "2 of 3 members; lost 1 time, joined 0 times; training stood still for 1.0 s" in text
    text = framed(before(32), 32)
    assert text.startswith("runs/digits  running  32.0 s since the start, 3 of 3 workers\n")
    assert "workers" not in framed(gang_restart(), 30).splitlines()[0]


# Loops over a growing folder; tests/unit/cli/test_other_commands.py has one in a terminal.


def test_view_ends_with_the_run(tmp_path, capsys) -> None:
    write(tmp_path, straggling())
    live_view.show_live("run", Watcher(tmp_path), 1e6)
    assert "finished" in capsys.readouterr().out


def test_exports_end_a_while_after_the_run(tmp_path, monkeypatch) -> None:
    seconds = [0.0]
    monkeypatch.setattr(live_view.time, "monotonic", lambda: seconds[0])

    def sleep(interval_s: float) -> None:
        seconds[0] += interval_s
        if seconds[0] == 30:
            with (tmp_path / "events" / "worker-0.0.jsonl").open("a") as file:
                file.write(encode(end(30)) + "\n")

    monkeypatch.setattr(live_view.time, "sleep", sleep)
    write(tmp_path, run(process("worker 0", 0, first_step(5, 1))))
    live_view.export(Watcher(tmp_path), 1.0)
    assert seconds[0] == pytest.approx(30 + 60, abs=1.5)
