"""Events of a run: written by its processes, and read for a report."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.growth.costs.serving import Answer, cpu_s, serve_costs
from stratagem.goodput import EventWriter, account_for, read_run
from stratagem.monitoring.run_series import series_of
from stratagem.monitoring.run_state import RunState

__all__ = ["measure"]

_NUM_WORKERS = 4
# A worker's events between two checkpoints, and its checkpoints between two restores.
_EVENTS_PER_SAVE, _SAVES_PER_RESTORE = 100, 20


def measure(size: int, *, is_quick: bool) -> Answer:
    """Returns the CPU time of writing `size` events, reading them, and computing a report."""
    del is_quick
    with tempfile.TemporaryDirectory() as folder:
        write_s = cpu_s(lambda: _write(Path(folder), size))
        found = []
        read_s = cpu_s(lambda: found.append(read_run(folder)))
    (run,) = found
    num_events = sum(len(process.events) for process in run.processes)
    if run.problems or num_events < size:
        raise AssertionError(f"{num_events} of {size} events were read: {run.problems}")
    state = RunState()

    def watch() -> None:
        state.add(run.processes, run.processes[0].start.time_s)
        state.snapshot(run.processes[0].start.time_s)

    def report() -> None:
        account = account_for(run)
        series_of(run, account.begin_s, account.whole_s)

    return {
        "ours": {
            "write_s": write_s,
            "read_s": read_s,
            "report_s": cpu_s(report),
            "watch_s": cpu_s(watch),
        }
    }


def _write(folder: Path, num_events: int) -> None:
    for index in range(_NUM_WORKERS):
        with EventWriter(
            folder, "worker", index, num_processes=_NUM_WORKERS, attempt=0, interval_s=0
        ) as writer:
            _write_worker(writer, num_events // _NUM_WORKERS)


def _write_worker(writer: EventWriter, num_events: int) -> None:
    step = saved = num_saves = num_written = 0
    while num_written < num_events:
        for _ in range(_EVENTS_PER_SAVE // 2 - 1):
            step += 1
            writer.step(step, duration_s=1e-6, waited_s=0.0)
            writer.progress({"loss": 1 / step})
        writer.save_started(step)
        writer.save_ended(step, stall_s=1e-6, duration_s=1e-6)
        num_written += _EVENTS_PER_SAVE
        saved, num_saves = step, num_saves + 1
        if num_saves % _SAVES_PER_RESTORE == 0:
            writer.failure("a worker is lost", lost="worker 3", silence_s=1e-6)
            writer.restored(saved, "backup")
            step = saved
    writer.end()


if __name__ == "__main__":
    serve_costs(measure)
