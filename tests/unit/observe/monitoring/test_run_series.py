"""Metrics as Prometheus reads them."""

from __future__ import annotations

import base64
import hmac
import io
import json
import math
import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from stratagem import environment as optional_libraries
from stratagem.cli import main
from stratagem.cli import runs as prometheus_export
from stratagem.cli.runs import RunCollector, serve
from stratagem.errors import NotFoundError
from stratagem.observe.goodput.account import account_for
from stratagem.observe.goodput.report import CAUSE_COLORS
from stratagem.observe.monitoring import run_state as watcher_module
from stratagem.observe.monitoring.html_report import (
    TimeFrame,
    line_chart,
    load_run,
    members_chart,
    straggler_chart,
    time_chart,
)
from stratagem.observe.monitoring.run_series import NUM_COLUMNS, Line, series_of
from stratagem.observe.monitoring.run_state import LOST_AFTER_S, ProcessState, Watcher
from stratagem.observe.run_events.reader import read_run
from stratagem.observe.run_events.records import encode
from tests.command_runner import CliRunner
from tests.unit.observe.goodput.runs import (
    EPOCH_S,
    end,
    failure,
    first_step,
    gang_restart,
    members_come_and_go,
    memory,
    process,
    progress,
    restored,
    run,
    save,
    steps,
    straggling,
    warning,
    write,
)

client = pytest.importorskip("prometheus_client")
parser = pytest.importorskip("prometheus_client.parser")


def samples(text: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name.removeprefix("stratagem_"), *sample.labels.values()): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def scraped(watcher: Watcher) -> dict[tuple[str, ...], float]:
    registry = client.CollectorRegistry()
    registry.register(RunCollector(watcher))
    return samples(client.generate_latest(registry).decode())


def test_metrics_are_those_of_the_run(tmp_path) -> None:
    write(tmp_path, straggling())
    found = scraped(Watcher(tmp_path, clock=lambda: EPOCH_S + 41))
    assert found["step",] == found["total_steps",] == 101
    assert found["metric", "loss"] == 1.0
    assert found["processes", "finished"] == 2
    assert found["processes", "lost"] == 0
    assert found["step_delay_seconds", "worker 1"] == pytest.approx(0.2)
    assert found["waited_for_seconds", "unknown", "worker 1"] == pytest.approx(0.2)
    assert ("waited_for_seconds", "unknown", "worker 0") not in found
    assert ("members",) not in found
    assert found["host_memory_bytes", "worker 0"] == 300 * 1024**2
    assert found["time_seconds", "starting"] == pytest.approx(10)
    assert found["goodput_with_startup_ratio",] < found["goodput_after_startup_ratio",] <= 1
    assert found["warnings",] == 2


def test_members_of_a_group_are_metrics(tmp_path) -> None:
    write(tmp_path, members_come_and_go())
    found = scraped(Watcher(tmp_path, clock=lambda: EPOCH_S + 62))
    assert (found["members",], found["expected_members",]) == (3, 3)
    assert found["time_seconds", "members lost"] == pytest.approx(2.5)


def test_each_scrape_reads_what_is_new(tmp_path) -> None:
    watcher = Watcher(tmp_path)
    assert ("step",) not in scraped(watcher)
    write(tmp_path, run(process("worker 0", 0)))
    assert scraped(watcher)["processes", "lost"] == 1
    with (tmp_path / "events" / "worker-0.0.jsonl").open("a") as file:
        file.write(encode(progress(5, 7, loss=None)) + "\n")
    found = scraped(watcher)
    assert found["step",] == 7
    assert math.isnan(found["metric", "loss"])


