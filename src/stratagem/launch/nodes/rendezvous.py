"""Rendezvous on node 0: admits the other nodes, passes messages on, and notices lost nodes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import NoneType
from typing import Any

from stratagem import environment
from stratagem.cluster.addresses import join_address, split_address
from stratagem.cluster.launchers import port_of_job
from stratagem.cluster.resolvers.slurm import SlurmClusterResolver
from stratagem.cluster.spec import parse_task_index
from stratagem.errors import explain
from stratagem.group.authentication.connections import (
    close_now,
    frame,
    listening_sockets,
    open_streams,
    read_frame,
)
from stratagem.group.authentication.secret import Credentials, Gate, HandshakeLimits
from stratagem.launch.plan.options import LaunchOptions, node_range
from stratagem.resources import Closing

# Number of nodes, rank of this one and rendezvous: from the options, Slurm or Kubernetes.

# As for torchrun.
DEFAULT_PORT = 29400


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeetingPoint:
    """Numbers of nodes, rank of this one (None if node 0 assigns it), and address of node 0."""

    least: int
    most: int
    rank: int | None
    host: str
    port: int

    @property
    def address(self) -> str:
        """The address as `host:port`."""
        return join_address(self.host, self.port)

    @property
    def is_here(self) -> bool:
        """True if this machine hosts the rendezvous: as node 0, or by the endpoint's host."""
        return _is_own_address(self.host) if self.rank is None else self.rank == 0


def find_meeting_point(options: LaunchOptions) -> MeetingPoint | None:
    """Returns how the nodes of this job meet, or None for this machine alone.

    Raises ValueError if the rank is out of range or no address of node 0 is known, RuntimeError for
    invalid variables of Slurm.
    """
    step = _slurm_step(options)
    nnodes = options.nnodes or (1 if step is None else step.most)
    least, most = node_range(nnodes)
    if most == 1:
        return None
    rank = options.node_rank
    if step is not None:
        rank = step.rank if rank is None else rank
    elif rank is None and (index := environment.lookup("JOB_COMPLETION_INDEX")) is not None:
        rank = parse_task_index(index)
    if rank is not None and rank >= most:
        raise ValueError(
            explain(
                f"node_rank={rank} is too large for {most} nodes.",
                expected=f"0 to {most - 1}.",
                fix="give each node its own --node-rank, and all the same --nnodes.",
            )
        )
    if options.rdzv_endpoint is not None:
        host, port = _endpoint(options.rdzv_endpoint)
    elif step is not None:
        host, port = step.host, step.port
    else:
        host, port = _host_of_pod(most), DEFAULT_PORT
    return MeetingPoint(least=least, most=most, rank=rank, host=host, port=port)


def _endpoint(text: str) -> tuple[str, int]:
    """Splits `host:port`; the port may be omitted."""
    # An IPv6 host is in brackets, and has colons of its own.
    has_port = ":" in text.rpartition("]")[2]
    return split_address(text if has_port else f"{text}:{DEFAULT_PORT}")


def _slurm_step(options: LaunchOptions) -> MeetingPoint | None:
    """Returns the nodes of a Slurm step with one task on each; None outside a step of several."""
    count = environment.lookup("SLURM_STEP_NUM_TASKS")
    if count in (None, "1") or environment.lookup("SLURM_PROCID") is None:
        return None
    if options.nnodes is not None and node_range(options.nnodes)[1] == 1:
        return None
    job = parse_task_index(environment.lookup("SLURM_JOB_ID") or "0")
    resolver = SlurmClusterResolver(port_base=port_of_job(job), gpus_per_node=0)
    tasks = resolver.cluster_spec().job_tasks("worker")
    addresses = [split_address(address) for address in tasks if address]
    if len({host for host, _ in addresses}) < len(addresses):
        raise ValueError(
            explain(
                f"srun started {len(addresses)} launchers, several on one node.",
                expected="one launcher per node, which starts the workers of its node.",
                fix="use srun --ntasks-per-node=1 stratagem launch --workers N; or start each "
                "worker by srun python train.py, without the launcher.",
            )
        )
    (host, port), most = addresses[0], len(addresses)
    return MeetingPoint(least=most, most=most, rank=resolver.task_id, host=host, port=port)


def _host_of_pod(most: int) -> str:
    """Returns pod 0 of an Indexed Job, whose headless service gives pods names of their own."""
    index, own = environment.lookup("JOB_COMPLETION_INDEX"), socket.getfqdn()
    name, _, domain = own.partition(".")
    if index is not None and name.endswith(f"-{index}") and domain:
        return f"{name.removesuffix(index)}0.{domain}"
    fix = "pass --rdzv-endpoint HOST:PORT, or start all nodes from one terminal with --hosts."
    if index is not None:
        fix = f"set `subdomain` of the pods to a headless service ({own} is no such name), or {fix}"
    elif environment.lookup("RAY_JOB_CONFIG_JSON_ENV_VAR") is not None:
        fix = (
            "in a Ray job use sg.ParameterServerStrategy, which places its processes itself; or "
            + fix
        )
    raise ValueError(
        explain(
            f"nnodes={most} without the address of node 0.",
            expected="rdzv_endpoint, or a Slurm step or an Indexed Job of Kubernetes.",
            fix=fix,
        )
    )


