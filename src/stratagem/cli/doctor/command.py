"""`stratagem doctor` and `stratagem env`."""

from __future__ import annotations

import dataclasses
import getpass
import ipaddress
import itertools
import platform
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from stratagem.cli.commands import json_option, print_json
from stratagem.cli.doctor.accelerators import counted_devices
from stratagem.cli.doctor.settings import Finding, Level


@click.command("doctor")
@json_option
@click.option("--run", "is_run", is_flag=True, help="Also measure speed: about half a minute.")
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
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds to wait for all hosts.",
)
@click.option(
    "--limit",
    "limit_s",
    type=click.FloatRange(min=0, min_open=True),
    default=3.0,
    show_default=True,
    help="Seconds to wait for a connection between hosts.",
)
@click.option(
    "--transfer",
    "transfer_s",
    type=click.FloatRange(min=0, max=10),
    default=0.3,
    show_default=True,
    help="Seconds of each transfer; 0 measures no bandwidth.",
)
@click.option(
    "--plot",
    "picture",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also draw bandwidth and round trips: FILE.png.",
)
@click.argument(
    "script", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
def command(
    script: Path | None,
    *,
    as_json: bool,
    is_run: bool,
    strict: bool,
    is_cluster: bool,
    wait_s: float,
    limit_s: float,
    transfer_s: float,
    picture: Path | None,
) -> None:
    """Find problems of this machine or cluster, and their fixes.

    Checks versions, devices, limits, settings and the cluster. With SCRIPT, its imports are
    checked, too. Exit codes: 0 if training can start, 1 for errors.
    """
    from stratagem.cli.doctor.cluster_command import show
    from stratagem.cli.doctor.examination import examine
    from stratagem.cli.doctor.network.survey import SurveySettings
    from stratagem.cli.selftest.trial import measure

    if is_cluster:
        if script is not None or is_run:
            raise click.UsageError("--cluster examines no script and no speed of one machine.")
        from stratagem.cli.doctor.cluster_command import examine_cluster

        settings = SurveySettings(wait_s, limit_s, transfer_s)
        findings = examine_cluster(settings, picture, as_json=as_json)
    else:
        if picture is not None:
            raise click.UsageError("--plot needs --cluster.")
        made = itertools.chain(examine(script), measure() if is_run else ())
        findings = list(made) if as_json else show(made)
        if as_json:
            print_json([dataclasses.asdict(finding) for finding in findings])
    raise SystemExit(_exit_code(findings, strict=strict))


def _exit_code(findings: Iterable[Finding], *, strict: bool) -> int:
    fatal = {"error", "warning"} if strict else {"error"}
    return int(any(finding.level in fatal for finding in findings))


@click.command("env")
@json_option
def env_command(*, as_json: bool) -> None:
    """Describe this environment for a bug report.

    Names, addresses and secrets are left out.
    """
    from stratagem.cli.doctor.accelerators import probe_devices

    pass
    from stratagem.cli.doctor.examination import examine, variables_of_user
    from stratagem.cli.doctor.versions import installed_versions

    probe = probe_devices()
    findings = list(examine(probe=probe))
    known = (installed_versions(), probe.devices, findings, variables_of_user())
    if as_json:
        print_json(facts(*known))
    else:
        click.echo(describe(*known))


# Redacted description of an environment, for issue forms.

# Variables that change training; all others stay private.
_PREFIXES = ("STRATAGEM_", "JAX_", "KERAS_", "XLA_", "NCCL_", "CUDA_", "TPU_", "LIBTPU_", "RAY_")
_NAMES = ("TF_CONFIG", "SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "PET_NNODES", "OMPI_COMM_WORLD_SIZE")
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|(?:^|_)KEY", re.IGNORECASE)
_ADDRESS = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.])")


def describe(
    versions: Mapping[str, str],
    devices: Sequence[Mapping[str, Any]],
    findings: Sequence[Finding],
    variables: Mapping[str, str],
) -> str:
    """Returns Markdown for a bug report.

    Args:
        versions: versions by package.
        devices: local devices, as probed.
        findings: all; warnings and errors are listed.
        variables: environment variables.
    """
    known = facts(versions, devices, findings, variables)
    rows = [
        ("system", known["system"]),
        ("Python", known["python"]),
        *known["versions"].items(),
        ("devices", ", ".join(known["devices"]) or "none"),
        *known["variables"].items(),
    ]
    lines = ["| | |", "|---|---|", *(f"| {name} | {_cell(text)} |" for name, text in rows)]
    lines += ["", *(f"- {one['level']}: {one['text']}" for one in known["problems"])]
    return "\n".join(lines).rstrip()


def facts(
    versions: Mapping[str, str],
    devices: Sequence[Mapping[str, Any]],
    findings: Sequence[Finding],
    variables: Mapping[str, str],
) -> dict[str, Any]:
    """Returns the same as values for JSON, redacted."""
    problems = [one for one in findings if one.level in (Level.WARNING, Level.ERROR)]
    return {
        "system": redacted(platform.platform()),
        "python": platform.python_version(),
        "versions": dict(versions),
        "devices": counted_devices(devices),
        "variables": {name: redacted(text) for name, text in sorted(_shown(variables))},
        "problems": [{"level": str(one.level), "text": redacted(one.text)} for one in problems],
    }


def redacted(text: str) -> str:
    """Returns a text without the names of this user and host, and without addresses."""
    for secret, replacement in (
        (str(Path.home()), "~"),
        (socket.getfqdn(), "HOST"),
        (socket.gethostname(), "HOST"),
        (getpass.getuser(), "USER"),
    ):
        if len(secret) > 1 and secret != "localhost":  # noqa: S105 - compared with a host's name
            text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", replacement, text)
    return _ADDRESS.sub(_hide_address, text)


def _shown(variables: Mapping[str, str]) -> list[tuple[str, str]]:
    return [
        (name, "(set)" if _SECRET.search(name) else text)
        for name, text in variables.items()
        if name.startswith(_PREFIXES) or name in _NAMES
    ]


def _hide_address(match: re.Match[str]) -> str:
    try:
        address = ipaddress.ip_address(match[0])
    except ValueError:  # a version number
        return match[0]
    return match[0] if address.is_loopback or address.is_unspecified else "ADDRESS"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
