"""Servers and workers of a coordinator, restarted when they die.

On this machine they are forked; in a cluster of several machines Ray places them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import pickle
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from stratagem import environment, settings
from stratagem.cluster.addresses import split_address
from stratagem.cluster.roles import id_in_cluster
from stratagem.cluster.spec import ClusterSpec
from stratagem.environment import load
from stratagem.errors import DeadlineExceededError, explain
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.launch.prefork.fork_server import HOST_VARIABLE
from stratagem.launch.processes.local_processes import (
    LocalProcesses,
    SharedStandby,
    not_the_coordinator,
)
from stratagem.launch.processes.ray_processes import RayProcesses
from stratagem.launch.remote.ray_cluster import (
    ACTOR,
    NAMESPACE,
    RayCluster,
    ServerRegistry,
    is_connected,
    load_ray,
)
from stratagem.launch.remote.ray_nodes import (
    RayNode,
    expect_token,
    join_as_node,
    leader_of,
    resource_of_task,
    start_head,
)
from stratagem.parameter_server.cluster_plan import ClusterPlan, EntryPoints, JournalPlan
from stratagem.resources import Closing, TemporaryFolder, cache_dir

# Machine resources and CPU threads requested by each server and worker.

# XLA's number of CPU threads, read when JAX creates its backend.
_NUM_THREADS = "NPROC"

_Resources = Sequence[Mapping[str, float]] | None


@dataclasses.dataclass(frozen=True)
class Placing:
    """Resources of the machines that processes may be placed on.

    Args:
        by_task: True if each machine is reserved for one task of `TF_CONFIG`.
        by_role: True if machines offer the Ray resources "ps" and "worker", as in our manifests.
        num_cpus: CPUs of an existing Ray cluster; 0 if CPUs are not counted.
        num_gpus: GPUs of an existing Ray cluster.
        num_cores: cores of the machine if all processes share one, else 0.
    """

    by_task: bool = False
    by_role: bool = False
    num_cpus: int = 0
    num_gpus: int = 0
    num_cores: int = 0

    @classmethod
    def here(cls) -> Placing:
        """Returns the resources of this machine, for forked processes."""
        return cls(num_cores=_num_cores())

    @classmethod
    def now(cls, spec: ClusterSpec | None, *, is_own: bool) -> Placing:
        """Returns the resources of the connected Ray cluster.

        `spec` is the cluster of `TF_CONFIG`, if any. `is_own` is True if this process started Ray.
        """
        ray = load_ray()
        is_one = spec is None and sum(node["Alive"] for node in ray.nodes()) == 1
        num_cores = _num_cores() if is_one else 0
        if is_own:
            return cls(num_cores=num_cores)
        there = ray.cluster_resources()
        if spec is not None and resource_of_task(*leader_of(spec)) in there:
            return cls(by_task=True)
        return cls(
            by_role={"ps", "worker"} <= there.keys(),
            num_cpus=int(there.get("CPU", 0)),
            num_gpus=int(there.get("GPU", 0)),
            num_cores=num_cores,
        )

    def threads(self, count: int) -> dict[str, str]:
        """Returns environment variables that divide the cores among `count` busy processes.

        With a thread per core in each process, the threads of one operation wait for each other.
        Virtual devices need threads for each device, so nothing is limited for them.
        """
        has_virtual = environment.lookup("JAX_NUM_CPU_DEVICES") is not None
        has_virtual |= environment.num_forced_cpu_devices() > 1
        if not self.num_cores or has_virtual or environment.lookup(_NUM_THREADS) is not None:
            return {}
        return {_NUM_THREADS: str(max(1, self.num_cores // count))}

    def of_servers(self, count: int) -> _Resources:
        """Returns the resources of each of `count` servers; None if they need none."""
        return self._of_tasks("ps", count) or self._shares("ps", count, 0)

    def of_workers(self, count: int) -> _Resources:
        """Returns the resources of each of `count` workers; None if they need none."""
        return self._of_tasks("worker", count) or self._shares(
            "worker", count, self.num_gpus // count
        )

    def _of_tasks(self, task_type: str, count: int) -> _Resources:
        if not self.by_task:
            return None
        return [{resource_of_task(task_type, index): 1} for index in range(count)]

    def _shares(self, role: str, count: int, num_gpus: int) -> _Resources:
        """Splits GPUs equally; adds a CPU each if enough for all and the coordinator."""
        share = {"GPU": num_gpus} if num_gpus else {}
        if self.by_role:
            share[role] = 1
        elif self.num_cpus > 2 * count:
            share["CPU"] = 1
        return [share] * count if share else None


def _num_cores() -> int:
    """Returns the number of cores this process may use, or all where the OS cannot say."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# Servers compute on the host; workers use the accelerators.
