"""`stratagem doctor` and `stratagem env`."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import click

from stratagem.cli.commands import json_option, print_json

__all__ = ["command", "env_command"]


@click.command("doctor")
@json_option
@click.option("--run", "is_run", is_flag=True, help="Also measure speed: about half a minute.")
@click.option("--strict", is_flag=True, help="Exit with 1 for warnings, too.")
@click.argument(
    "script", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
def command(script: Path | None, *, as_json: bool, is_run: bool, strict: bool) -> None:
    """Find problems of this machine, and their fixes.

    Checks versions, devices, limits, settings and the cluster. With SCRIPT, its imports are
    checked, too. Exit codes: 0 if training can start, 1 for errors.
    """
    from stratagem.doctor.examination import examine
    from stratagem.doctor.finding import Level
    from stratagem.doctor.report import show
    from stratagem.selftest.trial import measure

    made = itertools.chain(examine(script), measure() if is_run else ())
    findings = list(made) if as_json else show(made)
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    fatal = {Level.ERROR, Level.WARNING} if strict else {Level.ERROR}
    raise SystemExit(int(any(finding.level in fatal for finding in findings)))


@click.command("env")
@json_option
def env_command(*, as_json: bool) -> None:
    """Describe this environment for a bug report.

    Names, addresses and secrets are left out.
    """
    from stratagem import environment
    from stratagem.doctor.accelerators import probe_devices
    from stratagem.doctor.bug_report import describe, facts
    from stratagem.doctor.examination import examine
    from stratagem.doctor.versions import installed_versions

    probe = probe_devices()
    findings = list(examine(probe=probe))
    known = (installed_versions(), probe.devices, findings, environment.snapshot())
    if as_json:
        print_json(facts(*known))
    else:
        click.echo(describe(*known))
