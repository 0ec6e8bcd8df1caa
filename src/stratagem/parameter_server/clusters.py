"""Servers and workers of a coordinator, restarted when they die.

On this machine they are forked; in a cluster of several machines Ray places them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
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
from stratagem.launch.prefork.fork_server import HOST_VARIABLE, SharedStandby
from stratagem.launch.processes import LocalProcesses, RayProcesses, not_the_coordinator
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
from stratagem.parameter_server.cluster_plan import ClusterPlan, JournalPlan
from stratagem.resources import Closing, TemporaryFolder, available_cores, cache_dir

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
        return cls(num_cores=max(1, int(available_cores())))

    @classmethod
    def now(cls, spec: ClusterSpec | None, *, is_own: bool) -> Placing:
        """Returns the resources of the connected Ray cluster.

        `spec` is the cluster of `TF_CONFIG`, if any. `is_own` is True if this process started Ray.
        """
        ray = load_ray()
        is_one = spec is None and sum(node["Alive"] for node in ray.nodes()) == 1
        num_cores = max(1, int(available_cores())) if is_one else 0
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

    def resources(self, task_type: str, count: int) -> _Resources:
        """Returns the resources of each of `count` servers or workers; None if they need none.

        Workers share the GPUs equally. Each task gets a CPU if that is enough for all and the
        coordinator.
        """
        if self.by_task:
            return [{resource_of_task(task_type, index): 1} for index in range(count)]
        num_gpus = self.num_gpus // count if task_type == "worker" else 0
        share = {"GPU": num_gpus} if num_gpus else {}
        if self.by_role:
            share[task_type] = 1
        elif self.num_cpus > 2 * count:
            share["CPU"] = 1
        return [share] * count if share else None


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

    `serve_server` and `serve_worker` start the object that a process serves, which has an
    `address`. They get the index and the keys, and a server also a `JournalPlan`.

    Raises a DeadlineExceededError if tasks do not join in time, a RuntimeError if a server cannot
    start.
    """

    def __init__(
        self, plan: ClusterPlan, serve_server: Callable[..., Any], serve_worker: Callable[..., Any]
    ) -> None:
        self.keys = ClusterKeys.make()
        self._serve_worker = serve_worker
        self._plan = plan
        self._on_moved: list[Callable[[int, str], None]] = []
        self._on_given_up: list[Callable[[int, Exception], None]] = []
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
                self._start("ps", serve_server, [server] * plan.num_servers)
            )
            self._addresses: list[str | None] = list(self.servers.addresses)
            self.server_addresses = self.servers.addresses
            self.servers.watch(self._lose, self._find, self._give_up)
            self._closing = stack.pop_all()

    def locate_server(self, server: int) -> str | None:
        """Returns the current address of a server, also after a restart; None if unknown."""
        return self._addresses[server]

    def report_moves_to(
        self,
        on_moved: Callable[[int, str], None],
        on_given_up: Callable[[int, Exception], None] = lambda *_: None,
    ) -> None:
        """Registers what is called with the index and new address of a restarted server.

        `on_given_up` gets the index of a server that will not be started again, and why.
        """
        self._on_moved.append(on_moved)
        self._on_given_up.append(on_given_up)

    def start_workers(self) -> LocalProcesses | RayProcesses:
        """Starts the workers."""
        arguments = [(self.keys,)] * self._plan.num_workers
        workers = self._start("worker", self._serve_worker, arguments)
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
        own = _OF_SERVERS if kind == "ps" else _OF_WORKERS
        return RayProcesses(
            kind,
            serve,
            arguments,
            resources=self._placing.resources(kind, count),
            environment={**own, **threads},
            modules=_MODULES,
        )

    def _journals(self, stack: contextlib.ExitStack) -> JournalPlan:
        """Returns the plan of journals; the folder is a path on the machine of each server."""
        journals = self._plan.journals
        if journals.folder is not None:
            return journals
        if self._plan.spec is None:
            own = stack.enter_context(TemporaryFolder("stratagem-journals-"))
            return dataclasses.replace(journals, folder=str(own.path))
        run = hashlib.sha256(self.keys.server_public).hexdigest()[:16]
        folder = str(cache_dir() / "journals" / run)
        return dataclasses.replace(journals, folder=folder, is_temporary=True)

    def _lose(self, server: int, reason: str) -> None:
        self._addresses[server] = None

    def _give_up(self, server: int, error: Exception) -> None:
        """Reports a lost server that will not restart, so that requests to it fail immediately."""
        self._addresses[server] = None
        for on_given_up in self._on_given_up:
            on_given_up(server, error)

    def _find(self, server: int, address: str) -> None:
        self._addresses[server] = address
        for on_moved in self._on_moved:
            on_moved(server, address)


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


def _waited_for(asked: Callable[[], Any], limit_s: float) -> Any:
    """Asks until the answer is true, and returns the last one, after `limit_s` in any case."""
    deadline_s = time.monotonic() + limit_s
    while not (answer := asked()) and time.monotonic() <= deadline_s:
        threading.Event().wait(_POLL_S)
    return answer


class SharedCluster(Closing):
    """Membership of a worker in a shared cluster. The leader starts the servers.

    Raises a DeadlineExceededError if the leader or a server does not start in time.
    """

    def __init__(self, plan: ClusterPlan, *entry_points: Callable[..., Any]) -> None:
        assert plan.spec is not None
        assert plan.task is not None
        self._spec, self._task = plan.spec, plan.task
        self._worker = id_in_cluster(plan.spec, *plan.task)
        self._is_leader = plan.task == leader_of(plan.spec)
        self._num_trainings = 0
        self._ray: Any = None  # loaded once the cluster's token is set, if any
        self._served: CoordinatedCluster | None = None
        self._closing: contextlib.ExitStack | None = None
        with contextlib.ExitStack() as stack:
            if self._is_leader:
                self._served = served = stack.enter_context(
                    CoordinatedCluster(dataclasses.replace(plan, task=None), *entry_points)
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

    def report_moves_to(
        self,
        on_moved: Callable[[int, str], None],
        on_given_up: Callable[[int, Exception], None] = lambda *_: None,
    ) -> None:
        """Registers them in the leader; others call `locate_server` while they wait."""
        if self._served is not None:
            self._served.report_moves_to(on_moved, on_given_up)

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
        if not _waited_for(lambda: self._asked("num_begun") >= number, limit_s):
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

        def actor() -> Any:
            with contextlib.suppress(ValueError):  # not created yet
                return self._ray.get_actor(ACTOR, NAMESPACE)

        if (found := _waited_for(actor, limit_s)) is not None:
            return found
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
        if not _waited_for(lambda: not self._present(), limit_s):
            warnings.warn(
                explain(
                    f"Workers {sorted(self._present())} are still running {limit_s:g} s after the "
                    "leader finished; their servers stop now.",
                    expected="workers that finish at about the same time.",
                    fix="set STRATAGEM_BARRIER_TIMEOUT_S to wait longer.",
                ),
                RuntimeWarning,
                stacklevel=3,
            )

    def _present(self) -> set[int]:
        """Returns the workers that have not finished and whose machine is alive."""
        live = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        return {worker for worker, node in self._asked("present").items() if node in live}
