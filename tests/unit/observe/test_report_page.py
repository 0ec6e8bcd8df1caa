"""The page is valid, needs no network, and shows what a run recorded; its picture cuts no text."""

from __future__ import annotations

import base64
import html.parser
import itertools
import json
import math
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from stratagem import environment as optional_libraries
from stratagem.cli import main
from stratagem.observe.events import RunEvents, StepEvent, read_run
from stratagem.observe.goodput import CAUSES, account_for
from stratagem.observe.report_page import (
    CAUSE_COLORS,
    Section,
    figure_of,
    memory_of,
    render,
    sections_of,
    series_of,
    shares_over_time,
    speed_of,
    time_unit,
    values_of,
    write_report,
)
from tests.command_runner import CliRunner
from tests.unit.observe.lockstep_group import Group
from tests.unit.observe.runs import (
    EPOCH_S,
    at,
    end,
    failure,
    first_step,
    gang_restart,
    long_run,
    members_come_and_go,
    memory,
    process,
    progress,
    run,
    save,
    steps,
    straggling,
    write,
)

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
    titles = ("Where the time went", "Slow workers", "What happened")
    assert all(title in page.text for title in titles)
    assert "Goodput after start-up: " in page.text


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
        dark, light = sorted((_luminance(colors[text]), _luminance(colors["back"])))
        assert (light + 0.05) / (dark + 0.05) >= 4.5, text


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


# Tables of the page.


def section(title: str, events: RunEvents) -> Section:
    (found,) = [one for one in sections_of(events, account_for(events)) if one.title == title]
    return found


NOTHING = run(process("worker 0", 0))


@pytest.mark.parametrize(
    ("title", "events", "words"),
    [
        ("Slow workers", NOTHING, "one worker"),
        ("What happened", NOTHING, "sg.BackupAndRestore"),
        ("Slow workers", gang_restart(), "without measured waits none is found"),
        ("Slow workers", None, "No worker is slow."),
    ],
)
def test_section_without_anything_to_tell_says_why(title, events, words) -> None:
    found = section(title, events or simulated(Group(num_workers=3)))
    assert words in found.note
    assert bool(found.rows) == (events is None)


def test_what_was_not_recorded_is_named_with_the_way_to_record_it() -> None:
    page = Page(render("run", NOTHING))
    for words in ("sg.goodput.progress", "sg.goodput.step", "STRATAGEM_RUN_DIR"):
        assert words in page.text
    assert not any(words in Page(render("run", straggling())).text for words in ("sg.goodput",))


def test_causes_are_in_a_table() -> None:
    rows = {row[0]: row[1:3] for row in section("Where the time went", gang_restart()).rows}
    assert rows["start-up"] == ("10.0 s", "12.8%")
    assert rows["repeated"] == ("10.0 s", "12.8%")
    assert "members lost" not in rows


def simulated(group: Group):
    """The events that the workers of a group write."""
    by_task: dict[str, list[StepEvent]] = {}
    for task, at_s, event in group.lines():
        fields = {name: getattr(event, name) for name in event.__dataclass_fields__}
        fields |= at(2 + at_s) | {"step": event.step + 1}
        by_task.setdefault(task, []).append(StepEvent(**fields))
    return run(*(process(task, 0, first_step(2, 1), *lines) for task, lines in by_task.items()))


def test_each_worker_has_a_row_and_the_slow_one_a_sentence() -> None:
    group = Group(num_workers=3, slow=1, cause="input", extra_s=0.25, noise=0.0)
    found = section("Slow workers", simulated(group))
    assert found.headers[0] == "worker"
    assert [row[0] for row in found.rows] == ["worker 0", "worker 1", "worker 2"]
    assert found.rows[0][1:] == ("20 ms", "200 ms", "250 ms", "30 ms", "-")
    assert found.rows[1][1:] == ("270 ms", "200 ms", "0 ms", "30 ms", "input")
    assert found.note == (
        "worker 1 is slow in input: the others wait 250 ms of each 500 ms step for it, in 200 of "
        "200 steps."
    )


def test_slow_workers_have_a_row_among_many() -> None:
    group = Group(num_workers=40, num_steps=60, slow=39, cause="compute", extra_s=0.5)
    found = section("Slow workers", simulated(group))
    assert len(found.rows) == 32
    assert (found.rows[-1][0], found.rows[-1][5]) == ("worker 39", "compute")


def test_unknown_times_are_dashes() -> None:
    found = section("Slow workers", straggling())
    assert found.rows[1][1:] == ("-", "250 ms", "-", "-", "unknown")
    assert "worker 1 is slow: the others wait 200 ms of each 400 ms step for it" in found.note