_NO_CLUSTER = {"TF_CONFIG": "", "STRATAGEM_SLURM_JOBS": ""}
_OF_SERVERS = {"JAX_PLATFORMS": "cpu", **_NO_CLUSTER}
_OF_WORKERS = _NO_CLUSTER
# On this machine accelerators belong to the coordinator, and only local processes connect.
_OF_LOCAL = {"JAX_PLATFORMS": "cpu", **_NO_CLUSTER, HOST_VARIABLE: "127.0.0.1"}
# Imported once, before a process is forked, so that a restart does not import again.
_MODULES = (
    "cloudpickle",
    "zmq",
    "stratagem.keras",
    "stratagem.parameter_server.strategy",
)


class CoordinatedCluster(Closing):
    """Starts the servers of a cluster, and its workers on request.

    Raises a DeadlineExceededError if tasks do not join in time, a RuntimeError if a server cannot
    start.
    """

    has_journals = True

    def __init__(self, plan: ClusterPlan, entry_points: EntryPoints) -> None:
        self.keys = ClusterKeys.make()
        self._entry_points = entry_points
        self._plan = plan
        self._on_moved: list[Callable[[int, str], None]] = []
        self._closing = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            self._standby: SharedStandby | None = None
            if _is_local(plan):
                variables = {**environment.snapshot(), **_OF_LOCAL}
                self._standby = stack.enter_context(SharedStandby(_MODULES, variables))
                self._placing = Placing.here()
            else:
                self._placing = _connect(plan, stack)
            server = (self.keys, self._journals(stack))
            self.servers = stack.enter_context(
                self._start("ps", entry_points.server, [server] * plan.num_servers)
            )
            self._addresses: list[str | None] = list(self.servers.addresses)
            self.server_addresses = self.servers.addresses
            self.servers.watch(self._lose, self._find, self._give_up)
            self._closing = stack.pop_all()

    def locate_server(self, server: int) -> str | None:
        """Returns the current address of a server, also after a restart; None if unknown."""
        return self._addresses[server]

    def report_moves_to(self, on_moved: Callable[[int, str], None]) -> None:
        """Registers a function to call with the index and new address of a restarted server."""
        self._on_moved.append(on_moved)

    def start_workers(self) -> LocalProcesses | RayProcesses:
        """Starts the workers."""
        serve = self._entry_points.worker
        workers = self._start("worker", serve, [(self.keys,)] * self._plan.num_workers)
        return self._closing.enter_context(workers)

    def close(self) -> None:
        """Stops all processes of the cluster."""
        self._closing.close()

    def _start(
        self, kind: str, serve: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]
    ) -> LocalProcesses | RayProcesses:
        """Starts the servers or the workers without waiting for them."""
        count = len(arguments)
        threads = self._placing.threads(count)
        if self._standby is not None:
            return LocalProcesses(kind, serve, arguments, standby=self._standby, variables=threads)
        is_server = kind == "ps"
        own, resources = (
            (_OF_SERVERS, self._placing.of_servers(count))
            if is_server
            else (_OF_WORKERS, self._placing.of_workers(count))
        )
        return RayProcesses(
            kind,
            serve,
            arguments,
            resources=resources,
            environment={**own, **threads},
            modules=_MODULES,
        )

    def _journals(self, stack: contextlib.ExitStack) -> JournalPlan:
        """Returns the plan of journals; the folder is a path on the machine of each server."""
        plan, is_temporary = self._plan, False
        folder = plan.journal_dir
        if folder is None and plan.spec is None:
            folder = str(stack.enter_context(TemporaryFolder("stratagem-journals-")).path)
        elif folder is None:
            run = hashlib.sha256(self.keys.server_public).hexdigest()[:16]
            folder, is_temporary = str(cache_dir() / "journals" / run), True
        return JournalPlan(
            folder,
            plan.journal_interval_s,
            is_durable=plan.durable_updates,
            is_temporary=is_temporary,
        )

    def _lose(self, server: int, reason: str) -> None:
        self._addresses[server] = None

    def _find(self, server: int, address: str) -> None:
        self._addresses[server] = address
        for on_moved in self._on_moved:
            on_moved(server, address)

    def _give_up(self, server: int, error: Exception) -> None:
        self._addresses[server] = None


