"""Files of a profile: the trace, and the layers of the operations in it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from stratagem.messages import explain
from stratagem.observe.profiling.summary import ProfileSummary, summarize
from stratagem.observe.profiling.trace import read_trace

_TRACE = ".xplane.pb"
# Written beside the trace, which has no scopes of operations.
INSTRUCTIONS = "operations.json"
_HOST = ("processor_s", "num_cores")


def find_traces(path: Path) -> list[Path]:
    """Returns the trace files in a folder, of the latest profile of each worker.

    A file may be the trace itself or the one for Perfetto beside it. Raises FileNotFoundError if
    there is none.
    """
    if path.name.endswith(".trace.json.gz"):
        path = path.with_name(path.name.removesuffix(".trace.json.gz") + _TRACE)
    if path.is_file():
        return [path]
    traces = sorted(path.rglob(f"*{_TRACE}")) if path.is_dir() else []
    if not traces:
        problem = "has no trace" if path.is_dir() else "does not exist"
        raise FileNotFoundError(
            explain(
                f"{path} {problem}.",
                expected=f"a {_TRACE} file, or a folder with one at any depth.",
                fix="pass the folder given to sg.profile or jax.profiler.start_trace.",
            )
        )
    latest: dict[Path, Path] = {}
    for trace in traces:  # WORKER/plugins/profile/TIME/HOST.xplane.pb
        latest[trace.parent.parent] = trace.parent
    return [trace for trace in traces if latest[trace.parent.parent] == trace.parent]


def read_profiles(path: Path) -> dict[Path, ProfileSummary]:
    """Summarizes the traces that `find_traces` returns."""
    return {trace: _summary_of(trace) for trace in find_traces(path)}


def _summary_of(trace: Path) -> ProfileSummary:
    instructions, host = _read_instructions(trace)
    return dataclasses.replace(summarize(read_trace(trace), instructions), **host)


def read_profile(path: str | Path) -> ProfileSummary:
    """Summarizes a profile of one process.

    Args:
        path: a folder with a trace at any depth, or the `.xplane.pb` file. In a folder, the latest
            profile counts.

    Returns:
        The summary.

    Raises:
        FileNotFoundError: there is no trace.
        ValueError: the file is not a trace, lists no operations, or there are several workers'.

    Example:
        >>> import tempfile
        >>> add = jax.jit(lambda x: x + 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with jax.profiler.trace(folder):
        ...         three = add(2).block_until_ready()
        ...     summary = sg.profiling.read_profile(folder)
        >>> summary.platform, summary.num_devices, summary.num_steps
        ('cpu', 1, 0)

    Source: JAX, jax.profiler.ProfileData.
    """
    found = read_profiles(Path(path))
    if len(found) > 1:
        raise ValueError(
            explain(
                f"{path} has traces of {len(found)} workers.",
                expected="one trace.",
                fix=f"pass one of: {', '.join(map(str, found))}.",
            )
        )
    return next(iter(found.values()))


def _read_instructions(
    trace: Path,
) -> tuple[dict[str, dict[str, tuple[str, str]]], dict[str, float]]:
    """Returns the instructions and the use of the host that are written beside a trace.

    Both are empty for traces of other tools.
    """
    path = trace.with_name(INSTRUCTIONS)
    if not path.is_file():
        return {}, {}
    try:
        told: Any = json.loads(path.read_text(encoding="utf-8"))
        host = {name: float(told["host"][name]) for name in _HOST} if "host" in told else {}
        instructions = {
            str(program): {
                str(name): (str(kind), str(scope)) for name, (kind, scope) in ops.items()
            }
            for program, ops in told["programs"].items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            explain(
                f"{path} cannot be read ({type(error).__name__}: {error}).",
                expected="JSON as sg.profile writes it beside a trace.",
                fix="delete it: the summary then has no layers.",
            )
        ) from error
    return instructions, host
