"""Tables of a run's goodput."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from stratagem.observe.goodput.account import account_for
from stratagem.observe.goodput.report import changes_line, duration_text, show
from tests.unit.observe.goodput.runs import (
    end,
    failure,
    first_step,
    gang_restart,
    long_run,
    members,
    members_come_and_go,
    notice,
    process,
    run,
    steps,
)


def shown(account) -> str:
    console = Console(file=io.StringIO(), width=100)
    show(account, console)
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


def test_run_without_failures_has_no_table_of_them() -> None:
    text = shown(account_for(run(process("worker 0", 0, first_step(1, 1), steps(1, 3, 2, 2)))))
    assert "Failures" not in text
    assert "0 failures, 1 process; still running or killed\n" in text


def test_healthy_short_run_does_not_read_as_a_bad_one() -> None:
    """Two seconds of steps after ten seconds of start-up."""
    lines = (first_step(10, 1), steps(10, 12, 2, 41), end(12))
    text = shown(account_for(run(process("worker 0", 0, *lines))))
    assert text.startswith(
        "Goodput after start-up: 1.000 (2.0 s useful of 2.0 s)\n"
        "Goodput with start-up:  0.167 (2.0 s useful of 12.0 s; start-up took 10.0 s)\n"
    )


def test_run_before_its_first_step_has_no_goodput_yet() -> None:
    text = shown(account_for(run(process("worker 0", 0, notice(8)))))
    assert text.startswith("Goodput after start-up: none yet\nStart-up has taken 8.0 s.\n")


def test_only_the_first_of_many_failures_are_listed() -> None:
    text = shown(account_for(long_run(40, 1200)))
    assert text.count("worker 1 lost") == 20
    assert rows(text)["..."][-1] == "and 20 more"


def test_text_of_a_run_is_not_markup() -> None:
    account = account_for(run(process("worker 0", 0, failure(1, "[red]worker[/red]"))))
    account = dataclasses.replace(account, problems=("[bold]torn[/bold]",))
    text = shown(account)
    assert "[red]worker[/red] lost" in text
    assert "Unreadable: [bold]torn[/bold]" in text


def test_group_shows_its_members_and_its_pauses() -> None:
    lines = shown(account_for(members_come_and_go()))
    assert "3 of 3 members; lost 2 times, joined 2 times; training stood still for 3.5 s" in lines
    assert "94 steps, 0 failures" in lines
    assert "members lost" in lines
    assert "members" not in shown(account_for(gang_restart()))


def test_group_without_changes_shows_its_members() -> None:
    events = run(process("worker 0", 0, members(1, 0, 3, pause_s=None), first_step(2, 1)))
    assert changes_line(account_for(events)) == "3 of 3 members"
