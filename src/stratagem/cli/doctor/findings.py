"""A finding about a machine or a cluster; findings as text, and as a report without names."""

from __future__ import annotations

import dataclasses
import enum
import getpass
import ipaddress
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stratagem.cluster.addresses import own_name


class Level(enum.StrEnum):
    """Severity of a finding, from harmless to fatal."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One observation, with values; `fix` is the remedy, required for warnings and errors.

    Findings are shown under the heading `topic`, which whoever runs a check adds.
    """

    topic: str
    level: Level
    text: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert self.fix or self.level in (Level.OK, Level.NOTE), self.text

    @property
    def is_problem(self) -> bool:
        """True for warnings and errors."""
        return self.level in (Level.WARNING, Level.ERROR)


def ok(text: str) -> Finding:
    """Returns a finding that all is well."""
    return Finding("", Level.OK, text)


def note(text: str) -> Finding:
    """Returns a finding that may explain something."""
    return Finding("", Level.NOTE, text)


def warning(text: str, fix: str) -> Finding:
    """Returns a finding of what makes training slow, or hides a mistake."""
    return Finding("", Level.WARNING, text, fix)


def error(text: str, fix: str) -> Finding:
    """Returns a finding of what keeps training from its start, or ends it."""
    return Finding("", Level.ERROR, text, fix)


def under(topic: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yields findings with a topic; those that have one keep it."""
    for one in findings:
        yield dataclasses.replace(one, topic=one.topic or topic)


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


# Redacted description of an environment, for issue forms.

# Variables that change training; all others stay private.
_PREFIXES = ("STRATAGEM_", "JAX_", "KERAS_", "XLA_", "NCCL_", "CUDA_", "TPU_", "LIBTPU_", "RAY_")
_NAMES = ("TF_CONFIG", "SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "PET_NNODES", "OMPI_COMM_WORLD_SIZE")
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|(?:^|_)KEY", re.IGNORECASE)
_ADDRESS = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.])")


def facts(
    versions: Mapping[str, str],
    devices: Sequence[str],
    findings: Iterable[Finding],
    variables: Mapping[str, str],
) -> dict[str, Any]:
    """Returns what a bug report needs, redacted, as values for JSON.

    Args:
        versions: versions by package.
        devices: number of local devices of each kind, as text.
        findings: all; warnings and errors are kept.
        variables: environment variables.
    """
    return {
        "system": redacted(platform.platform()),
        "python": platform.python_version(),
        "versions": dict(versions),
        "devices": list(devices),
        "variables": {name: redacted(text) for name, text in sorted(_shown(variables))},
        "problems": [
            {"level": str(one.level), "text": redacted(one.text)}
            for one in findings
            if one.is_problem
        ],
    }


def describe(known: Mapping[str, Any]) -> str:
    """Returns `facts` as Markdown."""
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


def redacted(text: str) -> str:
    """Returns a text without the names of this user and host, and without addresses."""
    for secret, replacement in (
        (str(Path.home()), "~"),
        (own_name(), "HOST"),
        (platform.node(), "HOST"),
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
