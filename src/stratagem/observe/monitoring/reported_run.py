"""A run with everything that its report shows, and its most important figures."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from stratagem.observe.goodput.account import Account, account_for
from stratagem.observe.goodput.report import duration_text
from stratagem.observe.monitoring.run_series import RunSeries, series_of
from stratagem.observe.monitoring.terminal_view import bytes_text
from stratagem.observe.run_events.reader import RunEvents, read_run

PLAN_FILE = "plan.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportedRun:
    """A run that a report shows. `plan` is the JSON of `stratagem plan`, or None."""

    name: str
    run: RunEvents
    account: Account
    series: RunSeries
    plan: dict[str, Any] | None
    plan_problem: str


def load_run(run_dir: Path) -> ReportedRun:
    """Reads a run and computes what a report shows; raises NotFoundError without events."""
    run = read_run(run_dir)
    account = account_for(run)
    plan, problem = _read_plan(run_dir / PLAN_FILE)
    return ReportedRun(
        name=str(run_dir),
        run=run,
        account=account,
        series=series_of(run, account.begin_s, account.whole_s),
        plan=plan,
        plan_problem=problem,
    )


def tiles_of(one: ReportedRun) -> list[tuple[str, str, str]]:
    """Returns the most important figures: a label, a value, and a remark."""
    account, series = one.account, one.series
    after, useful = account.goodput_after_startup, duration_text(account.time_s["useful"])
    rest = duration_text(account.whole_s - account.startup_s)
    speeds = [value for value in series.speed.values if value > 0]
    loss = series.values.get("loss")
    peak = max((max(line.values) for line in series.host_memory.values()), default=None)
    num_workers = len({process.task for process in one.run.processes if process.trains})
    return [
        (
            "goodput after start-up",
            "none yet" if after is None else f"{after:.1%}",
            f"{useful} useful of {rest}",
        ),
        (
            "start-up",
            duration_text(account.startup_s),
            f"imports and first compilation; with it, goodput is {account.goodput:.1%} "
            f"of {duration_text(account.whole_s)}",
        ),
        (
            "steps",
            f"{account.num_steps:,}",
            f"{account.num_repeated} run again; {_count(len(account.failures), 'failure')}; "
            f"{_count(num_workers, 'worker')}",
        ),
        (
            "speed, median",
            f"{sorted(speeds)[len(speeds) // 2]:.3g}/s" if speeds else "unknown",
            "steps per second while steps run",
        ),
        (
            "loss, last",
            "unknown" if loss is None else f"{loss.values[-1]:.4g}",
            "" if loss is None else f"first recorded: {loss.values[0]:.4g}",
        ),
        ("host memory, peak", bytes_text(None if peak is None else int(peak)), "largest process"),
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _read_plan(path: Path) -> tuple[dict[str, Any] | None, str]:
    """Returns the plan, and the reason if a file is there and none can be read."""
    if not path.exists():
        return None, ""
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return None, f"{path} cannot be read: {error}"
    if not isinstance(plan, dict) or "num_devices" not in plan:
        return None, f"{path} is no plan written by `stratagem plan --json`."
    return plan, ""