def test_failures_and_restarts_are_in_order() -> None:
    assert section("What happened", gang_restart()).rows == [
        ("45.0 s", "failure", "worker 1 lost, detected in 5.0 s, the next step 13.0 s later"),
        ("47.0 s", "restart", "1: worker 1 failed"),
    ]
    known = run(process("worker 0", 0, failure(1, "worker 1", step=1200, reported_by="worker 0")))
    assert section("What happened", known).rows == [
        (
            "1.0 s",
            "failure",
            "worker 1 lost in shared program 1,200, reported by worker 0, no step since",
        )
    ]
    unknown = run(process("worker 0", 0, failure(1, "<worker> 1")))
    assert section("What happened", unknown).rows == [
        ("1.0 s", "failure", "<worker> 1 lost, no step since")
    ]
    assert "<worker> 1 lost" in Page(render("run", unknown)).text


def test_checkpoints_have_their_stalls() -> None:
    lines = (*save(3, 5, 7), *save(8, 9, 1009, failed="disk full"), end(9))
    assert section("What happened", run(process("worker 0", 0, *lines))).rows == [
        ("5.0 s", "checkpoint", "step 7, written in 2.0 s, training waited 2.0 s"),
        ("9.0 s", "checkpoint", "step 1,009, failed after 1.0 s: disk full"),
    ]


def test_checkpoint_of_several_processes_is_one() -> None:
    events = run(
        process("worker 0", 0, first_step(1, 1), *save(2, 3, 1), end(9)),
        process("worker 1", 0, first_step(1, 1), *save(2, 4, 1, stall_s=0.5), end(9)),
        process("worker 0", 10, first_step(11, 1), *save(12, 13, 1), end(19), attempt=1),
    )
    found = [row for row in section("What happened", events).rows if row[1] == "checkpoint"]
    assert found == [
        ("4.0 s", "checkpoint", "step 1, written in 2.0 s, training waited 1.0 s"),
        ("13.0 s", "checkpoint", "step 1, written in 1.0 s, training waited 1.0 s"),
    ]


def test_only_the_first_of_many_events_of_a_kind_are_shown() -> None:
    many = [one for step in range(1, 31) for one in save(step, step + 0.5, step)]
    found = section("What happened", run(process("worker 0", 0, *many, failure(40, "worker 1"))))
    assert [row[1] for row in found.rows] == [*["checkpoint"] * 20, "failure"]
    assert found.note == "10 more of the kind checkpoint are left out."


def test_changes_of_members_are_events() -> None:
    rows = section("What happened", members_come_and_go()).rows
    assert rows[:2] == [
        ("20.0 s", "members lost", "worker 1; 2 of 3 train; training stood still for 1.0 s"),
        ("30.0 s", "members joined", "worker 1; 3 of 3 train; training stood still for 500 ms"),
    ]
    assert len(rows) == 4


# Lines over time, beside values computed by hand.


def test_values_are_those_of_one_worker() -> None:
    values = values_of(straggling(), EPOCH_S)
    assert values["loss"] == [(20.0, 2.0), (40.0, 1.0)]
    assert [value for _, value in values["accuracy"]] == [0.5, 0.75]


def test_speed_is_counted_in_each_column() -> None:
    """5 steps a second until second 20, then 2.5; none while the first step is compiled."""
    speed = speed_of(straggling(), account_for(straggling()))
    assert len(speed) == 81
    counts = [value for _, value in speed]
    assert counts[int(5 / 41 * 80)] == 0
    assert counts[int(15 / 41 * 80)] == pytest.approx(5)
    assert counts[int(30 / 41 * 80)] == pytest.approx(2.5)
    assert sum(counts[:-1]) * 41 / 80 == pytest.approx(100)
    assert speed_of(NOTHING, account_for(NOTHING)) == []


def test_memory_has_a_line_per_task_and_a_gap_between_its_processes() -> None:
    gib = 1024**3
    events = run(
        process("worker 0", 0, memory(5, gib), end(10, 1)),
        process("worker 0", 20, memory(25, 2 * gib, 3 * gib), end(30), attempt=1),
    )
    line = memory_of(events.processes, "host_bytes", EPOCH_S)["worker 0"]
    assert [at_s for at_s, _ in line] == [5, 25, 25]
    assert (line[0][1], line[2][1]) == (1, 2)
    assert math.isnan(line[1][1])
    ((_, of_device),) = memory_of(events.processes, "device_bytes", EPOCH_S)["worker 0"]
    assert of_device == 3


def test_members_hold_until_the_next_change() -> None:
    events = members_come_and_go()
    (members,) = [one for one in series_of(events, account_for(events)) if one.label == "members"]
    assert [count for _, count in members.lines["members"]] == [3, 2, 3, 2, 3, 3]
    assert members.lines["members"][-1][0] == 63
    assert all(one.is_empty for one in series_of(NOTHING, account_for(NOTHING)))


@pytest.mark.parametrize("num_columns", [1, 7, 1000])
def test_columns_hold_all_of_the_time(num_columns) -> None:
    account = account_for(gang_restart())
    shares = shares_over_time(account, num_columns)
    for column in zip(*shares.values(), strict=True):
        assert sum(column) == pytest.approx(1)
    for cause in CAUSES:
        assert sum(shares[cause]) / num_columns * 78 == pytest.approx(account.time_s[cause])


