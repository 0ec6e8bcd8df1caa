"""Charts are self-contained SVG elements whose colors are variables."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from stratagem.observe.goodput.account import account_for
from stratagem.observe.monitoring.charts import (
    COLORS,
    TimeFrame,
    cause_role,
    line_chart,
    members_chart,
    straggler_chart,
    time_chart,
)
from stratagem.observe.monitoring.run_series import Line, series_of
from tests.unit.observe.goodput.runs import gang_restart, members_come_and_go, straggling

FRAME = TimeFrame(78.0, [45.0])


def texts(svg: str) -> list[str]:
    return [one.text or "" for one in ET.fromstring(svg).iter() if one.tag.endswith("text")]


def test_time_chart_has_the_colors_of_its_causes() -> None:
    svg = time_chart(account_for(gang_restart()), FRAME)
    for cause in ("useful", "repeated", "detecting", "restarting", "starting"):
        assert f"var(--cause-{cause})" in svg
    assert "failure 1" in texts(svg)
    assert "seconds from the first start" in texts(svg)


def test_chart_needs_nothing_from_elsewhere() -> None:
    svg = line_chart({"loss": Line((0.0, 1.0), (2.0, 1.0))}, FRAME, "loss")
    assert svg.startswith("<svg")
    assert "http" not in svg.replace("http://www.w3.org/", "")
    assert not any(color in svg for color in COLORS.values())
    assert line_chart({"loss": Line((0.0, 1.0), (2.0, 1.0))}, FRAME, "loss") == svg


def test_names_are_text_and_no_formulas() -> None:
    line = Line((0.0, 1.0), (2.0, 1.0))
    svg = line_chart({"a$b^$": line, "<script>": line}, FRAME, "metrics")
    assert {"a$b^$", "<script>"} <= set(texts(svg))


@pytest.mark.parametrize(
    "values", [(float("nan"),), pytest.param((0.0,), marks=pytest.mark.slow), (-1.0, -2.0), ()]
)
def test_unusual_values_are_drawn(values) -> None:
    line = Line(tuple(float(index) for index in range(len(values))), values)
    assert line_chart({"loss": line}, FRAME, "loss").startswith("<svg")


def test_straggler_chart_is_redder_where_a_worker_is_slow() -> None:
    events = straggling()
    account = account_for(events)
    found = series_of(events, account.begin_s, account.whole_s).stragglers
    assert found is not None
    svg = straggler_chart(found, TimeFrame(account.whole_s, []), account.whole_s)
    assert {"worker 0", "worker 1"} <= set(texts(svg))
    assert svg.count("#d94026") == 1  # one rectangle: its delay is the same all the time


@pytest.mark.parametrize(
    ("whole_s", "unit"), [(0.0, "seconds"), (299.0, "seconds"), (3600.0, "minutes"), (1e5, "hours")]
)
def test_time_is_shown_in_a_sensible_unit(whole_s, unit) -> None:
    assert TimeFrame(whole_s, []).unit == unit


def test_each_loss_and_join_of_a_member_is_marked() -> None:
    """Two of each, after the beginning of the group."""
    account = account_for(members_come_and_go())
    frame = TimeFrame(account.whole_s, [])
    svg = members_chart(account.member_changes, frame, account.whole_s)
    assert {"members", "0", "1", "2", "3"} <= set(texts(svg))
    marks = [one for one in ET.fromstring(svg).iter() if one.tag.endswith("use")]
    for role in ("failure", "cause-useful"):
        assert sum(f"fill: var(--{role})" in one.get("style", "") for one in marks) == 2
    without = members_chart(account.member_changes[:1], frame, account.whole_s)
    assert "var(--failure)" not in without


def test_role_of_a_cause_is_a_name_of_a_variable() -> None:
    assert all(" " not in role for role in COLORS)
    assert cause_role("members lost") == "cause-members-lost"