def status(port: int, host: str, **headers: str) -> int:
    request = urllib.request.Request(f"http://{host}:{port}/metrics", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_metrics_are_served_on_loopback_only_by_default(tmp_path) -> None:
    write(tmp_path, straggling())
    port, stop = serve(Watcher(tmp_path), 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            assert samples(answer.read().decode())["step",] == 101
        with pytest.raises(urllib.error.URLError, match="refused"):
            status(port, "127.0.0.2")
    finally:
        stop()


def test_scrape_needs_the_token_if_there_is_a_secret(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_SECRET", "s" * 32)
    token = hmac.new(b"s" * 32, b"stratagem 1 telemetry", "sha256").hexdigest()
    assert CliRunner().invoke(main, ["secret", "--telemetry"]).output == f"{token}\n"
    port, stop = serve(Watcher(tmp_path), 0, "127.0.0.1")
    try:
        assert status(port, "127.0.0.1") == 401
        assert status(port, "127.0.0.1", Authorization=f"Bearer {token[:-1]}") == 401
        assert status(port, "127.0.0.1", Authorization=f"Bearer {token}") == 200
    finally:
        stop()


def test_other_addresses_need_a_secret(tmp_path, monkeypatch) -> None:
    for name in ("SECRET", "SECRET_FILE", "ALLOW_UNAUTHENTICATED"):
        monkeypatch.delenv(f"STRATAGEM_{name}", raising=False)
    with pytest.raises(ValueError, match="The export to Prometheus has no secret"):
        serve(Watcher(tmp_path), 0, "192.0.2.1")


@pytest.mark.slow
def test_idle_connection_is_closed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(prometheus_export, "_IDLE_S", 0.5)
    port, stop = serve(Watcher(tmp_path), 0)
    try:
        with socket.create_connection(("127.0.0.1", port), 20) as idle:
            assert idle.recv(1) == b""
        assert status(port, "127.0.0.1") == 200
    finally:
        stop()


def test_missing_library_is_named(tmp_path, monkeypatch) -> None:
    def without(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(optional_libraries, "importlib", type("", (), {"import_module": without}))
    with pytest.raises(ImportError, match=r"(?s)Prometheus needs.*stratagem\[observe\]"):
        serve(Watcher(tmp_path), 0)


# Series of a run, beside values computed by hand.


def series(events):
    account = account_for(events)
    return series_of(events, account.begin_s, account.whole_s)


def column(time_s: float, whole_s: float) -> int:
    return int(time_s / whole_s * NUM_COLUMNS)


def test_values_are_those_of_one_worker() -> None:
    values = series(straggling()).values
    assert (values["loss"].times_s, values["loss"].values) == ((20.0, 40.0), (2.0, 1.0))
    assert values["accuracy"].values == (0.5, 0.75)


def test_value_that_is_not_finite_is_a_gap() -> None:
    line = series(run(process("worker 0", 0, progress(5, 1, loss=None)))).values["loss"]
    assert math.isnan(line.values[0])


def test_speed_is_counted_in_each_column() -> None:
    """5 steps a second until second 20, then 2.5; none while the first step is compiled."""
    speed = series(straggling()).speed
    assert len(speed.values) == NUM_COLUMNS
    assert speed.values[column(5, 41)] == 0
    assert speed.values[column(15, 41)] == pytest.approx(5)
    assert speed.values[column(30, 41)] == pytest.approx(2.5)
    total = sum(speed.values) * 41 / NUM_COLUMNS
    assert total == pytest.approx(100)


def test_straggler_is_the_worker_that_does_not_wait() -> None:
    found = series(straggling()).stragglers
    assert found is not None
    assert found.tasks == ("worker 0", "worker 1")
    first, second = found.delays_s
    assert math.isnan(first[column(5, 41)])
    assert (first[column(15, 41)], second[column(15, 41)]) == (0, 0)
    assert first[column(30, 41)] == 0
    assert second[column(30, 41)] == pytest.approx(0.2)
    assert found.longest_s == pytest.approx(0.2)
    (_, slow) = series(straggling()).workers
    assert (slow.task, slow.num_late_steps) == ("worker 1", 50)
    assert slow.slow is not None
    assert slow.slow.late_s == pytest.approx(0.2)


def test_steps_without_waits_have_no_stragglers() -> None:
    found = series(gang_restart())
    assert found.stragglers is None
    assert found.num_unmeasured == 8


def test_memory_has_a_line_per_task_and_a_gap_between_its_processes() -> None:
    events = run(
        process("worker 0", 0, memory(5, 100), end(10, 1)),
        process("worker 0", 20, memory(25, 200, 30), end(30), attempt=1),
    )
    found = series(events)
    line = found.host_memory["worker 0"]
    assert line.times_s == (5, 25, 25)
    assert (line.values[0], line.values[2]) == (100, 200)
    assert math.isnan(line.values[1])
    assert found.device_memory["worker 0"].values == (30,)


def test_checkpoint_of_several_processes_is_one() -> None:
    events = run(
        process("worker 0", 0, first_step(1, 1), *save(2, 3, 1), end(9)),
        process("worker 1", 0, first_step(1, 1), *save(2, 4, 1, failed="disk full"), end(9)),
    )
    (found,) = series(events).saves
    assert (found.at_s, found.step, found.stall_s, found.num_processes) == (4, 1, 2, 2)
    assert found.failed == "disk full"


def test_warning_of_several_processes_is_one() -> None:
    events = run(
        process("worker 0", 0, warning(7, "slow"), warning(8, "slower")),
        process("worker 1", 0, warning(6, "slow")),
    )
    found = [(row.at_s, row.tasks, row.text) for row in series(events).warnings]
    assert found == [(6, ("worker 0", "worker 1"), "slow"), (8, ("worker 0",), "slower")]


def test_median_step_leaves_out_first_steps_and_gaps() -> None:
    lines = (first_step(10, 1), steps(10, 20, 2, 101, busy=5.0), steps(20, 30, 102, 103))
    assert series(run(process("worker 0", 0, *lines))).step_s == pytest.approx(0.05)


def test_run_without_anything_has_no_series() -> None:
    found = series(run(process("worker 0", 0)))
    assert (found.values, found.speed.values, found.stragglers, found.saves) == ({}, (), None, ())
    assert found.step_s is None


# Phases of a process, its speed, and its time on the host.


def state_of(*events, read_s: float, attempt: int = 0, task: str = "worker 0") -> ProcessState:
    news = process(task, 0, *events, attempt=attempt)
    state = ProcessState(news.start)
    state.add(news, EPOCH_S + read_s)
    return state


def phase(state: ProcessState, second: float) -> str:
    return state.phase(EPOCH_S + second).value


RUNNING = (first_step(10, 1), steps(10, 20, 2, 51))


@pytest.mark.parametrize(
    ("events", "second", "expected"),
    [
        ((), 5, "starting"),
        ((memory(60, 1),), 61, "starting"),
        (RUNNING, 21, "running"),
        ((*RUNNING, memory(40, 1)), 41, "waiting"),
        (RUNNING, 20 + LOST_AFTER_S + 1, "lost"),
        ((*RUNNING, end(21)), 500, "finished"),
        ((*RUNNING, end(21, 3)), 500, "failed"),
        ((*RUNNING, failure(21, "worker 1")), 22, "restarting"),
        ((*RUNNING, restored(21, 7)), 22, "restarting"),
        # Steps of 20 s: a silence of 25 s between them is no wait.
        ((first_step(10, 1), steps(10, 50, 2, 3), memory(75, 1)), 76, "running"),
    ],
)
def test_phase_follows_from_the_events(events, second, expected) -> None:
    assert phase(state_of(*events, read_s=second), second) == expected


def test_later_start_is_a_restart_until_its_first_step() -> None:
    assert phase(state_of(read_s=1, attempt=1), 1) == "restarting"
    assert phase(state_of(first_step(3, 8), read_s=3, attempt=1), 3) == "running"


@pytest.mark.parametrize(("task", "expected"), [("launcher 0", "running"), ("ps 0", "lost")])
def test_silence_of_other_tasks(task, expected) -> None:
    """A launcher has nothing to report; a server gives signs of life."""
    assert phase(state_of(read_s=0, task=task), 100) == expected


def test_loss_that_another_process_reported_counts_until_the_task_is_heard_again() -> None:
    state = state_of(*RUNNING, read_s=20)
    state.lost_s = EPOCH_S + 21
    assert phase(state, 22) == "lost"
    state.add(process("worker 0", 0, steps(20, 30, 52, 101)), EPOCH_S + 30)
    assert phase(state, 30) == "running"


def test_clock_of_the_viewer_may_differ() -> None:
    """An hour ahead or behind, and news arrive: they are heard when they are read."""
    for offset_s in (3600.0, -3600.0):
        state = state_of(*RUNNING, read_s=20 + offset_s)
        state.add(process("worker 0", 0, steps(20, 30, 52, 101)), EPOCH_S + 30 + offset_s)
        assert phase(state, 31 + offset_s) == "running"
        assert state.heard_s == EPOCH_S + 30 + offset_s


def test_speed_is_of_the_last_steps_without_first_ones() -> None:
    state = state_of(steps(0, 10, 1, 1), read_s=10)
    assert state.steps_per_s() is None
    state.add(process("worker 0", 0, steps(10, 20, 2, 101)), EPOCH_S + 20)
    assert state.steps_per_s() == 10
    state.add(process("worker 0", 0, steps(60, 70, 102, 151)), EPOCH_S + 70)
    assert state.steps_per_s() == 5


def test_time_on_the_host_excludes_waits() -> None:
    waits = steps(10, 20, 2, 51, waited=8.0)
    assert state_of(first_step(10, 1), waits, read_s=20).host_s_per_step() == pytest.approx(0.04)
    assert state_of(*RUNNING, read_s=20).host_s_per_step() is None
    assert state_of(read_s=20).host_s_per_step() is None


@pytest.mark.parametrize(
    ("code", "expected"), [(None, "lost"), (0, "finished"), (1, "lost")], ids=str
)
def test_process_without_which_others_continue(code, expected) -> None:
    last = () if code is None else (end(21, code),)
    state = state_of(*RUNNING, *last, read_s=22)
    state.has_survivors = True
    assert phase(state, 22) == expected


# Views of a real run: two workers, a kill, a restart, and a worker that reads slowly.

_PROGRAM = """
import os, time, warnings
import stratagem as sg
import keras
import numpy as np

is_first = os.environ.get("STRATAGEM_RESTART_COUNT", "0") == "0"
strategy = sg.MultiWorkerMirroredStrategy()
rank = strategy.cluster_resolver.task_id
warnings.warn("the data is old", UserWarning)


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
def test_watch_shows_the_run_as_it_ended(run_dir) -> None:
    result = CliRunner().invoke(main, ["watch", str(run_dir), "--json"])
    shown = json.loads(result.stdout)
    assert (shown["is_over"], shown["num_launches"], shown["num_restarts"]) == (True, 1, 1)
    assert (shown["step"], shown["total_steps"], shown["epoch"]) == (60, 60, 3)
    assert set(shown["values"]) == {"loss"}
    tasks = {task["task"]: task for task in shown["tasks"]}
    assert tasks["worker 1"]["is_straggler"]
    assert tasks["worker 1"]["delay_s"] > tasks["worker 0"]["delay_s"] == 0
    assert tasks["worker 0"]["host_bytes"] > 50 * 1024**2
    assert {one["text"] for one in shown["warnings"]} >= {"the data is old"}


@pytest.mark.slow
def test_start_up_is_apart_from_goodput(run_dir) -> None:
    account = account_for(read_run(run_dir))
    assert account.goodput_after_startup is not None
    assert account.goodput_after_startup > account.goodput
    assert account.startup_s > 0
    assert account.problems == ()


@pytest.mark.slow
def test_report_shows_who_held_up_whom(run_dir) -> None:
    series = load_run(run_dir).series
    assert series.stragglers is not None
    fast, slow = ([delay for delay in row if delay == delay] for row in series.stragglers.delays_s)
    assert sum(delay > 0.02 for delay in slow) > len(slow) / 2
    assert sum(delay > 0.02 for delay in fast) < len(fast) / 4
    assert len(series.speed.values) == NUM_COLUMNS
    assert len(series.saves) >= 3
    page = run_dir / "report.html"
    assert CliRunner().invoke(main, ["report", str(run_dir)]).stdout == f"Wrote {page}.\n"
    assert "worker 1 failed (exit code 7)" in page.read_text()


# Charts are pictures in addresses: SVG that needs nothing from elsewhere.

FRAME = TimeFrame(78.0, [45.0])


def svg_of(address: str) -> str:
    kind, _, content = address.partition(",")
    assert kind == "data:image/svg+xml;base64"
    return base64.b64decode(content).decode()


def texts(address: str) -> list[str]:
    return [one.text or "" for one in ET.fromstring(svg_of(address)).iterfind(".//{*}text")]


def test_time_chart_has_the_colors_of_its_causes() -> None:
    drawn = time_chart(account_for(gang_restart()), FRAME)
    for cause in ("useful", "repeated", "detecting", "restarting", "starting"):
        assert CAUSE_COLORS[cause] in svg_of(drawn)
    assert "failure 1" in texts(drawn)
    assert "seconds from the first start" in texts(drawn)


def test_chart_needs_nothing_from_elsewhere() -> None:
    drawn = line_chart({"loss": Line((0.0, 1.0), (2.0, 1.0))}, FRAME, "loss")
    for one in ET.fromstring(svg_of(drawn)).iter():
        for name, value in one.items():
            assert not name.endswith("href") or value.startswith("#")
    assert line_chart({"loss": Line((0.0, 1.0), (2.0, 1.0))}, FRAME, "loss") == drawn


def test_names_are_text_and_no_formulas() -> None:
    line = Line((0.0, 1.0), (2.0, 1.0))
    drawn = line_chart({"a$b^$": line, "<script>": line}, FRAME, "metrics")
    assert {"a$b^$", "<script>"} <= set(texts(drawn))


@pytest.mark.parametrize(
    "values", [(float("nan"),), pytest.param((0.0,), marks=pytest.mark.slow), (-1.0, -2.0), ()]
)
def test_unusual_values_are_drawn(values) -> None:
    line = Line(tuple(float(index) for index in range(len(values))), values)
    assert "loss" in texts(line_chart({"loss": line}, FRAME, "loss"))


def test_straggler_chart_is_redder_where_a_worker_is_slow() -> None:
    events = straggling()
    account = account_for(events)
    found = series_of(events, account.begin_s, account.whole_s).stragglers
    assert found is not None
    drawn = straggler_chart(found, TimeFrame(account.whole_s, []))
    assert {"worker 0", "worker 1"} <= set(texts(drawn))
    (picture,) = re.findall(r"data:image/png;base64,([^\"]+)", svg_of(drawn))
    image = pytest.importorskip("matplotlib.image")
    pixels = image.imread(io.BytesIO(base64.b64decode(picture)))
    height, width = pixels.shape[:2]
    # An SVG holds the rows from below.
    slow, other = (pixels[height * part // 4, width // 2] for part in (1, 3))
    assert other[1] > 0.9 > slow[0] > 0.3 > slow[1]  # nearly white, and dark red


@pytest.mark.parametrize(
    ("whole_s", "unit"), [(0.0, "seconds"), (299.0, "seconds"), (3600.0, "minutes"), (1e5, "hours")]
)
def test_time_is_shown_in_a_sensible_unit(whole_s, unit) -> None:
    assert TimeFrame(whole_s, []).unit == unit


def test_each_loss_and_join_of_a_member_is_marked() -> None:
    """Two of each, after the beginning of the group."""
    account = account_for(members_come_and_go())
    frame = TimeFrame(account.whole_s, [])
    drawn = members_chart(account.member_changes, frame)
    assert {"members", "0", "1", "2", "3"} <= set(texts(drawn))
    marks = [one.get("style", "") for one in ET.fromstring(svg_of(drawn)).iterfind(".//{*}use")]
    for cause in ("detecting", "useful"):
        assert sum(f"fill: {CAUSE_COLORS[cause]}" in style for style in marks) == 2
    without = svg_of(members_chart(account.member_changes[:1], frame))
    assert CAUSE_COLORS["detecting"] not in without


# A watcher reads what is new, and computes accounts at a bounded cost.


def test_state_and_account_of_a_run(tmp_path) -> None:
    write(tmp_path, straggling())
    watcher = Watcher(tmp_path, clock=lambda: EPOCH_S + 41)
    assert watcher.poll().step == 101
    assert watcher.account() == account_for(straggling())
    values = watcher.as_dict(watcher.poll())
    assert values["account"]["startup_s"] == pytest.approx(10)


def test_folder_that_appears_later(tmp_path) -> None:
    watcher = Watcher(tmp_path / "run")
    assert watcher.poll().tasks == ()
    assert watcher.account() is None
    assert watcher.as_dict(watcher.poll())["account"] is None
    with pytest.raises(NotFoundError, match="has no events"):
        watcher.poll_existing()
    write(tmp_path / "run", straggling())
    assert len(watcher.poll().tasks) == 2
    assert len(watcher.poll_existing().tasks) == 2


def test_account_that_took_long_is_not_computed_for_each_line(tmp_path, monkeypatch) -> None:
    """One of 1 s is due again after 20 s."""
    seconds = iter(range(0, 1000))
    monkeypatch.setattr(watcher_module.time, "perf_counter", lambda: float(next(seconds)))
    running = gang_restart()
    write(tmp_path, type(running)(processes=running.processes[1:3]))
    watcher = Watcher(tmp_path, clock=lambda: EPOCH_S + 50)
    watcher.poll()
    first = watcher.account()
    path = tmp_path / "events" / "worker-1.1.jsonl"
    changes = 0
    for number in range(19):
        with path.open("a") as file:
            file.write(encode(steps(50 + number, 51 + number, 40 + number, 40 + number)) + "\n")
        watcher.poll()
        changes += watcher.account() is not first
        first = watcher.account()
    assert changes <= 1
