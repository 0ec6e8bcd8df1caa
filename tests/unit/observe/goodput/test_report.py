"""Plot of a run: its colors match the account, and no text is cut off or covered."""

from __future__ import annotations

import dataclasses
import io
import itertools
from typing import Any

import pytest
from rich.console import Console

from stratagem.observe.events import RunEvents
from stratagem.observe.goodput import CAUSES, Account, account_for
from stratagem.observe.terminal import changes_line, duration_text, show_account, shown_causes
from stratagem.observe.time_plot import figure_of, shares_over_time
from tests.unit.observe.goodput.runs import (
    account_of,
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


def _close_failures() -> RunEvents:
    """Five within a second, and one far away."""
    told = [failure(100 + number / 5) for number in range(5)]
    lines = [first_step(100.1 + number / 5, 2 + number) for number in range(5)]
    return run(process("worker 0", 0, first_step(1, 1), *told, *lines, failure(300), end(400)))


def _texts(figure: Any) -> dict[str, Any]:
    """The places of all texts that are drawn: of ticks, those between the limits."""
    # The tests of the oldest versions load this module without the extra `observe`.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    found = figure.findobj(Text)
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in axis.get_major_ticks():
                if not low <= tick.get_loc() <= high:
                    found = [one for one in found if one not in (tick.label1, tick.label2)]
    boxes = [
        (one.get_text(), one.get_window_extent(canvas.get_renderer()))
        for one in found
        if one.get_visible()
    ]
    return {f"{place}: {text}": box for place, (text, box) in enumerate(boxes) if text.strip()}


def _many(num_failures: int) -> object:
    return pytest.param(long_run(num_failures, 1200), id=f"{num_failures} failures")


@pytest.mark.parametrize(
    "events",
    [
        *map(_many, (0, 3, 40)),
        pytest.param(_close_failures(), id="close failures"),
        pytest.param(run(process("worker 0", 0)), id="only a start"),
        pytest.param(
            run(process("worker 0", 0, first_step(1, 1), steps(1, 90000, 2, 3))), id="a day"
        ),
        pytest.param(run(process("worker 0", 0, end(90000))), id="nothing useful"),
    ],
)
def test_no_text_is_cut_or_covered(events) -> None:
    figure = figure_of(account_for(events))
    boxes = _texts(figure)
    assert len(boxes) > 10
    for text, box in boxes.items():
        assert box.x0 >= 0, text
        assert box.y0 >= 0, text
        assert box.x1 <= figure.bbox.x1, text
        assert box.y1 <= figure.bbox.y1, text
    covered = [
        (one, other)
        for (one, box), (other, second) in itertools.combinations(boxes.items(), 2)
        if box.overlaps(second)
    ]
    assert not covered


def test_failures_are_marked_where_they_were_reported() -> None:
    over_time, _ = figure_of(account_for(long_run(3))).axes
    (markers,) = over_time.lines
    # In minutes; each was reported one second after a quarter of the run.
    assert list(markers.get_xdata()) == pytest.approx([151 / 60, 301 / 60, 451 / 60])
    assert [text.get_text() for text in over_time.texts] == ["1", "2", "3"]


def test_failures_that_lie_close_together_get_one_text() -> None:
    over_time, _ = figure_of(account_for(_close_failures())).axes
    assert [text.get_text() for text in over_time.texts] == ["1-5", "6"]


def test_losses_are_those_of_the_account() -> None:
    account = account_for(gang_restart())
    _, losses = figure_of(account).axes
    widths = [bar.get_width() for bar in losses.patches]
    expected = [
        100 * account.time_s[cause] / 78 for cause in shown_causes(account) if cause != "useful"
    ]
    assert widths == pytest.approx(expected)


@pytest.mark.parametrize("num_columns", [1, 7, 1000])
def test_columns_hold_all_of_the_time(num_columns) -> None:
    account = account_for(gang_restart())
    shares = shares_over_time(account, num_columns)
    for column in zip(*shares.values(), strict=True):
        assert sum(column) == pytest.approx(1)
    for cause in CAUSES:
        assert sum(shares[cause]) / num_columns * 78 == pytest.approx(account.time_s[cause])


def test_columns_of_a_run_counted_by_hand() -> None:
    shares = shares_over_time(account_for(gang_restart()), 78)
    assert [shares["starting"][second] for second in (0, 9, 10)] == pytest.approx([1, 1, 0])
    assert [shares["repeated"][second] for second in (29, 30, 39)] == pytest.approx([0, 1, 1])
    assert [shares["detecting"][second] for second in (40, 44, 45)] == pytest.approx([1, 1, 0])
    assert [shares["useful"][second] for second in (57, 58, 77)] == pytest.approx([0, 1, 1])


def test_run_without_time_has_empty_columns() -> None:
    account: Account = account_of(process("worker 0", 0))
    assert shares_over_time(account, 3) == {cause: [0.0] * 3 for cause in CAUSES}


def test_losses_of_a_group_are_drawn_only_for_a_group() -> None:
    def names(account: Account) -> list[str]:
        return [label.get_text() for label in figure_of(account).axes[1].get_yticklabels()]

    group = names(account_for(members_come_and_go()))
    assert group == [cause for cause in CAUSES if cause != "useful"]
    other = names(account_for(gang_restart()))
    assert set(group) - set(other) == {"members lost", "members joined"}


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


def test_run_without_failures_has_no_table_of_them() -> None:
    text = shown(account_of(process("worker 0", 0, first_step(1, 1), steps(1, 3, 2, 2))))
    assert "Failures" not in text
    assert "0 failures, 1 process; still running or killed\n" in text


def test_healthy_short_run_does_not_read_as_a_bad_one() -> None:
    """Two seconds of steps after ten seconds of start-up."""
    lines = (first_step(10, 1), steps(10, 12, 2, 41), end(12))
    text = shown(account_of(process("worker 0", 0, *lines)))
    assert text.startswith(
        "Goodput after start-up: 1.000 (2.0 s useful of 2.0 s)\n"
        "Goodput with start-up:  0.167 (2.0 s useful of 12.0 s; start-up took 10.0 s)\n"
    )


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


def test_group_shows_its_members_and_its_pauses() -> None:
    lines = shown(account_for(members_come_and_go()))
    assert "3 of 3 members; lost 2 times, joined 2 times; training stood still for 3.5 s" in lines
    assert "94 steps, 0 failures" in lines
    assert "members lost" in lines
    assert "members" not in shown(account_for(gang_restart()))


def test_group_without_changes_shows_its_members() -> None:
    events = run(process("worker 0", 0, members(1, 0, 3, pause_s=None), first_step(2, 1)))
    assert changes_line(account_for(events)) == "3 of 3 members"
