"""Plot of a run: its colors match the account, and no text is cut off or covered."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from stratagem.observe.goodput.account import Account, account_for
from stratagem.observe.goodput.report import draw, figure_of, shares_over_time, shown_causes
from stratagem.observe.goodput.time_spans import CAUSES
from stratagem.observe.run_events.reader import RunEvents
from tests.unit.observe.goodput.runs import (
    end,
    failure,
    first_step,
    gang_restart,
    long_run,
    members_come_and_go,
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
        *map(_many, (0, 1, 3, 12, 40)),
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


@pytest.mark.parametrize("num_columns", [1, 7, 100, 1000])
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
    account: Account = account_for(run(process("worker 0", 0)))
    assert shares_over_time(account, 3) == {cause: [0.0] * 3 for cause in CAUSES}


def test_picture_is_written_into_a_new_folder(tmp_path: Path) -> None:
    draw(account_for(gang_restart()), tmp_path / "new" / "run.png")
    assert (tmp_path / "new" / "run.png").read_bytes().startswith(b"\x89PNG")


def test_losses_of_a_group_are_drawn_only_for_a_group() -> None:
    def names(account: Account) -> list[str]:
        return [label.get_text() for label in figure_of(account).axes[1].get_yticklabels()]

    group = names(account_for(members_come_and_go()))
    assert group == [cause for cause in CAUSES if cause != "useful"]
    other = names(account_for(gang_restart()))
    assert set(group) - set(other) == {"members lost", "members joined"}
