"""`stratagem doctor`, `stratagem env` and `stratagem test`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stratagem.cli.commands import chosen_log_level, json_option, print_json

if TYPE_CHECKING:
    from stratagem.cli.doctor.findings import Finding

_POSITIVE = click.FloatRange(min=0, min_open=True)


@click.command("doctor")
@json_option
@click.option("--strict", is_flag=True, help="Exit with 1 for warnings, too.")
@click.option(
    "--cluster",
    "is_cluster",
    is_flag=True,
    help="Examine all hosts of the cluster, and the network between them. Run it on each of them.",
)
@click.option(
    "--wait",
    "wait_s",
    type=_POSITIVE,
    default=60.0,
    show_default=True,
    help="Seconds to wait for all hosts.",
)
@click.option(
    "--limit",
    "limit_s",
    type=_POSITIVE,
    default=3.0,
    show_default=True,
    help="Seconds to wait for a connection between hosts.",
)
@click.argument(
    "script", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
def doctor_command(
    script: Path | None,
    *,
    as_json: bool,
    strict: bool,
    is_cluster: bool,
    wait_s: float,
    limit_s: float,
) -> None:
    """Find problems of this machine or cluster, and their fixes.

    Checks versions, devices, limits, settings and the cluster. With SCRIPT, its imports are
    checked, too. Exit codes: 0 if training can start, 1 for errors.
    """
    if is_cluster and script is not None:
        raise click.UsageError("--cluster examines no script.")
    from stratagem.cli.doctor.examination import examine
    from stratagem.cli.doctor.findings import show

    fields: dict[str, object] = {}
    made: Iterator[Finding]
    if is_cluster:
        from stratagem.cli.doctor.together import examine_together

        survey, made = examine_together(wait_s, limit_s)
        fields = {"survey": survey and dataclasses.asdict(survey)}
    else:
        made = examine(script)
    findings = list(made) if as_json else show(made)
    if as_json:
        values = [dataclasses.asdict(finding) for finding in findings]
        print_json({"findings": values, **fields} if is_cluster else values)
    fatal = {"error", "warning"} if strict else {"error"}
    raise SystemExit(int(any(finding.level in fatal for finding in findings)))


@click.command("env")
@json_option
def env_command(*, as_json: bool) -> None:
    """Describe this environment for a bug report.

    Names, addresses and secrets are left out.
    """
    from stratagem.cli.doctor.accelerators import counted_devices, probe_devices
    from stratagem.cli.doctor.examination import examine, variables_of_user
    from stratagem.cli.doctor.findings import describe, facts
    from stratagem.cli.doctor.versions import installed_versions

    probe = probe_devices()
    known = facts(
        installed_versions(),
        counted_devices(probe.devices),
        examine(probe=probe),
        variables_of_user(),
    )
    if as_json:
        print_json(known)
    else:
        click.echo(describe(known))


@click.command("config")
@json_option
def config_command(*, as_json: bool) -> None:
    """Show all settings, and which are set by a variable."""
    from stratagem import environment, settings

    found = []
    for setting in settings.SETTINGS.values():
        try:
            value = settings.read(setting.name)
        except ValueError as error:
            raise click.ClickException(str(error)) from error
        is_set = environment.get(setting.variable) is not None
        found.append({"variable": setting.variable, "value": value, "is_set": is_set})
    if as_json:
        print_json(found)
        return
    for one in found:
        value = "" if one["value"] is None else one["value"]
        click.echo(f"{one['variable']}={value}{'' if one['is_set'] else '  (default)'}")


@click.command("test")
@click.option("--only", multiple=True, help="Run these cases only, such as mirrored; repeatable.")
@json_option
def test_command(only: tuple[str, ...], *, as_json: bool) -> None:
    """Test this installation: train under every strategy.

    Compares the weights of a small model with gradient descent in NumPy. Takes about a
    minute on two cores. Exit codes: 0 if all that can run passed, 1 if one failed.
    """
    from stratagem.cli.doctor.selftest import CASES, run_case, run_shown

    names = [case.name for case in CASES]
    if unknown := sorted(set(only) - set(names)):
        raise click.UsageError(f"No such case: {', '.join(unknown)}. There are {', '.join(names)}.")
    cases = [case for case in CASES if not only or case.name in only]
    if as_json:
        outcomes = [run_case(case) for case in cases]
        print_json([{**dataclasses.asdict(one), "passed": one.passed} for one in outcomes])
    else:
        outcomes = run_shown(cases, shows_progress=chosen_log_level() != "error")
    raise SystemExit(int(any(not one.passed and not one.is_skipped for one in outcomes)))
