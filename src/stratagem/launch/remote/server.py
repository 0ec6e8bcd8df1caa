"""`Server`: the Ray node of this task, which runs programs that clients send."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from stratagem import settings
from stratagem.cluster.addresses import free_ports, is_in_use, split_address
from stratagem.cluster.detection import detect_with_servers
from stratagem.cluster.roles import check_task
from stratagem.cluster.spec import EXAMPLE, ClusterDef, ClusterSpec
from stratagem.errors import UnavailableError, check_type, explain, invalid
from stratagem.launch.remote.ray_cluster import make_token
from stratagem.launch.remote.ray_nodes import (
    RayNode,
    join_as_node,
    leader_of,
    start_head,
    tasks_of,
)
from stratagem.resources import Closing


@dataclasses.dataclass(frozen=True)
class ServerDef:
    """Definition of a server, in the form of TensorFlow's protocol buffer.

    Args:
        cluster: all tasks of the cluster.
        job_name: job of this task.
        task_index: index of this task in its job.
        protocol: "grpc".

    Example:
        >>> cluster = sg.ClusterSpec({"chief": ["a:2222"], "worker": ["b:2222"]}).as_cluster_def()
        >>> definition = sg.remote.ServerDef(cluster, job_name="worker", task_index=0)
        >>> sg.Server(definition, start=False).target
        'grpc://b:2222'

    Source: TF 2.21 core/protobuf/tensorflow_server.proto, ServerDef.
    """

    cluster: ClusterDef
    job_name: str
    task_index: int
    protocol: str = "grpc"


class Server(Closing):
    """Server of this task: joins its machine to the cluster and runs what clients send.

    The leader (the chief, or the first worker without a chief) starts Ray at its address and
    accepts jobs at another port. The others join it. The code of a model is not needed here.

    Args:
        server_or_cluster_def: the cluster, as a `ClusterSpec`, a dict, a `ClusterDef` or a
            `ServerDef`.
        job_name: job of this task; may be omitted if there is one job.
        task_index: index of this task; may be omitted if the job has one task.
        protocol: None or "grpc", for compatibility.
        config: None, for compatibility.
        start: True to start at once.
        jobs_port: port at which the leader accepts jobs; None for `STRATAGEM_JOBS_PORT`.

    Raises:
        TypeError: the cluster has the wrong type.
        ValueError: the task is not in the cluster, or is ambiguous.
        RuntimeError: the leader's port is in use, or there is no token.
        UnavailableError: Ray does not start, or the leader refuses this machine.
        DeadlineExceededError: the leader does not start within `STRATAGEM_JOIN_TIMEOUT_S`.

    Example:
        >>> cluster = {"chief": ["a:2222"], "worker": ["b:2222"]}
        >>> server = sg.Server(cluster, job_name="worker", task_index=0, start=False)
        >>> server.target  # server.start() joins the cluster, server.join() waits for its end
        'grpc://b:2222'

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
            raise invalid(
                f"Server received config={config!r}.",
                expected="None: JAX has no sessions to configure.",
                fix="omit config.",
            )
        self.server_def = _server_def(server_or_cluster_def, job_name, task_index, protocol)
        self._jobs_port = jobs_port
        self._node: RayNode | None = None
        if start:
            self.start()

    @property
    def target(self) -> str:
        """Address of this server, such as "grpc://host0:2222"."""
        return f"{self.server_def.protocol}://{self._address}"

    def start(self) -> None:
        """Starts this server, unless it is already running."""
        if self._node is not None:
            return
        task, leader = self._task, leader_of(self._spec)
        if task == leader:
            jobs_port = self._jobs_port
            if jobs_port is None:
                jobs_port = int(settings.read("jobs_port"))
            _require_free(self._address)
            _require_free(f"0.0.0.0:{jobs_port}")
            self._node = start_head(
                self._address, task_type=task[0], task_index=task[1], jobs_port=jobs_port
            )
        else:
            host, _ = split_address(self._address)
            self._node = join_as_node(self._spec.task_address(*leader), *task, host=host)

    def join(self) -> None:
        """Waits until the leader ends, and with it the cluster.

        Raises:
            UnavailableError: Ray failed here while the leader runs, or this is the leader.
        """
        node = self._node
        if node is None:
            return
        node.wait()
        if self._task == leader_of(self._spec):
            raise UnavailableError(
                explain(
                    f"Ray ended on this machine, the leader at {self._address}.",
                    expected="a head that runs until this server is closed.",
                    fix="check the logs in /tmp/ray, and that the machine has enough memory.",
                )
            )

    def close(self) -> None:
        """Stops this server, and the whole cluster if it is the leader."""
        node, self._node = self._node, None
        if node is not None:
            node.close()

    @staticmethod
    def create_local_server(config: None = None, start: bool = True) -> Server:
        """Returns a server of a new cluster with one task, at free ports of this machine.

        Args:
            config: None, for compatibility.
            start: True to start at once.
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
    """Starts the server of the task in `TF_CONFIG`, or of a Slurm step; `join()` waits for its end.

    Args:
        session_config: None, for compatibility.
        jobs_port: port at which the leader accepts jobs; None for `STRATAGEM_JOBS_PORT`.

    Returns:
        The server, started.

    Raises:
        ValueError: `TF_CONFIG` has no cluster, or no task of the cluster.

    Example:
        >>> try:
        ...     sg.run_standard_server().join()  # in each task that TF_CONFIG describes
        ... except ValueError as error:
        ...     print(str(error).splitlines()[0])
        TF_CONFIG has the cluster ClusterSpec({}) and the task (None, None).

    Source: TF 1.15 distribute_coordinator.py, run_standard_tensorflow_server.
    """
    resolver = detect_with_servers()
    spec = resolver.cluster_spec()
    if not spec or not resolver.task_type or resolver.task_id is None:
        raise invalid(
            f"TF_CONFIG has the cluster {spec!r} and the task "
            f"{(resolver.task_type, resolver.task_id)}.",
            expected="a cluster, and the type and index of a task in it.",
            fix='set TF_CONFIG=\'{"cluster": {"chief": ["host0:2222"], ...}, "task": '
            '{"type": "chief", "index": 0}}\'.',
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
        raise invalid(
            f"Server received protocol={protocol!r}.",
            expected='"grpc", which Ray uses.',
            fix="omit protocol.",
        )
    check_type(
        "server_or_cluster_def",
        cluster,
        Mapping | ClusterDef | ClusterSpec,
        "a ClusterSpec, a dict, a ClusterDef or a ServerDef",
        f"pass {EXAMPLE}, for example.",
    )
    spec = ClusterSpec(cluster)
    leader_of(spec)
    job_name = str(_only("job_name", job_name, sorted({job for job, _ in tasks_of(spec)})))
    if task_index is None and job_name in spec.jobs:
        task_index = _only("task_index", task_index, spec.task_indices(job_name))
    index = check_task(spec, job_name, task_index)
    return ServerDef(spec.as_cluster_def(), job_name, int(index or 0), protocol or "grpc")


def _only(name: str, given: object, known: list[Any]) -> Any:
    """Returns the given value, or the only known one."""
    if given is not None or len(known) == 1:
        return known[0] if given is None else given
    raise invalid(
        f"{name} was not given, but there are several: {known}.",
        expected=f"a value for {name}.",
        fix=f"pass {name}={known[0]!r}, for example.",
    )


def _require_free(address: str) -> None:
    """Raises if an address of this machine is in use."""
    if is_in_use(address):
        raise RuntimeError(
            explain(
                f"The port of {address} is in use on this machine.",
                expected="a free port.",
                fix="stop the other server, or choose another port in TF_CONFIG, or in "
                "STRATAGEM_JOBS_PORT for jobs.",
                code="SG509",
            )
        )
