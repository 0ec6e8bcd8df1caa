"""HTML report of a run, or of two side by side: one file that needs no network."""

from __future__ import annotations

import datetime
import importlib.resources
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stratagem.observe.monitoring.charts import COLORS
from stratagem.observe.monitoring.report_sections import sections_of
from stratagem.observe.monitoring.reported_run import ReportedRun, load_run, tiles_of
from stratagem.optional_libraries import load

_TEMPLATE = "report.html.j2"


def write_report(run_dirs: Sequence[Path], path: Path) -> None:
    """Writes the report of one or two runs.

    Raises ImportError without matplotlib or Jinja, NotFoundError for a folder without events, and
    OSError if the file cannot be written.
    """
    text = render([load_run(run_dir) for run_dir in run_dirs])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def render(runs: Sequence[ReportedRun]) -> str:
    """Returns the page."""
    needs = {"needed_by": "The report of a run", "install": "'stratagem[report]'"}
    jinja: Any = load("jinja2", **needs)
    environment = jinja.Environment(
        autoescape=True, undefined=jinja.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = importlib.resources.files("stratagem.observe.monitoring") / _TEMPLATE
    return environment.from_string(source.read_text(encoding="utf-8")).render(
        runs=[(one, tiles_of(one), _began(one)) for one in runs],
        sections=sections_of(runs),
        colors={role: color for role, color in COLORS.items() if role not in ("text", "faint")},
    )


def _began(one: ReportedRun) -> str:
    begin = datetime.datetime.fromtimestamp(one.account.begin_s, tz=datetime.UTC)
    state = "" if one.account.is_over else "; still running or killed"
    return f"started {begin:%Y-%m-%d %H:%M:%S} UTC{state}"
