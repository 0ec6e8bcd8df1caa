"""Servers shared by workers that each run their own program."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from stratagem import environment, settings
from stratagem.cluster.addresses import split_address
from stratagem.cluster.roles import id_in_cluster
from stratagem.environment import load
from stratagem.errors import DeadlineExceededError, explain
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.launch.processes.local_processes import not_the_coordinator
from stratagem.launch.remote.ray.leader import leader_of
from stratagem.launch.remote.ray.ray_cluster import load_ray, start_local_ray
from stratagem.launch.remote.ray.ray_nodes import expect_token, join_as_node
from stratagem.launch.remote.ray.server_registry import ACTOR, NAMESPACE, ServerRegistry
from stratagem.parameter_server.cluster.cluster_plan import ClusterPlan, EntryPoints
from stratagem.parameter_server.cluster.coordinated_cluster import CoordinatedCluster
from stratagem.resources import Closing

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
        stack.enter_context(start_local_ray(address)).wait()

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
