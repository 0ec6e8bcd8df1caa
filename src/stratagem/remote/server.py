"""This task's server: its part of the Ray cluster in which programs of clients run."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import socket
from collections.abc import Mapping
from typing import Any

from stratagem import environment
from stratagem.cluster import ClusterDef, ClusterSpec, TFConfigClusterResolver
from stratagem.cluster.addresses import split_address
from stratagem.cluster.roles import check_task
from stratagem.errors import UnavailableError
from stratagem.launch.plan.ports import free_ports
from stratagem.messages import explain
from stratagem.remote.ray.leader import leader_of, tasks_of
from stratagem.remote.ray.ray_cluster import make_token
from stratagem.remote.ray.ray_nodes import RayNode, join_as_node, start_head
from stratagem.servers.closing import Closing

__all__ = ["Server", "ServerDef", "run_standard_server"]


@dataclasses.dataclass(frozen=True)
class ServerDef:
    """A server as plain data, in the shape of TensorFlow's protocol buffer.

    Args:
        cluster: all tasks.
        job_name: of this one.
        task_index: of this one.
        protocol: "grpc".

    Source: TF 2.21 core/protobuf/tensorflow_server.proto, ServerDef.
    """

    cluster: ClusterDef
    job_name: str
    task_index: int
    protocol: str = "grpc"


class Server(Closing):
    """This task's server: it gives its machine to the cluster and runs what clients send.

    The leader (the chief, or the first worker where there is none) starts Ray at its address and
    takes jobs at another port; all others join it. No code of a model is needed here.

    Args:
        server_or_cluster_def: the cluster, as a `ClusterSpec`, a dict or a `ClusterDef`, or a
            `ServerDef`.
        job_name: of this task; may be left out where there is one job.
        task_index: of this task; may be left out where its job has one.
        protocol: "grpc", for old programs.
        config: None, for old programs.
        start: whether it starts at once.
        jobs_port: of the leader, where it takes jobs; None for `STRATAGEM_JOBS_PORT`.

    Raises:
        TypeError: no cluster.
        ValueError: a task that is not in it, or one that is not named where there are several.
        RuntimeError: the port of the leader is taken, or there is no token.
        UnavailableError: Ray does not start here, or the leader does not let this machine in.
        DeadlineExceededError: the leader is not there within `STRATAGEM_JOIN_TIMEOUT_S`.

    Source: TF 2.21 server_lib.py, Server.
    """

    def __init__(
        self,
        server_or_cluster_def: Mapping[str, Any] | ClusterDef | ClusterSpec | ServerDef,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: None = None,
        start: bool = True,
        *,
        jobs_port: int | None = None,
    ) -> None:
        if config is not None:
            raise ValueError(
                explain(
                    f"Server received config={config!r}.",
                    expected="None: JAX has no sessions to configure.",
                    fix="leave config out.",
                )
            )
        self.server_def = _server_def(server_or_cluster_def, job_name, task_index, protocol)
        self._jobs_port = jobs_port
        self._node: RayNode | None = None
        if start:
            self.start()

    @property
    def target(self) -> str:
        """The address of this server, with its protocol in front."""
        return f"{self.server_def.protocol}://{self._address}"

    def start(self) -> None:
        """Starts this server, unless it runs."""
        if self._node is not None:
            return
        task, leader = self._task, leader_of(self._spec)
        if task == leader:
            jobs_port = self._jobs_port or int(environment.read("jobs_port"))
            _require_free(self._address)
            _require_free(f"0.0.0.0:{jobs_port}")
            self._node = start_head(
                self._address, task_type=task[0], task_index=task[1], jobs_port=jobs_port
            )
        else:
            host, _ = split_address(self._address)
            self._node = join_as_node(self._spec.task_address(*leader), *task, host=host)

    def join(self) -> None:
        """Waits until the cluster has ended, which is when its leader ends.

        Raises:
            UnavailableError: Ray has failed here while the leader goes on, or this is the leader.
        """
        node = self._node
        if node is None:
            return
        node.wait()
        if self._task == leader_of(self._spec):
            raise UnavailableError(
                explain(
                    f"Ray has ended on this machine, the leader at {self._address}.",
                    expected="a head that runs until this server is closed.",
                    fix="look at the logs in /tmp/ray, and whether the machine has the memory.",
                )
            )

    def close(self) -> None:
        """Ends this server, and the cluster if it is the leader."""
        node, self._node = self._node, None
        if node is not None:
            node.close()

    @staticmethod
    def create_local_server(config: None = None, start: bool = True) -> Server:
        """Returns a server of a cluster of its own, at free ports of this machine.

        Args:
            config: None.
            start: whether it starts at once.
        """
        make_token()
        port, jobs_port = free_ports(2)
        cluster = {"worker": [f"127.0.0.1:{port}"]}
        return Server(cluster, config=config, start=start, jobs_port=jobs_port)

    @property
    def _task(self) -> tuple[str, int]:
        return self.server_def.job_name, self.server_def.task_index

    @property
    def _spec(self) -> ClusterSpec:
        return ClusterSpec(self.server_def.cluster)

    @property
    def _address(self) -> str:
        return self._spec.task_address(self.server_def.job_name, self.server_def.task_index)


def run_standard_server(session_config: None = None, *, jobs_port: int | None = None) -> Server:
    """Starts the server of the task that `TF_CONFIG` names; `join()` waits for its end.

    Args:
        session_config: None, for old programs.
        jobs_port: of the leader, where it takes jobs; None for `STRATAGEM_JOBS_PORT`.

    Returns:
        The server.

    Raises:
        ValueError: `TF_CONFIG` has no cluster, or no task of it.

    Source: TF 1.15 distribute_coordinator.py, run_standard_tensorflow_server.
    """
    resolver = TFConfigClusterResolver()
    spec = resolver.cluster_spec()
    if not spec or not resolver.task_type or resolver.task_id is None:
        raise ValueError(
            explain(
                f"TF_CONFIG has the cluster {spec!r} and the task "
                f"{(resolver.task_type, resolver.task_id)}.",
                expected="a cluster, and type and index of this task in it.",
                fix='set TF_CONFIG=\'{"cluster": {"chief": ["host0:2222"], ...}, "task": '
                '{"type": "chief", "index": 0}}\'.',
            )
        )
    return Server(
        spec, resolver.task_type, resolver.task_id, config=session_config, jobs_port=jobs_port
    )


def _server_def(
    given: object, job_name: str | None, task_index: int | None, protocol: str | None
) -> ServerDef:
    if isinstance(given, ServerDef):
        cluster: Any = given.cluster
        job_name = given.job_name if job_name is None else job_name
        task_index = given.task_index if task_index is None else task_index
        protocol = protocol or given.protocol
    else:
        cluster = given
    if protocol not in (None, "grpc"):
        raise ValueError(
            explain(
                f"Server received protocol={protocol!r}.",
                expected='"grpc", which is what Ray uses.',
                fix="leave protocol out.",
            )
        )
    if not isinstance(cluster, Mapping | ClusterDef | ClusterSpec):
        raise TypeError(
            explain(
                f"server_or_cluster_def={cluster!r} is of type {type(cluster).__name__}.",
                expected="a ClusterSpec, a dict, a ClusterDef or a ServerDef.",
                fix='pass {"chief": ["host0:2222"], "worker": ["host1:2222"]}, for example.',
            )
        )
    spec = ClusterSpec(cluster)
    leader_of(spec)
    job_name = str(_only("job_name", job_name, sorted({job for job, _ in tasks_of(spec)})))
    if task_index is None and job_name in spec.jobs:
        task_index = _only("task_index", task_index, spec.task_indices(job_name))
    index = check_task(spec, job_name, task_index)
    return ServerDef(spec.as_cluster_def(), job_name, int(index or 0), protocol or "grpc")


def _only(name: str, given: Any, known: list[Any]) -> Any:
    """What is given, or the only one that there is."""
    if given is not None or len(known) == 1:
        return known[0] if given is None else given
    raise ValueError(
        explain(
            f"{name} was not given, and it may be each of {known}.",
            expected=f"{name}, where there are several.",
            fix=f"pass {name}={known[0]!r}, for example.",
        )
    )


def _require_free(address: str) -> None:
    """Raises where somebody listens at an address of this machine."""
    host, port = split_address(address)
    with contextlib.closing(socket.socket()) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return  # no address of this machine: Ray says so
            raise RuntimeError(
                explain(
                    f"The port of {address} is taken on this machine.",
                    expected="a port that nobody listens at.",
                    fix="end the other server, or choose another port in TF_CONFIG, or for jobs "
                    "by STRATAGEM_JOBS_PORT.",
                )
            ) from error