# The picture of a run.


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
        pytest.param(straggling(), id="all series"),
        pytest.param(members_come_and_go(), id="members"),
        pytest.param(NOTHING, id="only a start"),
        pytest.param(
            run(process("worker 0", 0, first_step(1, 1), steps(1, 90000, 2, 3))), id="a day"
        ),
        pytest.param(run(process("worker 0", 0, end(90000))), id="nothing useful"),
    ],
)
def test_no_text_is_cut_or_covered(events) -> None:
    figure = figure_of(events, account_for(events))
    boxes = _texts(figure)
    assert len(boxes) > 8
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
    events = long_run(3)
    time_spent, goodput, *_ = figure_of(events, account_for(events)).axes
    # In minutes; each was reported one second after a quarter of the run.
    places = pytest.approx([151 / 60, 301 / 60, 451 / 60])
    assert [line.get_xdata()[0] for line in time_spent.lines] == places
    assert [line.get_xdata()[0] for line in goodput.lines[1:]] == places


def picture_in(text: str) -> str:
    (content,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', text)
    return base64.b64decode(content).decode()


def texts_of(picture: str) -> set[str]:
    return {one.text or "" for one in ET.fromstring(picture).iterfind(".//{*}text")}


def test_picture_has_the_colors_of_its_causes_and_needs_nothing_from_elsewhere() -> None:
    picture = picture_in(render("run", gang_restart()))
    for cause in ("useful", "repeated", "detecting", "restarting", "starting"):
        assert CAUSE_COLORS[cause] in picture
    assert {"start-up", "seconds from the first start", "steps/s"} <= texts_of(picture)
    for one in ET.fromstring(picture).iter():
        for name, value in one.items():
            assert not name.endswith("href") or value.startswith("#")
    assert picture_in(render("run", gang_restart())) == picture


@pytest.mark.parametrize("values", [(None,), (0.0,), (-1.0, -2.0), (1e-9, 2e-9)])
@pytest.mark.parametrize("name", ["loss", "a$b^$", "<script>"])
def test_unusual_values_and_names_are_drawn(name, values) -> None:
    lines = [progress(5 + index, 1 + index, **{name: value}) for index, value in enumerate(values)]
    assert name in texts_of(picture_in(render("run", run(process("worker 0", 0, *lines)))))


@pytest.mark.parametrize(
    ("whole_s", "unit"), [(0.0, "seconds"), (299.0, "seconds"), (3600.0, "minutes"), (1e5, "hours")]
)
def test_time_is_shown_in_a_sensible_unit(whole_s, unit) -> None:
    assert time_unit(whole_s)[1] == unit


# Views of a real run: two workers, a kill, a restart, and a worker that reads slowly.

_PROGRAM = """
import os, time
import stratagem as sg
import keras
import numpy as np

is_first = os.environ.get("STRATAGEM_RESTART_COUNT", "0") == "0"
strategy = sg.MultiWorkerMirroredStrategy()
rank = strategy.cluster_resolver.task_id


class Rows(keras.utils.PyDataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        time.sleep(0.1 if rank == 1 else 0.0)
        rows = np.full((4, 3), index, "float32")
        return rows, rows[:, :1]


class Kill(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if is_first and rank == 1 and epoch == 1:
            os._exit(7)


with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
backup = sg.BackupAndRestore(os.environ["BACKUP"])
model.fit(Rows(), epochs=3, verbose=0, callbacks=[Kill(), backup])
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "train.py").write_text(_PROGRAM)
    command = "launch --workers 2 --max-restarts 1 --run-dir run train.py"
    subprocess.run(
        [sys.executable, "-m", "stratagem", *command.split()],
        cwd=folder,
        env=os.environ | {"BACKUP": str(folder / "backup")},
        check=True,
        timeout=300,
    )
    return folder / "run"


@pytest.mark.slow
def test_views_of_a_real_run_show_who_held_up_whom(run_dir) -> None:
    shown = json.loads(CliRunner().invoke(main, ["watch", str(run_dir), "--json"]).stdout)
    assert (shown["is_over"], shown["num_launches"], shown["num_restarts"]) == (True, 1, 1)
    assert (shown["step"], shown["total_steps"], shown["epoch"]) == (60, 60, 3)
    assert set(shown["values"]) == {"loss"}
    first, second = (task for task in shown["tasks"] if "worker" in task["task"])
    assert first["late_s"] is None
    assert second["late_s"] > 0.02
    assert first["host_bytes"] > 50 * 1024**2
    account = account_for(read_run(run_dir))
    assert account.goodput_after_startup is not None
    assert account.goodput_after_startup > account.goodput
    assert account.startup_s > 0
    assert account.problems == ()
    page = run_dir / "report.html"
    assert CliRunner().invoke(main, ["report", str(run_dir)]).stdout == f"Wrote {page}.\n"
    text = page.read_text()
    assert "1: worker 1 failed (exit code 7)" in text
    assert "worker 1 is slow in input: the others wait" in text
    assert "worker 0 is slow" not in text
    rows = section("What happened", read_run(run_dir)).rows
    assert [row[1] for row in rows].count("checkpoint") >= 3
