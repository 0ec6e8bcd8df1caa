"""Launch of a job on this machine, or as one of its nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from stratagem.group.authentication.credentials import Credentials
from stratagem.launch.nodes.agent import run_node
from stratagem.launch.nodes.job_nodes import JobNodes
from stratagem.launch.nodes.meeting_point import MeetingPoint, find_meeting_point
from stratagem.launch.nodes.rendezvous import Rendezvous
from stratagem.launch.plan.elastic import ElasticConfig
from stratagem.launch.plan.options import LaunchOptions
from stratagem.launch.restart.launcher import Outcome, launch
from stratagem.launch.restart.report import end_summary
from stratagem.launch.tasks.exit_status import ExitStatus
from stratagem.launch.tasks.output.screen import Screen
from stratagem.messages import explain


def launch_nodes(
    command: Sequence[str], options: LaunchOptions, *, elastic: ElasticConfig | None = None
) -> Outcome:
    """Runs a command as every task of a cluster, on this machine or as one of its nodes.

    See `launch` for its errors. Those about other nodes are UnavailableError, and ValueError for
    options that contradict each other.
    """
    point = find_meeting_point(options)
    if point is None:
        return launch(command, options, elastic=elastic)
    if elastic is not None or options.min_workers is not None or options.max_workers is not None:
        raise ValueError(
            explain(
                f"nnodes={options.nnodes!r} with a range of workers.",
                expected="a range of nodes: nodes are lost and return as a whole.",
                fix="pass nnodes='MIN:MAX' (--nnodes MIN:MAX) and the workers of one node.",
            )
        )
    credentials = Credentials.find("This launcher", [point.host])
    if not point.is_here:
        return run_node(command, options, point, credentials)
    say = Screen([]).say
    try:
        rendezvous = Rendezvous(point, options.node_timeout_s, say, credentials)
    except ValueError:
        if point.rank is None:  # another launcher on this machine is node 0
            return run_node(command, options, point, credentials)
        raise
    with rendezvous:
        return _lead(command, options, point, rendezvous)


def _lead(
    command: Sequence[str], options: LaunchOptions, point: MeetingPoint, rendezvous: Rendezvous
) -> Outcome:
    """Runs the job as node 0, and sends its end to the others."""
    say = Screen([]).say
    more = point.most - 1
    say([f"Node 0 waits for {more} more {'nodes' if more > 1 else 'node'} at {point.address}."])
    end: dict[str, Any] = {"kind": "end", "error": "node 0 was interrupted", "cause": None}
    try:
        outcome = launch(command, options, nodes=JobNodes(rendezvous, point, options, say))
        summary = end_summary(outcome.cause, outcome.signum)
        end.update(error="", cause=_as_message(outcome), summary=summary)
        return outcome
    except (OSError, RuntimeError, ValueError) as error:
        end["error"] = str(error)
        raise
    finally:
        rendezvous.end(end)


def _as_message(outcome: Outcome) -> dict[str, Any] | None:
    """Returns the fields of the exit status that explains the end, or None for a good end."""
    code = outcome.exit_code
    # Without one, a signal ended the job before its start.
    cause = outcome.cause or ExitStatus(name="node 0", returncode=code, at_s=0.0)
    if not code:
        return None
    fields = dataclasses.asdict(cause)
    return {name: fields[name] for name in ("name", "node", "returncode", "reason", "lines")}
