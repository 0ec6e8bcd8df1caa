"""The cell about workers for which the others wait."""

from __future__ import annotations

from stratagem.observe.goodput.report import duration_text
from stratagem.observe.monitoring.cell import Cell
from stratagem.observe.monitoring.charts import TimeFrame, straggler_chart
from stratagem.observe.monitoring.reported_run import ReportedRun
from stratagem.observe.stragglers.attribution import sentence
from stratagem.observe.stragglers.cost import RunCost, WorkerCost

_HEADERS = (
    "worker",
    "input",
    "own work",
    "waits for others",
    "transfer",
    "slow in",
    "the others waited",
    "of the run",
)
_MAX_ROWS = 32


def straggler_cell(one: ReportedRun, frame: TimeFrame) -> Cell:
    """Shows who holds up the others, why, and what it costs."""
    stragglers, cost = one.series.stragglers, one.series.cost
    if stragglers is not None:
        drawn = straggler_chart(stragglers, frame, one.account.whole_s)
        longest = duration_text(stragglers.longest_s)
        return Cell(
            charts=(drawn,),
            headers=_HEADERS,
            rows=() if cost is None else tuple(map(_row, _shown(cost))),
            note=f"{_findings(cost)} Darkest: {longest} per step.",
        )
    if len({process.task for process in one.run.processes if process.trains}) < 2:
        return Cell(empty="A run of one worker has no stragglers.")
    if one.series.leaves_out:
        return Cell(
            empty="With backup workers, a step waits for the first workers only. The time that a "
            "worker needs does not tell if the others wait for it."
        )
    return Cell(
        empty=f"{one.series.num_unmeasured} lines of steps have no measured waits. `fit` measures "
        "them; in your own loop, pass waits to the step method of sg.goodput.current_events()."
    )


def _shown(cost: RunCost) -> list[WorkerCost]:
    """Returns the workers with a row: all, or the slow ones and some of the others."""
    others = [worker for worker in cost.workers if worker.cause is None]
    shown = [*cost.slow, *others][:_MAX_ROWS]
    return [worker for worker in cost.workers if worker in shown]


def _row(worker: WorkerCost) -> tuple[str, ...]:
    return (
        worker.task,
        _per_step(worker.input_s),
        _per_step(worker.work_s),
        _per_step(worker.peers_s),
        _per_step(worker.transfer_s),
        "-" if worker.cause is None else worker.cause.value,
        duration_text(worker.waited_s),
        f"{worker.share:.1%}",
    )


def _per_step(time_s: float | None) -> str:
    return "-" if time_s is None else duration_text(time_s)


def _findings(cost: RunCost | None) -> str:
    """Returns a sentence about each slow worker."""
    if cost is None or not cost.slow:
        return "No worker is slow."
    return " ".join(map(_finding, cost.slow))


def _finding(worker: WorkerCost) -> str:
    assert worker.cause is not None
    found = sentence(worker.task, worker.cause, worker.late_s, worker.late_step_s)
    steps = f"{worker.num_late_steps:,} of {worker.num_steps:,} steps"
    return (
        f"{found}, in {steps}: {worker.share:.1%} of the run, and "
        f"{duration_text(worker.replica_s)} of all workers together."
    )
