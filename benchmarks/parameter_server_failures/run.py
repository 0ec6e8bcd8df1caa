"""Runs the benchmark: workers, a server and a coordinator are killed while they work."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.cases import Environments, whole_side
from benchmarks.machine import describe_machine
from benchmarks.parameter_server_failures.report import Resumed, draw_rates, make_table, rows_of
from benchmarks.report import write_json
from benchmarks.runner import Effort
from benchmarks.worker_process import WorkerError, WorkerProcess
from benchmarks.workers.parameter_server_work import ClusterOptions

__all__ = ["run_parameter_server_failures"]

_REPOSITORY = Path(__file__).parents[2]
_SIDE = whole_side("Stratagem", "stratagem_failures")
_COORDINATOR = whole_side("Stratagem", "killed_coordinator")
_CLUSTERS = {
    "workers": ClusterOptions(num_workers=4, num_servers=1),
    "servers": ClusterOptions(num_workers=2, num_servers=2),
}
# A worker each 2 s, for 60 s; servers have time to write their journals in between.
_KILLS = {
    "workers": {"before_s": 15.0, "every_s": 2.0, "count": 30, "after_s": 15.0},
    "servers": {"before_s": 10.0, "every_s": 8.0, "count": 5, "after_s": 10.0},
}
_BRIEF_COUNTS = {"workers": 8, "servers": 2}
_SMALLEST_COUNTS = {"workers": 3, "servers": 1}
_TITLES = {"workers": "Functions on 4 workers", "servers": "Steps of fit, with 2 servers"}
_RUN_S = 10.0
_LIMIT_S = 120.0
# Ray's own, which hold nothing and end by themselves within a minute or two.
_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


def run_parameter_server_failures(
    environments: Environments,
    effort: Effort,
    console: Console,
    output: Path,
    *,
    only: str = "",
    is_smallest: bool = False,
) -> bool:
    """Measures, prints a table and writes figures and a plot.

    Args:
        environments: where the side runs.
        effort: how long to wait; a brief one kills a few.
        console: of the table.
        output: folder of the results.
        only: of "workers", "servers" and "coordinator" those whose name contains this.
        is_smallest: a few kills.

    Returns:
        Whether all went well, and was as it is promised.
    """
    told: dict[str, dict[str, Any]] = {}
    resumed: Resumed | None = None
    failures: list[dict[str, str]] = []
    for kind in (*_CLUSTERS, "coordinator"):
        if only not in kind:
            continue
        try:
            with console.status(f"parameter_server_failures: {kind}"):
                if kind == "coordinator":
                    resumed = _kill_coordinator(environments)
                else:
                    told[kind] = _ask(kind, environments, effort, is_smallest=is_smallest)
        except WorkerError as error:
            failures.append({"case": kind, "error": str(error)})
            console.print(f"Failed: {kind}\n{error}", style="red", markup=False)
    rows = rows_of(told.get("workers"), told.get("servers"), resumed)
    console.print(make_table(rows))
    machine = describe_machine(None)
    write_json(
        output / "parameter_server_failures.json",
        {
            "benchmark": "parameter_server_failures",
            "machine": machine,
            "rows": [dataclasses.asdict(row) for row in rows],
            "resumed": resumed and dataclasses.asdict(resumed),
            "failures": failures,
        },
    )
    if told:
        runs = {_TITLES[kind]: one for kind, one in told.items()}
        measured_on = f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']:.1f}"
        draw_rates(output / "parameter_server_failures.png", runs, measured_on)
    name = output / "parameter_server_failures"
    console.print(f"Results and plot: {name}.json, .png", soft_wrap=True)
    return not failures and all(row.is_good is not False for row in rows)


def _ask(
    kind: str, environments: Environments, effort: Effort, *, is_smallest: bool
) -> dict[str, Any]:
    program, flag, module, _ = environments.command(_SIDE)
    cluster = json.dumps(dataclasses.asdict(_CLUSTERS[kind]))
    options = dict(_KILLS[kind])
    if is_smallest or effort.is_brief:
        counts = _SMALLEST_COUNTS if is_smallest else _BRIEF_COUNTS
        options.update(before_s=3.0, count=counts[kind], after_s=8.0)
    with WorkerProcess(
        _SIDE.name, [program, flag, module, cluster], environments.variables(_SIDE)
    ) as worker:
        worker.read_answer(effort.start_limit_s)
        return worker.ask({"kind": kind, "options": options}, effort.answer_limit_s)


def _kill_coordinator(environments: Environments) -> Resumed:
    """Kills a coordinator that trains, and starts it again on the same journals."""
    with tempfile.TemporaryDirectory() as folder:
        with _coordinator(environments, folder) as (process, lines):
            _first(lines, "iterations")
            last, until_s = 0, time.monotonic() + _RUN_S
            while time.monotonic() < until_s:
                last = _first(lines, "iterations")["iterations"]
            started = _descendants(process.pid)
            killed_s = time.monotonic()
            process.kill()
            _wait_for_end(started)
            end_s = time.monotonic() - killed_s
        begun_s = time.time()
        with _coordinator(environments, folder) as (_, lines):
            restored = _first(lines, "restored")["restored"]
            first = _first(lines, "iterations")
    return Resumed(last, [one or 0 for one in restored], first["at_s"] - begun_s, end_s)


@contextlib.contextmanager
def _coordinator(
    environments: Environments, folder: str
) -> Generator[tuple[subprocess.Popen[str], Iterator[dict[str, Any]]]]:
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [str(environments.ours), "-m", _COORDINATOR.module, folder],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=_REPOSITORY,
            env=environments.variables(_COORDINATOR),
        )
        assert process.stdout is not None
        watch = threading.Timer(_LIMIT_S, process.kill)
        watch.start()
        try:
            yield process, _told(process.stdout, log)
        finally:
            watch.cancel()
            process.send_signal(signal.SIGINT)  # it ends what it has started
            try:
                process.wait(_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def _told(lines: Any, log: Any) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("told "):
            yield json.loads(line.removeprefix("told "))
    log.seek(0)
    raise WorkerError(f"The coordinator has ended: {log.read()[-3000:]}")


def _first(lines: Iterator[dict[str, Any]], field: str) -> dict[str, Any]:
    return next(told for told in lines if field in told)


def _stat(pid: int) -> list[str]:
    """State, parent, ... of a process; nothing of one that has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    return stat.rpartition(")")[2].split()


def _descendants(pid: int) -> set[int]:
    """All that a process has started, and what those have, but Ray's agents."""
    running = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    parents = {one: int(stat[1]) for one in running if (stat := _stat(one))}
    found: set[int] = set()
    new = {pid}
    while new:
        new = {one for one, parent in parents.items() if parent in new}
        found |= new
    return {one for one in found if not _name(one).startswith(_AGENTS)}


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _wait_for_end(pids: set[int]) -> None:
    deadline_s = time.monotonic() + _LIMIT_S
    left = pids
    while left := {pid for pid in left if (stat := _stat(pid)) and stat[0] not in "ZX"}:
        if time.monotonic() > deadline_s:
            names = ", ".join(sorted(map(_name, left)))
            raise WorkerError(f"These live on after their coordinator was killed: {names}")
        time.sleep(0.01)
