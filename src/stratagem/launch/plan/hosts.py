"""Hosts of a launch by SSH, from a list or a file, and the variables that they get."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path

from stratagem.launch.plan.options import LaunchOptions
from stratagem.messages import explain

_LINE = re.compile(r"(\S+?)(?:\s+slots\s*=\s*(\d+))?")
_FORWARDED = ("STRATAGEM_", "JAX_", "KERAS_", "XLA_FLAGS")
# Options that differ by host or concern this terminal alone.
_OWN = (
    "workers",
    "nnodes",
    "node_rank",
    "rdzv_endpoint",
    "hosts",
    "hostfile",
    "ssh_options",
    "env",
)


@dataclasses.dataclass(frozen=True)
class Host:
    """A host as `ssh` knows it, and its number of workers; None for that of the launch."""

    name: str
    slots: int | None = None


def read_hosts(options: LaunchOptions) -> list[Host]:
    """Returns the hosts of the options, in order; none for a launch on this machine.

    Raises ValueError if they are malformed, OSError if the file cannot be read.
    """
    hosts = options.hosts
    if options.hostfile is None:
        names = hosts.split(",") if isinstance(hosts, str) else list(hosts or ())
        found = [Host(name.strip()) for name in names]
    elif hosts is not None:
        raise ValueError(
            explain(
                f"hosts={hosts!r} and hostfile={os.fspath(options.hostfile)!r} are both given.",
                expected="one of them.",
                fix="remove one.",
            )
        )
    else:
        lines = Path(options.hostfile).read_text(encoding="utf-8").splitlines()
        texts = [line.partition("#")[0].strip() for line in lines]
        found = [_host(text) for text in texts if text]
    names = [host.name for host in found]
    # A name that begins with a dash would be an option of ssh.
    invalid = [name for name in names if not name or name.startswith("-")]
    if invalid or len(set(names)) < len(names) or (options.hostfile is not None and not names):
        raise ValueError(
            explain(
                f"The hosts are {names}.",
                expected="at least one host, and each once.",
                fix="write --hosts a,b,c, or one host per line of the file; several workers of a "
                "host are --workers N, or slots=N in the file.",
            )
        )
    return found


def remote_flags(options: LaunchOptions, host: Host, *, rank: int, endpoint: str) -> list[str]:
    """Returns the options of the launcher on a host, on its command line."""
    nnodes = options.nnodes or len(read_hosts(options))
    workers = options.workers if host.slots is None else host.slots
    flags = ["--workers", str(workers), "--nnodes", str(nnodes)]
    flags += ["--node-rank", str(rank), "--rdzv-endpoint", endpoint]
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name not in _OWN and value != field.default:
            flag = f"--{field.name.replace('_', '-')}"
            flags += [flag] if value is True else [flag, str(value)]
    return flags


def remote_variables(options: LaunchOptions, base: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that are set on every host: settings, and those of `env`.

    Raises ValueError for a name in `env` that is not set here.
    """
    # They are on the command line, with the values that take precedence.
    own = {f"STRATAGEM_{field.name.upper()}" for field in dataclasses.fields(options)}
    own |= {"STRATAGEM_CONFIG", "STRATAGEM_SECRET_FILE"}  # names of files of this machine
    variables = {
        name: text for name, text in base.items() if name.startswith(_FORWARDED) and name not in own
    }
    for one in options.env or ():
        name, is_given, text = one.partition("=")
        if not name or (not is_given and name not in base):
            raise ValueError(
                explain(
                    f"env={one!r} has no value.",
                    expected="NAME=VALUE, or the NAME of a variable that is set here.",
                    fix="set the variable, or pass its value.",
                )
            )
        variables[name] = text if is_given else base[name]
    return variables


def _host(text: str) -> Host:
    match = _LINE.fullmatch(text)
    if match is None:
        raise ValueError(
            explain(
                f"The hostfile has the line {text!r}.",
                expected="a host, or a host and slots=N.",
                fix="correct it; comments begin with #.",
            )
        )
    return Host(match[1], None if match[2] is None else int(match[2]))
