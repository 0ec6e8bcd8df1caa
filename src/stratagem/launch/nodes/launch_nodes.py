"""Launch of a job on this machine, or as one of its nodes."""

from __future__ import annotations

import dataclasses
import functools
import platform
import signal
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

from stratagem import settings
from stratagem.cluster.addresses import free_ports, join_address
from stratagem.errors import UnavailableError, explain
from stratagem.group.authentication.secret import Credentials
from stratagem.launch.nodes.agent import run_node
from stratagem.launch.nodes.rendezvous import MeetingPoint, Node, Rendezvous, find_meeting_point
from stratagem.launch.plan.elastic import ElasticConfig
from stratagem.launch.plan.options import LaunchOptions, tasks_of_nodes
from stratagem.launch.plan.task_plan import TaskPlan
from stratagem.launch.restart.launcher import Outcome, launch
from stratagem.launch.restart.running_tasks import RunningTask
from stratagem.launch.restart.task_group import end_summary
from stratagem.launch.tasks.exit_status import ExitStatus
from stratagem.launch.tasks.output.screen import Screen

# Task that runs on another node, as node 0 sees it.


class NodeTask:
    """Process and output of a task of another node; `send` sends a message there.

    The node itself shows the output. When the node is lost, so are its tasks.
    """

    def __init__(
        self, plan: TaskPlan, node: Node, start: int, send: Callable[[dict[str, Any]], None]
    ) -> None:
        self.plan = plan
        self.signals: set[int] = set()
        self.is_gone = False
        self.group = 0
        self.streams: Sequence[IO[bytes]] = ()
        self.is_shown = False
        self._node = node
        self._key = (start, plan.name)
        self._send = send

    @property
    def reason(self) -> str:
        """Why it ended, if its exit code does not say so."""
        message = self._node.exits.get(self._key)
        return self._node.reason if message is None else str(message.get("reason", ""))

    def returncode(self) -> int | None:
        """Returns the exit code, negative for a signal; None while it runs."""
        message = self._node.exits.get(self._key)
        if message is None:
            return -signal.SIGKILL if self._node.reason else None
        return message["returncode"]

    def last_lines(self) -> tuple[str, ...]:
        """Returns the last lines, which arrive with the exit code."""
        message = self._node.exits.get(self._key)
        return () if message is None else message["lines"]

    def send(self, signum: int) -> None:
        """Sends a signal to the task."""
        self.signals.add(signum)
        start, task = self._key
        self._send({"kind": "signal", "start": start, "task": task, "signum": int(signum)})

    def look_for_members(self) -> bool:
        """Updates and returns `is_gone`."""
        self.is_gone = bool(self._node.reason) or self._key in self._node.gone
        return self.is_gone

    def read(self, stream: IO[bytes]) -> None:
        """There is nothing to read here."""

    def read_all(self, stream: IO[bytes]) -> bytes:
        """Returns no bytes."""
        return b""

    def take(self, data: bytes, now_s: float, *, stream: int) -> None:
        """Nothing arrives here."""

    def show_overdue(self, now_s: float) -> None:
        """There is nothing to show here."""

    def show_rest(self, now_s: float) -> None:
        """There is nothing to show here."""

    def wait(self) -> None:
        """Does not wait: its node kills it."""

    def close(self) -> None:
        """Releases nothing."""


# All nodes of a job, as node 0 uses them: waits for them, and assigns and starts tasks.

# Once enough nodes have joined, the others have this long to take part from the first start.
_LAST_CALL_S = 30.0
_POLL_S = 0.05


