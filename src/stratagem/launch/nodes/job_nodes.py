"""All nodes of a job, as node 0 uses them: waits for them, and assigns and starts tasks."""

from __future__ import annotations

import dataclasses
import functools
import socket
import time
from collections.abc import Callable

from stratagem import environment
from stratagem.cluster.addresses import join_address
from stratagem.errors import UnavailableError
from stratagem.launch.nodes.meeting_point import MeetingPoint
from stratagem.launch.nodes.node_task import NodeTask
from stratagem.launch.nodes.rendezvous import Node, Rendezvous
from stratagem.launch.plan.node_tasks import tasks_of_nodes
from stratagem.launch.plan.options import LaunchOptions
from stratagem.launch.plan.ports import free_ports
from stratagem.launch.plan.task_plan import TaskPlan
from stratagem.launch.restart.running_tasks import RunningTask
from stratagem.messages import explain

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
        self._label = f"node 0 ({socket.gethostname()})"
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
        limit_s = float(environment.read("join_timeout_s"))
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
