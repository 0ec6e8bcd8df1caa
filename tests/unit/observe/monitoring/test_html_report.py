"""The page is valid, needs no network, and escapes what a run says."""

from __future__ import annotations

import html.parser
import json
import re

import pytest

from stratagem import environment as optional_libraries
from stratagem.observe.events import StepEvent
from stratagem.observe.report_page import (
    Cell,
    TimeFrame,
    failure_cell,
    load_run,
    members_cell,
    memory_cell,
    plan_cell,
    save_cell,
    sections_of,
    speed_cell,
    straggler_cell,
    tiles_of,
    time_cell,
    values_cell,
    warning_cell,
    write_report,
)
from stratagem.observe.time_plot import CAUSE_COLORS
from tests.unit.observe.goodput.runs import (
    at,
    end,
    first_step,
    gang_restart,
    members_come_and_go,
    process,
    run,
    save,
    straggling,
    warning,
    write,
)
from tests.unit.observe.stragglers.simulation import Group

VOID = {"meta", "br", "img"}


class Page(html.parser.HTMLParser):
    """Collects elements, and fails where one is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        self.text += data


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Page:
    folder = tmp_path_factory.mktemp("page")
    write(folder / "run", straggling())
    path = folder / "new" / "report.html"
    write_report(folder / "run", path)
    return Page(path.read_text(encoding="utf-8"))


def test_page_is_one_file(page) -> None:
    tags = {tag for tag, _ in page.seen}
    assert not tags & {"script", "link", "iframe", "object"}
    addresses = [
        value
        for _, attributes in page.seen
        for name, value in attributes.items()
        if name in ("href", "src", "xlink:href")
    ]
    assert addresses
    assert all(one.startswith("data:image/svg+xml;base64,") for one in addresses)
    assert not re.search(r"@import|url\(", page.text)


def test_page_holds_the_sections_of_a_run(page) -> None:
    assert [tag for tag, _ in page.seen].count("h1") == 1
    titles = ("Where the time went", "Stragglers", "Checkpoints", "Warnings")
    assert all(title in page.text for title in titles)
    assert "slow <data>" in page.text


def test_times_are_not_broken_into_lines(page) -> None:
    tables = [attributes.get("class") for tag, attributes in page.seen if tag == "table"]
    assert "times" in tables
    assert None in tables  # that of causes has none
    assert ".times td:first-child { white-space: nowrap;" in page.text


def _luminance(color: str) -> float:
    parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = [
        part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_text_has_the_contrast_of_wcag(page) -> None:
    (variables,) = re.findall(r":root \{(.*?)\}", page.text)
    colors = dict(re.findall(r"--([\w-]+): (#\w{6});", variables))
    (colors["back"],) = re.findall(r"background: (#\w{6});", page.text)
    for text in ("text", "quiet"):
        for back in ("back", "card"):
            dark, light = sorted((_luminance(colors[text]), _luminance(colors[back])))
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, back)


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib"])
def test_missing_library_is_named(tmp_path, monkeypatch, missing) -> None:
    real = optional_libraries.importlib.import_module

    def without(name: str) -> object:
        if name == missing:
            raise ImportError(f"No module named {name!r}")
        return real(name)

    write(tmp_path, straggling())
    monkeypatch.setattr(optional_libraries, "importlib", type("", (), {"import_module": without}))
    with pytest.raises(ImportError, match=rf"(?s)needs {missing}.*stratagem\[observe\]"):
        write_report(tmp_path, tmp_path / "report.html")


def made(cell, folder, events) -> Cell:
    write(folder, events)
    return cell(load_run(folder), TimeFrame(100.0, []))


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (straggler_cell, "one worker"),
        (save_cell, "sg.BackupAndRestore"),
        (plan_cell, "stratagem plan --target TARGET"),
        (failure_cell, "No failure"),
        (warning_cell, "No warning"),
        (values_cell, "sg.goodput.progress"),
        (speed_cell, "sg.goodput.step"),
        (memory_cell, "STRATAGEM_RUN_DIR"),
        (members_cell, "ElasticStrategy"),
    ],
)
def test_empty_cell_says_why_and_how_to_fill_it(cell, words, tmp_path) -> None:
    assert words in made(cell, tmp_path, run(process("worker 0", 0))).empty


# The cell about slow workers.


def simulated(group: Group):
    """The events that the workers of a group write."""
    by_task: dict[str, list[StepEvent]] = {}
    for task, at_s, event in group.lines():
        fields = {name: getattr(event, name) for name in event.__dataclass_fields__}
        fields |= at(2 + at_s) | {"step": event.step + 1}
        by_task.setdefault(task, []).append(StepEvent(**fields))
    return run(*(process(task, 0, first_step(2, 1), *lines) for task, lines in by_task.items()))


def test_each_worker_has_a_row_and_the_slow_one_a_sentence(tmp_path) -> None:
    group = Group(num_workers=3, slow=1, cause="input", extra_s=0.25, noise=0.0)
    found = made(straggler_cell, tmp_path, simulated(group))
    assert found.charts
    assert found.headers[0] == "worker"
    assert [row[0] for row in found.rows] == ["worker 0", "worker 1", "worker 2"]
    assert found.rows[0][1:5] == ("20 ms", "200 ms", "250 ms", "30 ms")
    assert found.rows[1][1:6] == ("270 ms", "200 ms", "0 ms", "30 ms", "input")
    assert found.rows[0][5:] == ("-",)
    assert found.note.startswith(
        "worker 1 is slow in input: the others wait 250 ms of each 500 ms step for it, in 200 of "
        "200 steps. "
    )


def test_equal_workers_are_named_so(tmp_path) -> None:
    found = made(straggler_cell, tmp_path, simulated(Group(num_workers=3)))
    assert found.note.startswith("No worker is slow.")


def test_slow_workers_have_a_row_among_many(tmp_path) -> None:
    group = Group(num_workers=40, num_steps=60, slow=39, cause="compute", extra_s=0.5)
    found = made(straggler_cell, tmp_path, simulated(group))
    assert len(found.rows) == 32
    assert (found.rows[-1][0], found.rows[-1][5]) == ("worker 39", "compute")


def test_longest_delay_and_unknown_times_are_shown(tmp_path) -> None:
    found = made(straggler_cell, tmp_path, straggling())
    assert found.note.endswith("Darkest: 200 ms per step.")
    assert found.rows[1][1:6] == ("-", "250 ms", "-", "-", "unknown")
    assert "worker 1 is slow: the others wait 200 ms of each 400 ms step for it" in found.note


def test_unmeasured_waits_of_several_workers_are_named(tmp_path) -> None:
    found = made(straggler_cell, tmp_path, gang_restart())
    assert found.empty.startswith("8 lines of steps have no measured waits.")


# Cells with tables.


def test_failures_and_restarts_are_in_order(tmp_path) -> None:
    assert made(failure_cell, tmp_path, gang_restart()).rows == (
        ("45.0 s", "failure 1: worker 1 lost", "5.0 s", "13.0 s"),
        ("47.0 s", "restart 1: worker 1 failed", "", ""),
    )


def test_checkpoints_have_their_stalls(tmp_path) -> None:
    lines = (*save(3, 5, 7), *save(8, 9, 9, failed="disk full"), end(9))
    found = made(save_cell, tmp_path, run(process("worker 0", 0, *lines)))
    assert found.rows[0] == ("5.0 s", "7", "2.0 s", "2.0 s", "written")
    assert found.rows[1][-1] == "failed: disk full"
    assert found.note.startswith("2 checkpoints, 3.0 s of stalls.")


def test_warnings_name_their_processes(tmp_path) -> None:
    (row,) = made(warning_cell, tmp_path, straggling()).rows
    assert row == ("12.0 s", "worker 0, worker 1", "UserWarning", "slow <data>", "train.py:3")


def test_only_the_first_of_many_rows_are_shown(tmp_path) -> None:
    many = (warning(number, f"number {number}") for number in range(1, 31))
    found = made(warning_cell, tmp_path, run(process("worker 0", 0, *many)))
    assert (len(found.rows), found.note) == (20, "10 more are left out.")


def test_plan_is_beside_the_measurement(tmp_path) -> None:
    plan = {
        "target": "8xH100",
        "num_devices": 8,
        "global_batch": 800,
        "memory": {"total_bytes": 2 * 1024**3},
        "scaling": [{"num_devices": 1, "step_s": 9.0}, {"num_devices": 8, "step_s": 0.25}],
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    rows = made(plan_cell, tmp_path, straggling()).rows
    assert rows[0][1] == "8xH100"
    assert rows[1] == ("time of a step", "250 ms", "200 ms")
    assert rows[2][:2] == ("examples", "3,200/s")
    assert rows[3] == ("memory per device", "2.0 GiB", "0 MiB")


# Cells with charts.


def test_causes_are_in_a_table_with_their_colors(tmp_path) -> None:
    found = made(time_cell, tmp_path, gang_restart())
    rows = {row[0]: row[1:3] for row in found.rows}
    assert rows["start-up"] == ("10.0 s", "12.8%")
    assert rows["repeated"] == ("10.0 s", "12.8%")
    assert (CAUSE_COLORS["starting"], "start-up") in found.legend


def test_changes_of_members_are_in_a_table(tmp_path) -> None:
    found = made(members_cell, tmp_path, members_come_and_go())
    assert len(found.charts) == 1
    assert found.rows[:2] == (
        ("20.0 s", "worker 1", "-", "2 of 3", "250 ms", "1.0 s"),
        ("30.0 s", "-", "worker 1", "3 of 3", "250 ms", "500 ms"),
    )
    assert len(found.rows) == 4


# Figures of a run, and its plan.


def test_figures_of_a_run(tmp_path) -> None:
    write(tmp_path, straggling())
    tiles = {label: (value, remark) for label, value, remark in tiles_of(load_run(tmp_path))}
    assert tiles["start-up"][0] == "10.0 s"
    assert tiles["steps"] == ("101", "0 run again; 0 failures; 2 workers")
    assert tiles["loss, last"] == ("1", "first recorded: 2")
    assert tiles["host memory, peak"][0] == "300 MiB"
    assert tiles["goodput after start-up"][0].endswith("%")


def test_run_without_steps_has_figures_too(tmp_path) -> None:
    write(tmp_path, run(process("worker 0", 0)))
    tiles = {label: value for label, value, _ in tiles_of(load_run(tmp_path))}
    assert tiles["goodput after start-up"] == "none yet"
    assert tiles["speed, median"] == tiles["loss, last"] == "unknown"
    assert tiles["host memory, peak"] == "-"


@pytest.mark.parametrize(
    ("text", "why"), [("{", "cannot be read"), ("[]", "is no plan"), ("{}", "is no plan")]
)
def test_plan_that_cannot_be_read_is_named(tmp_path, text, why) -> None:
    write(tmp_path, straggling())
    (tmp_path / "plan.json").write_text(text)
    found = load_run(tmp_path)
    assert found.plan is None
    assert why in found.plan_problem


def test_sections_have_unique_titles_and_say_if_they_are_empty(tmp_path) -> None:
    for name, events in (("a", straggling()), ("b", gang_restart())):
        write(tmp_path / name, events)
    found = [sections_of(load_run(tmp_path / name)) for name in "ab"]
    assert len({title for title, _, _ in found[0]}) == len(found[0]) == 10
    first, second = ({title: cell for title, _, cell in one} for one in found)
    assert first["Failures and restarts"].empty
    assert second["Failures and restarts"].rows
    for title in ("Where the time went", "Loss and metrics", "Speed", "Memory"):
        assert first[title].charts
        assert not first[title].empty