def _is_own_address(host: str) -> bool:
    """Returns True if a socket of this machine can have the address."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError:
            continue
        return True
    return False


# Names the limit in messages.
LIMIT_OPTION = "the limit of --node-timeout-s"

PURPOSE = "rendezvous"
"""Purpose of the key."""
_MAX_HELLO_BYTES = 2**16
_INVALID = (KeyError, OverflowError, TypeError, ValueError)
# A launcher that is started again may connect before its earlier connection is noticed as lost.
_CONNECTIONS_PER_NODE = 8
# How long the end of the job may take to reach the nodes.
_END_S = 3.0


def beat_s(timeout_s: float) -> float:
    """Returns the interval between heartbeats for a limit on silence."""
    return min(1.0, timeout_s / 5)


@dataclasses.dataclass(eq=False, kw_only=True)
class Node:
    """A node that has joined, as node 0 sees it.

    `token` is unique to its launcher. `exits` has the message about the end of a task, by start and
    name; `gone` those of which no process is left. `reason` says why the node was lost.
    """

    rank: int
    host: str
    address: str
    workers: int
    input_workers: int = 0
    token: str
    writer: asyncio.StreamWriter
    received_s: float
    reason: str = ""
    is_leaving: bool = False
    ports: dict[int, list[int]] = dataclasses.field(default_factory=dict[int, list[int]])
    exits: dict[tuple[int, str], dict[str, Any]] = dataclasses.field(
        default_factory=dict[tuple[int, str], dict[str, Any]]
    )
    gone: set[tuple[int, str]] = dataclasses.field(default_factory=set[tuple[int, str]])

    @property
    def label(self) -> str:
        """The name in messages, such as "node 1 (gpu-b)"."""
        return f"node {self.rank} ({self.host})"


class Rendezvous(Closing):
    """Listens for nodes in a background thread. `say` shows lines on the screen.

    Raises ValueError if the port is taken.
    """

    def __init__(
        self,
        point: MeetingPoint,
        timeout_s: float,
        say: Callable[[list[str]], None],
        credentials: Credentials | None = None,
    ) -> None:
        self._point = point
        self._credentials = credentials or Credentials()
        self._limits = HandshakeLimits.find()
        self._num_connections = 0
        self._timeout_s = timeout_s
        self._say = say
        self._nodes: dict[int, Node] = {}
        self._end: dict[str, Any] | None = None
        self._tasks = set[asyncio.Task[None]]()
        listeners = self._listen()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="stratagem-rendezvous", daemon=True
        )
        self._loop.call_soon(self._start_watching)
        self._thread.start()
        self._gate = Gate(
            listeners, self._credentials, self._hand_over, purpose=PURPOSE, limits=self._limits
        )

    @property
    def lost(self) -> list[Node]:
        """The nodes that were lost and have not returned."""
        return [node for node in self._by_rank() if node.reason]

    def members(self) -> list[Node]:
        """Returns the nodes that can run tasks, by rank."""
        return [node for node in self._by_rank() if not node.reason and not node.is_leaving]

    def send(self, node: Node, message: dict[str, Any]) -> None:
        """Sends a message from any thread, without waiting."""
        self._loop.call_soon_threadsafe(self._write, node, message)

    def end(self, message: dict[str, Any]) -> None:
        """Sends the end of the job to all nodes, and waits a little until they have left."""
        ending = asyncio.run_coroutine_threadsafe(self._end_all(message), self._loop)
        with contextlib.suppress(TimeoutError):
            ending.result(_END_S)

    def close(self) -> None:
        """Closes all connections without notice."""
        self._gate.close()
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _by_rank(self) -> Iterator[Node]:
        return (node for _, node in sorted(self._nodes.copy().items()))

    def _listen(self) -> list[socket.socket]:
        try:
            return listening_sockets(self._point.host, self._point.port)
        except OSError as error:
            raise ValueError(
                explain(
                    f"Node 0 cannot listen on port {self._point.port}: {error.strerror or error}.",
                    expected="a free port on node 0.",
                    fix="choose another port with --rdzv-endpoint on all nodes, or stop the "
                    "program that uses it, such as an earlier launch.",
                )
            ) from error

    def _start_watching(self) -> None:
        self._hold(self._loop.create_task(self._watch()))

    def _hold(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close(self) -> None:
        for node in self._nodes.values():
            close_now(node.writer)
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _hand_over(self, connection: socket.socket, claim: str) -> None:
        del claim  # nodes with the secret may have any rank
        self._loop.call_soon_threadsafe(self._start_serving, connection)

    def _start_serving(self, connection: socket.socket) -> None:
        if self._num_connections >= _CONNECTIONS_PER_NODE * self._point.most:
            connection.close()
            return
        self._num_connections += 1
        self._hold(self._loop.create_task(self._serve(connection)))

    async def _serve(self, connection: socket.socket) -> None:
        node: Node | None = None
        writer: asyncio.StreamWriter | None = None
        # A run may have no secret; invalid messages end the connection.
        with contextlib.suppress(*_INVALID, OSError, asyncio.CancelledError):
            try:
                async with asyncio.timeout(self._limits.timeout_s):
                    reader, writer = await open_streams(
                        connection, self._credentials, is_server=True
                    )
                    hello = await read_frame(reader, _MAX_HELLO_BYTES)
                node = self._admit(hello, writer)
                while node is not None:
                    message = await read_frame(reader)
                    node.received_s = time.monotonic()
                    _record(node, message)
            finally:
                self._num_connections -= 1
                if node is not None:
                    reason = "its node closed the connection; its launcher ended or was killed"
                    self._lose(node, reason)
                connection.close() if writer is None else close_now(writer)

    def _admit(self, hello: dict[str, Any], writer: asyncio.StreamWriter) -> Node | None:
        refusal = self._refusal(hello)
        if self._end is not None or refusal is not None:
            writer.write(frame(self._end or {"kind": "refused", **(refusal or {})}))
            return None
        rank = hello["rank"]
        if rank is None:
            taken = {node.rank for node in self._nodes.values() if not node.reason}
            rank = next(one for one in range(1, self._point.most) if one not in taken)
        before = self._nodes.get(rank)
        if before is not None:
            self._lose(before, "its node connected again")
        node = Node(
            rank=rank,
            host=str(hello["host"]),
            address=str(hello["address"]),
            workers=int(hello["workers"]),
            input_workers=int(hello["input_workers"]),
            token=str(hello["token"]),
            writer=writer,
            received_s=time.monotonic(),
        )
        self._nodes[rank] = node
        self._say([f"{node.label} joined: {1 + len(self.members())} of {self._point.most} nodes."])
        self._write(node, {"kind": "welcome", "rank": rank})
        return node

    def _refusal(self, hello: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the reason to refuse a node, and True if it may try again; else None."""
        point, rank = self._point, hello["rank"]
        if type(rank) not in (int, NoneType):
            raise TypeError(f"the rank {rank!r} is no number")
        nnodes = [point.least, point.most]
        if hello["nnodes"] != nnodes or not (rank is None or 1 <= rank < point.most):
            text = explain(
                f"Node {rank} with --nnodes {_range_text(hello['nnodes'])} asked to join a job of "
                f"--nnodes {_range_text(nnodes)}.",
                expected="the same --nnodes everywhere, and a --node-rank below it.",
                fix="run the same command on every node, each with its own --node-rank.",
            )
            return {"text": text, "is_final": True}
        present = [node for node in self._nodes.values() if not node.reason]
        taken = next((node for node in present if node.rank == rank), None)
        if taken is not None and taken.token != hello["token"]:
            return {"text": f"{taken.label} has already joined.", "is_final": False}
        if rank is None and len(present) >= point.most - 1:
            return {"text": f"All {point.most} nodes have already joined.", "is_final": False}
        return None

    def _lose(self, node: Node, reason: str) -> None:
        if not node.reason:
            node.reason = reason
            node.writer.close()
            if self._end is None and not node.is_leaving:
                self._say([f"{node.label} is lost: {reason}."])

    async def _watch(self) -> None:
        limit_s = self._timeout_s
        while True:
            await asyncio.sleep(beat_s(limit_s))
            for node in list(self._nodes.values()):
                self._write(node, {"kind": "beat"})
                if time.monotonic() - node.received_s > limit_s:  # once: it then has a reason
                    self._lose(node, f"no answer from its node for {limit_s:g} s, {LIMIT_OPTION}")

    def _write(self, node: Node, message: dict[str, Any]) -> None:
        if not node.reason and not node.writer.is_closing():
            node.writer.write(frame(message))

    async def _end_all(self, message: dict[str, Any]) -> None:
        self._end = message
        for node in self._nodes.values():
            self._write(node, message)
        # Each closes its connection when it has received this.
        while any(not node.reason for node in self._nodes.values()):
            await asyncio.sleep(0.02)


def _record(node: Node, message: dict[str, Any]) -> None:
    """Records a message of a node; raises one of `_INVALID` if it is invalid."""
    kind = message["kind"]
    if kind == "ports":
        node.ports[int(message["start"])] = list(map(int, message["ports"]))
    elif kind == "exited":
        message["returncode"] = int(message["returncode"])
        message["lines"] = tuple(map(str, message["lines"]))
        node.exits[int(message["start"]), str(message["task"])] = message
    elif kind == "gone":
        node.gone.add((int(message["start"]), str(message["task"])))
    elif kind == "leaving":
        node.is_leaving = True


def _range_text(nnodes: list[int]) -> str:
    least, most = nnodes
    return str(most) if least == most else f"{least}:{most}"
