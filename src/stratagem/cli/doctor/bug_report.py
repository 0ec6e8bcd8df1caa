"""Redacted description of an environment, for issue forms."""

from __future__ import annotations

import getpass
import ipaddress
import platform
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stratagem.cli.doctor.accelerators import counted_devices
from stratagem.cli.doctor.finding import Finding, Level

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
