"""`stratagem doctor --cluster`: survey of all hosts, as text, JSON or a picture."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stratagem.cli.doctor.accelerators import counted_devices, probe_devices
from stratagem.cli.doctor.clusters import check_own_address, examine_resolvers
from stratagem.cli.doctor.examination import examine
from stratagem.cli.doctor.network.findings import check_survey
from stratagem.cli.doctor.network.survey import (
    MAX_COLUMNS,
    Matrix,
    Survey,
    SurveyedHost,
    SurveySettings,
    hosts_of,
    own_index,
    survey_tables,
)
from stratagem.cli.doctor.network.surveyor import survey_as_task
from stratagem.cli.doctor.settings import Finding, Level
from stratagem.cli.doctor.versions import installed_versions
from stratagem.cluster.addresses import join_address
from stratagem.cluster.detection import ENVIRONMENTS
from stratagem.environment import load

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Facts about this machine that a survey compares between hosts.


# Packages that must be equal on all hosts.
COMPARED = ("stratagem", "jax", "jaxlib", "keras")


def gather_facts(made_before: Sequence[Finding] = ()) -> dict[str, Any]:
    """Returns versions, devices, and the warnings and errors of `stratagem doctor`.

    Args:
        made_before: findings about this host's address, made before an agent listened there.
    """
    probe = probe_devices()
    findings = [*made_before, *examine(probe=probe, has_cluster=False)]
    problems = [one for one in findings if one.level in (Level.WARNING, Level.ERROR)]
    return {
        "versions": {"Python": platform.python_version(), **installed_versions(COMPARED)},
        "devices": ", ".join(counted_devices(probe.devices)) or "none",
        "findings": [dataclasses.asdict(one) for one in problems],
    }


# Heat maps of bandwidth and round trips between hosts, with matplotlib.


# More cells have no room for a number.
_MAX_NUMBERED = 12
_INCHES_PER_HOST = 0.75


def draw(survey: Survey, path: Path) -> None:
    """Writes the picture to a file; the extension selects the format.

    Raises ImportError without matplotlib, ValueError for an unsupported format, and OSError if the
    file cannot be written.
    """
    figure = figure_of(survey)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def figure_of(survey: Survey) -> Figure:
    """Returns a matplotlib figure: bandwidth on the left, round trips on the right."""
    module = load(
        "matplotlib.figure", needed_by="The picture of a cluster", install="'stratagem[observe]'"
    )
    side_in = 2.5 + _INCHES_PER_HOST * min(len(survey.hosts), _MAX_NUMBERED)
    figure = module.Figure(figsize=(2 * side_in, side_in), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_matrix(left, "Bandwidth, MB/s", survey, survey.bytes_per_s, 1e-6, "viridis")
    _draw_matrix(right, "Round trip, ms", survey, survey.round_trip_s, 1e3, "viridis_r")
    return figure


def _draw_matrix(
    axes: Axes, title: str, survey: Survey, matrix: Matrix, scale: float, colors: str
) -> None:
    values = scale * np.array(
        [[np.nan if cell is None else cell for cell in row] for row in matrix]
    )
    axes.set_facecolor("#dddddd")
    image = axes.imshow(values, cmap=colors, vmin=0.0)
    size = len(survey.hosts)
    axes.set_xticks(range(size), survey.names, rotation=45, ha="right")
    axes.set_yticks(range(size), survey.names)
    axes.set(title=title, xlabel="to", ylabel="from")
    if size > _MAX_NUMBERED:
        axes.figure.colorbar(image, ax=axes)
        return
    highest = np.nanmax(values, initial=0.0)
    for one, other in np.ndindex(values.shape):
        value = values[one, other]
        if np.isnan(value):
            text, color = ("" if one == other else "no\nconnection"), "#a00000"
        else:
            is_light = (value > 0.6 * highest) == (colors == "viridis")
            text, color = (
                f"{value:.0f}" if value >= 1000 else f"{value:.3g}",
                "black" if is_light else "white",
            )
        axes.text(other, one, text, ha="center", va="center", color=color, fontsize=9)


# `stratagem doctor --cluster`: survey of all hosts, as text, JSON or a picture.


# Findings as text for a terminal.

_SIGNS = {
    "ok": "[green]✓[/green]",
    "note": "[blue]i[/blue]",
    "warning": "[yellow]![/yellow]",
    "error": "[red]✗[/red]",
}


def show(findings: Iterable[Finding]) -> list[Finding]:
    """Prints findings as they come, under the heading of their topic, and returns them."""
    console = Console(highlight=False)
    signs = _SIGNS if console.encoding.lower().startswith("utf") else dict.fromkeys(_SIGNS, "-")
    shown: list[Finding] = []
    for finding in findings:
        if not shown or shown[-1].topic != finding.topic:
            console.print(f"[bold]{finding.topic}[/bold]")
        _print(console, signs[finding.level], escape(finding.text))
        if finding.fix:
            _print(console, " ", f"[dim]Fix:[/dim] {escape(finding.fix)}")
        shown.append(finding)
    counts = {level: sum(one.level == level for one in shown) for level in ("error", "warning")}
    words = (f"{count} {level}{'' if count == 1 else 's'}" for level, count in counts.items())
    console.print(", ".join(words))
    return shown


def _print(console: Console, sign: str, text: str) -> None:
    """Prints a line; a terminal wraps it below itself, a file has it in one."""
    if not console.is_terminal:
        console.print(f"  {sign} {text}", soft_wrap=True)
        return
    line = Table.grid(padding=(0, 1, 0, 0))
    line.add_column(no_wrap=True)
    line.add_column(overflow="fold")
    line.add_row(f"  {sign}", text)
    console.print(line)


def examine_cluster(
    settings: SurveySettings, picture: Path | None, *, as_json: bool
) -> list[Finding]:
    """Surveys a cluster, prints the result, and returns the findings.

    Args:
        settings: limits.
        picture: file for the heat maps.
        as_json: True to print JSON.
    """
    survey, findings = _surveyed(settings)
    if picture is not None and survey is not None:
        try:
            draw(survey, picture)
        except (ImportError, OSError, ValueError) as error:
            raise click.ClickException(str(error)) from error
    if as_json:
        fields = {"findings": [dataclasses.asdict(finding) for finding in findings]}
        click.echo(json.dumps({**fields, "survey": survey and survey.as_dict()}, indent=2))
        return findings
    if survey is not None:
        for table in survey_tables(survey):
            Console().print(table)
        if len(survey.hosts) > MAX_COLUMNS:
            click.echo(f"The tables of {len(survey.hosts)} hosts are in --json and --plot.")
    return show(findings)


def _surveyed(settings: SurveySettings) -> tuple[Survey | None, list[Finding]]:
    with Console(stderr=True).status("") as status:
        settings = dataclasses.replace(settings, note=status.update)
        found, problems = _tasks()
        if found is None:
            return None, problems
        tasks, index = found
        own = tasks[index]
        made = check_own_address(join_address(own.address, own.port or 0))
        survey = asyncio.run(survey_as_task(tasks, index, lambda: gather_facts(made), settings))
        return survey, check_survey(survey)


def _tasks() -> tuple[tuple[list[SurveyedHost], int] | None, list[Finding]]:
    """Returns the tasks of the cluster in the environment, and the index of this one."""
    findings, resolver = examine_resolvers(ENVIRONMENTS)
    errors = [finding for finding in findings if finding.level is Level.ERROR]
    tasks = [] if resolver is None else hosts_of(resolver)
    index = None if resolver is None else own_index(resolver, tasks)
    if not errors and len(tasks) > 1 and index is not None:
        return (tasks, index), []
    if not errors:
        problem = (
            "The environment describes no cluster of several hosts."
            if len(tasks) < 2
            else "The environment does not name the task of this host."
        )
        fix = "set TF_CONFIG on each host, or start it by a launcher."
        errors = [Finding("cluster", Level.ERROR, problem, fix)]
    return None, errors