class JobNodes:
    """The nodes of a job: this one, and those that have joined the rendezvous."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        point: MeetingPoint,
        options: LaunchOptions,
        say: Callable[[list[str]], None],
    ) -> None:
        self._rendezvous = rendezvous
        self._point = point
        self._options = options
        self._say = say
        self._label = f"node 0 ({platform.node()})"
        self._num_starts = 0
        self._members: list[Node] = []

    def num_workers(self) -> int:
        """Returns the number of workers of the nodes that have joined."""
        return self._options.workers + sum(node.workers for node in self._rendezvous.members())

    def wait(self, wanted: int, is_over: Callable[[], bool]) -> int:
        """Waits for the nodes and a port for each task; returns the number of workers.

        Waits for all nodes at first and for the least number after a restart. Returns 0 once
        `is_over()`. Raises UnavailableError if too few join within the limit.
        """
        del wanted
        started_s = time.monotonic()
        limit_s = float(settings.read("join_timeout_s"))
        while not is_over():
            members = self._rendezvous.members()
            waited_s = time.monotonic() - started_s
            is_first = self._num_starts == 0 and waited_s < _LAST_CALL_S
            wanted_nodes = self._point.most if is_first else self._point.least
            if 1 + len(members) >= wanted_nodes and self._have_ports(members, is_over):
                self._members = members
                return self._options.workers + sum(node.workers for node in members)
            if waited_s > limit_s:
                raise self._too_few(members, limit_s)
            time.sleep(_POLL_S)
        return 0

    def begin(
        self, restart: int, plan_own: Callable[..., tuple[TaskPlan, ...]], *, is_warm: bool
    ) -> tuple[TaskPlan, ...]:
        """Asks the others to start their tasks; returns the plans of all, the leader first."""
        nodes = self._members
        tasks = self._tasks(nodes)
        ports = [iter(free_ports(len(tasks))), *(iter(n.ports[self._num_starts]) for n in nodes)]
        hosts = [self._point.host, *(node.address for node in nodes)]
        cluster: dict[str, list[str]] = {}
        for kind, _, at in tasks:
            cluster.setdefault(kind, []).append(join_address(hosts[at], next(ports[at])))
        own = plan_own([(kind, index) for kind, index, at in tasks if at == 0], cluster=cluster)
        for place, node in enumerate(nodes, start=1):
            message = {
                "kind": "start",
                "start": self._num_starts,
                "restart": restart,
                "cluster": cluster,
                "tasks": [(kind, index) for kind, index, at in tasks if at == place],
                "is_warm": is_warm,
            }
            self._rendezvous.send(node, message)
        self._num_starts += 1
        num_workers = len(cluster.get("worker", ()))
        labels = [self._label, *(node.label for node in nodes)]
        self._say([f"{num_workers} workers on {len(labels)} nodes: {', '.join(labels)}."])
        here = {plan.name: dataclasses.replace(plan, node=self._label) for plan in own}
        plans = (
            TaskPlan(task_type=kind, index=index, command=(), variables={}, node=labels[at])
            for kind, index, at in tasks
        )
        return tuple(here.get(plan.name, plan) for plan in plans)

    def running_task(self, plan: TaskPlan) -> RunningTask | None:
        """Returns the task on its node, or None for a task of this machine."""
        node = next((node for node in self._members if node.label == plan.node), None)
        if node is None:
            return None
        send = functools.partial(self._rendezvous.send, node)
        task = NodeTask(plan, node, self._num_starts - 1, send)
        return RunningTask(process=task, output=task)

    def _tasks(self, nodes: list[Node]) -> list[tuple[str, int, int]]:
        options = self._options
        return tasks_of_nodes(
            [options.workers, *(node.workers for node in nodes)],
            chief=options.chief,
            ps=options.ps,
            evaluator=options.evaluator,
            input_workers=[options.input_workers, *(node.input_workers for node in nodes)],
        )

    def _have_ports(self, nodes: list[Node], is_over: Callable[[], bool]) -> bool:
        """Asks for ports; returns False if a node is lost meanwhile."""
        start, tasks = self._num_starts, self._tasks(nodes)
        for place, node in enumerate(nodes, start=1):
            count = sum(at == place for _, _, at in tasks)
            node.ports.pop(start, None)
            self._rendezvous.send(node, {"kind": "ports", "start": start, "count": count})
        while any(start not in node.ports for node in nodes):
            if is_over() or self._rendezvous.members() != nodes:
                return False
            time.sleep(_POLL_S)
        return all(
            len(node.ports[start]) == sum(at == place for _, _, at in tasks)
            for place, node in enumerate(nodes, start=1)
        )

    def _too_few(self, members: list[Node], limit_s: float) -> UnavailableError:
        names = {node.rank: node.label for node in self._rendezvous.lost}
        present = {0, *(node.rank for node in members)}
        missing = [
            f"{names[rank]}: {self._reason(rank)}" if rank in names else f"node {rank}"
            for rank in range(self._point.most)
            if rank not in present
        ]
        return UnavailableError(
            explain(
                f"{len(present)} of {self._point.most} nodes are at {self._point.address}; missing "
                f"for {limit_s:g} s: {'; '.join(missing)}.",
                expected=f"at least {self._point.least} nodes within STRATAGEM_JOIN_TIMEOUT_S.",
                fix="check that the command runs on them and reaches this address, lower "
                "--nnodes, or raise the limit.",
            )
        )

    def _reason(self, rank: int) -> str:
        return next(node.reason for node in self._rendezvous.lost if node.rank == rank)


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
