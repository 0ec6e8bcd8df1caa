"""Events of a run: written by its processes, and read for a report."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from benchmarks.growth.costs.serving import Answer, cpu_s, serve_costs
from stratagem.observe.events import read_run
from stratagem.observe.goodput import account_for
from stratagem.observe.report_page import sections_of, series_of
from stratagem.observe.run_state import RunState
from stratagem.observe.wait_clock import StepWaits
from stratagem.observe.writer import EventWriter

__all__ = ["measure"]

_NUM_WORKERS = 4
# A worker's events between two checkpoints, and its checkpoints between two restores.
_EVENTS_PER_SAVE, _SAVES_PER_RESTORE = 100, 5
_STEPS_PER_SAVE = _EVENTS_PER_SAVE // 2 - 1


def measure(size: int, *, is_smallest: bool) -> Answer:
    """Returns the CPU time of writing `size` events, reading them, and computing a report."""
    del is_smallest
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
        series_of(run, account)
        sections_of(run, account)

    return {
        "ours": {
            "write_s": write_s,
            "read_s": read_s,
            "report_s": cpu_s(report),
            "watch_s": cpu_s(watch),
        }
    }


def _write(folder: Path, num_events: int) -> None:
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(
                EventWriter(
                    folder, "worker", index, num_processes=_NUM_WORKERS, attempt=0, interval_s=0
                )
            )
            for index in range(_NUM_WORKERS)
        ]
        step = 0
        for number in range(1, 1 + -(-num_events // (_NUM_WORKERS * _EVENTS_PER_SAVE))):
            for writer in writers:
                _write_until_save(writer, step)
            step += _STEPS_PER_SAVE
            if number % _SAVES_PER_RESTORE == 0:
                for writer in writers:
                    writer.failure("lost a connection")
                    writer.restored(step, "backup")
        for writer in writers:
            writer.end()


def _write_until_save(writer: EventWriter, step: int) -> None:
    for number in range(step + 1, step + 1 + _STEPS_PER_SAVE):
        writer.step(number, duration_s=1e-6, waits=StepWaits(waited_s=0.0))
        writer.progress({"loss": 1 / number})
    writer.save_started(step + _STEPS_PER_SAVE)
    writer.save_ended(step + _STEPS_PER_SAVE, stall_s=1e-6, duration_s=1e-6)


if __name__ == "__main__":
    serve_costs(measure)