def _is_local(plan: ClusterPlan) -> bool:
    """Returns True if neither TF_CONFIG nor a Ray connection refers to another machine."""
    return plan.spec is None and environment.lookup("RAY_ADDRESS") is None and not is_connected()


def _connect(plan: ClusterPlan, stack: contextlib.ExitStack) -> Placing:
    """Connects to the Ray cluster of the plan; starts its head here if it is new."""
    head_address = None
    if plan.spec is not None and environment.lookup("RAY_ADDRESS") is None:
        head_address = stack.enter_context(_head(plan.spec)).head_address
    count = plan.num_workers + plan.num_servers
    ray = stack.enter_context(RayCluster(head_address, num_processes=count))
    ray.wait()
    return Placing.now(plan.spec, is_own=ray.started_here)


def _head(spec: ClusterSpec) -> RayNode:
    """Starts Ray's head at the address of the leader, which is this process."""
    task_type, task_index = leader = leader_of(spec)
    return start_head(spec.task_address(*leader), task_type=task_type, task_index=task_index)


# Servers shared by workers that each run their own program.


_POLL_S = 0.2
_ANSWER_S = 10.0


class SharedCluster(Closing):
    """Membership of a worker in a shared cluster. The leader starts the servers.

    Raises a DeadlineExceededError if the leader or a server does not start in time.
    """

    has_journals = True

    def __init__(self, plan: ClusterPlan, entry_points: EntryPoints) -> None:
        assert plan.spec is not None
        assert plan.task is not None
        self._spec, self._task = plan.spec, plan.task
        self._worker = id_in_cluster(plan.spec, *plan.task)
        self._is_leader = plan.task == leader_of(plan.spec)
        self._num_trainings = 0
        self._ray: Any = None  # loaded once the cluster's token is set, if any
        self._closing: contextlib.ExitStack | None = None
        with contextlib.ExitStack() as stack:
            if self._is_leader:
                served = stack.enter_context(
                    CoordinatedCluster(dataclasses.replace(plan, task=None), entry_points)
                )
                self._ray = load_ray()
                self._locate: Callable[[int], str | None] = served.locate_server
                addresses = list(served.server_addresses)
                self._meeting: Any = self._make_meeting(pickle.dumps(served.keys), addresses)
                served.report_moves_to(lambda *move: self._meeting.move.remote(*move))
            else:
                self._join_leader(stack)
                self._ray = load_ray()
                self._meeting = self._found()
                self._locate = self._announced_address
            keys, addresses = self._asked("enter", self._worker, self._node)
            self.keys: ClusterKeys = pickle.loads(keys)  # noqa: S301 - Ray's token guards it
            self.server_addresses: list[str] = addresses
            self._closing = stack.pop_all()

    def locate_server(self, server: int) -> str | None:
        """Returns the current address of a server, also after a restart; None if unknown."""
        return self._locate(server)

    def report_moves_to(self, on_moved: Callable[[int, str], None]) -> None:
        """Does nothing: clients call `locate_server` while they wait for a server."""

    def start_workers(self) -> NoReturn:
        """Raises a RuntimeError: the workers of this cluster run their own programs."""
        raise not_the_coordinator()

    def next_training(self) -> int:
        """Returns the number of the training that begins now, from 1."""
        self._num_trainings += 1
        return self._num_trainings

    def begin(self, number: int) -> None:
        """Announces that the variables of a training are initialized. Call in the leader."""
        self._asked("begin", number)

    def wait_for_begin(self, number: int, limit_s: float) -> None:
        """Waits for the leader's `begin`; raises a DeadlineExceededError after `limit_s`."""
        deadline_s = time.monotonic() + limit_s
        while self._asked("num_begun") < number:
            if time.monotonic() > deadline_s:
                raise DeadlineExceededError(
                    explain(
                        f"The leader, {leader_of(self._spec)}, did not begin training {number} "
                        f"within {limit_s:g} s.",
                        expected="a leader that runs the same program.",
                        fix="check the output of the leader; to wait longer, pass RunConfig("
                        "session_creation_timeout_secs=...).",
                        code="SG601",
                    )
                )
            threading.Event().wait(_POLL_S)

    def close(self) -> None:
        """Leaves the cluster; the leader waits for the others and stops the servers."""
        if self._closing is None:
            return
        closing, self._closing = self._closing, None
        with closing:
            with contextlib.suppress(Exception):  # the leader is gone
                self._asked("leave", self._worker)
            if self._is_leader:
                self._wait_for_others()

    def _join_leader(self, stack: contextlib.ExitStack) -> None:
        address = None
        if environment.lookup("RAY_ADDRESS") is None:
            host, _ = split_address(self._spec.task_address(*self._task))
            address = self._spec.task_address(*leader_of(self._spec))
            expect_token()
            stack.enter_context(join_as_node(address, *self._task, host=host))
        stack.enter_context(RayCluster(address)).wait()

    @property
    def _node(self) -> str:
        return self._ray.get_runtime_context().get_node_id()

    def _make_meeting(self, keys: bytes, addresses: list[str]) -> Any:
        """Creates the registry on this machine, whose loss ends the cluster anyway."""
        scheduling = load(
            "ray.util.scheduling_strategies", needed_by="a cluster", install="stratagem[ray]"
        )
        here = scheduling.NodeAffinitySchedulingStrategy(self._node, soft=False)
        actor = self._ray.remote(ServerRegistry).options(
            name=ACTOR, namespace=NAMESPACE, num_cpus=0, scheduling_strategy=here
        )
        return actor.remote(keys, addresses)

    def _announced_address(self, server: int) -> str | None:
        """Returns None without a leader: a request to the server then reports the loss."""
        try:
            return self._asked("address_of", server)
        except self._ray.exceptions.RayError:
            return None

    def _found(self) -> Any:
        limit_s = float(settings.read("join_timeout_s"))
        deadline_s = time.monotonic() + limit_s
        while True:
            try:
                return self._ray.get_actor(ACTOR, NAMESPACE)
            except ValueError:  # not created yet
                if time.monotonic() > deadline_s:
                    break
            threading.Event().wait(_POLL_S)
        raise DeadlineExceededError(
            explain(
                f"The leader, {leader_of(self._spec)}, did not publish the servers' addresses "
                f"within {limit_s:g} s.",
                expected="a leader that creates the same strategy, and `stratagem server` in each "
                "ps task.",
                fix="check the output of the leader; set STRATAGEM_JOIN_TIMEOUT_S to wait longer.",
                code="SG601",
            )
        )

    def _asked(self, method: str, *arguments: object) -> Any:
        asked = getattr(self._meeting, method).remote(*arguments)
        return self._ray.get(asked, timeout=_ANSWER_S)

    def _wait_for_others(self) -> None:
        """Waits until the others finish, since the servers stop with this process."""
        limit_s = float(settings.read("barrier_timeout_s"))
        deadline_s = time.monotonic() + limit_s
        while present := self._present():
            if time.monotonic() > deadline_s:
                warnings.warn(
                    explain(
                        f"Workers {sorted(present)} are still running {limit_s:g} s after the "
                        "leader finished; their servers stop now.",
                        expected="workers that finish at about the same time.",
                        fix="set STRATAGEM_BARRIER_TIMEOUT_S to wait longer.",
                    ),
                    RuntimeWarning,
                    stacklevel=3,
                )
                return
            threading.Event().wait(_POLL_S)

    def _present(self) -> set[int]:
        """Returns the workers that have not finished and whose machine is alive."""
        live = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        return {worker for worker, node in self._asked("present").items() if node in live}
