"""Parsing of Slurm's compact lists of hosts and of tasks per node."""

from __future__ import annotations

import re

from stratagem.errors import explain

# A part between commas outside brackets.
_PART = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_PIECE = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_hostlist(hostlist: str) -> list[str]:
    """Returns the hosts of a Slurm host list.

    Args:
        hostlist: names with ranges in brackets, separated by commas.

    Returns:
        The hosts in order, including duplicates.

    Raises:
        ValueError: the list is malformed.

    Example:
        >>> sg.cluster.expand_hostlist("n[1-2],m5,o[08-10]")
        ['n1', 'n2', 'm5', 'o08', 'o09', 'o10']

    Source: TF 2.21 slurm_cluster_resolver.py, expand_hostlist.
    """
    parts = _PART.findall(hostlist)
    if ",".join(parts) != hostlist:
        raise _hostlist_error(hostlist)
    return [host for part in parts for host in _hosts_of_part(part, hostlist)]


def _hosts_of_part(part: str, hostlist: str) -> list[str]:
    """Expands a name with ranges, such as `rack[1-2]n[1-3]`; the last varies fastest."""
    hosts = [""]
    for number, piece in enumerate(_PIECE.split(part)):
        # Plain text and the contents of brackets alternate.
        suffixes = [piece] if number % 2 == 0 else _numbers(piece, hostlist)
        hosts = [host + suffix for host in hosts for suffix in suffixes]
    return hosts


def _numbers(ranges: str, hostlist: str) -> list[str]:
    numbers: list[str] = []
    for text in ranges.split(","):
        match = _RANGE.fullmatch(text)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise _hostlist_error(hostlist)
        first, last = match[1], match[2] or match[1]
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers


def _hostlist_error(hostlist: str) -> ValueError:
    return ValueError(
        explain(
            f"Invalid hostlist format {hostlist!r}.",
            expected="hosts with ranges in brackets, such as n[1-2],m5,o[08-10].",
            fix="check the output of `scontrol show hostnames $SLURM_STEP_NODELIST`.",
        )
    )


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """Returns the number of tasks on each node.

    Args:
        tasks_per_node: numbers separated by commas; `(x3)` repeats a number for three nodes.

    Returns:
        One number per node.

    Raises:
        ValueError: the text is malformed.

    Example:
        >>> sg.cluster.expand_tasks_per_node("3(x2),2,1")
        [3, 3, 2, 1]

    Source: TF 2.21 slurm_cluster_resolver.py, expand_tasks_per_node.
    """
    numbers: list[int] = []
    for part in tasks_per_node.split(","):
        match = _TASKS.fullmatch(part)
        if match is None:
            raise ValueError(
                explain(
                    f"Invalid tasks-per-node list format {tasks_per_node!r}.",
                    expected="numbers and repetitions, such as 3(x2),2,1.",
                    fix="correct SLURM_STEP_TASKS_PER_NODE, or pass tasks_per_node.",
                )
            )
        numbers += [int(match[1])] * int(match[2] or 1)
    return numbers
