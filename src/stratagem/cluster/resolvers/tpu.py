"""Resolver for the hosts of a Cloud TPU."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from stratagem import environment
from stratagem.cluster.accelerators import TPUSystemMetadata, metadata_of
from stratagem.cluster.addresses import join_address, split_address, with_port
from stratagem.cluster.launchers import number_of
from stratagem.cluster.processes import Processes, processes_of_task
from stratagem.cluster.resolvers.gce import build_service, metadata
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.cluster.spec import ClusterSpec, parse_task_index
from stratagem.errors import NotFoundError, explain, invalid

_PORT = 8470
# JAX's default between TPU hosts.
_COORDINATOR_PORT = "8482"
_LOCAL = "local"
# Generations named by number of cores; two cores are one JAX device.
_TWO_CORES_A_DEVICE = re.compile(r"v(4|5p)-")


class TPUClusterResolver(ClusterResolver):
    """Finds the hosts of a TPU by its name, by their addresses, or on the hosts themselves.

    JAX runs one process on each TPU host. On a host, without arguments, the hosts and the index of
    this one come from `TPU_WORKER_HOSTNAMES` (or `TPU_PROCESS_ADDRESSES`) and `TPU_WORKER_ID`.

    Args:
        tpu: name of the TPU; or addresses of its hosts, as `grpc://host:port,...`; or "local" for a
            TPU in this machine only. None looks at `KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS`, `TPU_NAME`,
            `TPU_CONFIG` and the variables of this host.
        zone: zone of the TPU; None for this machine's.
        project: project of the TPU; None for this machine's.
        job_name: task type of the hosts.
        coordinator_name: job of the coordinator; None adds no such job.
        coordinator_address: address of the coordinator.
        credentials: credentials from `google.auth`, or "default" for the environment's.
        service: client of the TPU API, which needs no credentials then.
        discovery_url: description of the API; `TPU_API_DISCOVERY_URL` takes precedence.

    Raises:
        NotFoundError: no TPU is specified.
        RuntimeError: outside Google Cloud, without project or zone.
        ValueError: a coordinator without an address.

    Example:
        >>> resolver = sg.cluster_resolver.TPUClusterResolver("grpc://10.0.0.1,grpc://10.0.0.2")
        >>> resolver.cluster_spec()
        ClusterSpec({'worker': ['10.0.0.1:8470', '10.0.0.2:8470']})

    Source: TF 2.21 tpu_cluster_resolver.py, TPUClusterResolver.
    """

    def __init__(
        self,
        tpu: str | None = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
        coordinator_name: str | None = None,
        coordinator_address: str | None = None,
        credentials: object = "default",
        service: Any = None,
        discovery_url: str | None = None,
    ) -> None:
        if coordinator_name and not coordinator_address:
            raise invalid(
                f"coordinator_name={coordinator_name!r} was passed without an address.",
                expected="coordinator_address with it; no server is started here.",
                fix="pass coordinator_address='host:port', or omit coordinator_name.",
            )
        config = _tpu_config()
        self._tpu = tpu or _name_in_environment() or config.get("tpu_node_name")
        self._hosts = _hosts_of_slice() if not self._tpu else []
        if not self._tpu and not self._hosts:
            raise NotFoundError(
                explain(
                    "No TPU is specified, and this machine is not a TPU host.",
                    expected="a TPU's name or address, TPU_NAME, or TPU_WORKER_HOSTNAMES.",
                    fix='pass tpu="my-tpu", or tpu="local" for a TPU in this machine.',
                    code="SG106",
                )
            )
        self._zone = zone or config.get("zone")
        self._project = project or config.get("project")
        self._task_type = job_name
        worker_id = number_of("TPU_WORKER_ID")
        if self._hosts:
            worker_id = _slice_start(self._hosts) + (worker_id or 0)
        self._task_id = worker_id
        self._rpc_layer = "grpc"
        self._coordinator = {coordinator_name: [coordinator_address]} if coordinator_name else {}
        self._credentials = credentials
        self._service = service
        self._discovery_url = environment.lookup("TPU_API_DISCOVERY_URL") or discovery_url

    @staticmethod
    def connect(
        tpu: str | None = None, zone: str | None = None, project: str | None = None
    ) -> TPUClusterResolver:
        """Returns a resolver for a TPU after checking that it exists and is healthy.

        JAX itself starts the TPU at its first use.

        Args:
            tpu: name or address of the TPU.
            zone: zone of the TPU.
            project: project of the TPU.

        Returns:
            The resolver.

        Raises:
            ImportError: Google's libraries are not installed.
            NotFoundError: the TPU does not exist.
            RuntimeError: the TPU is not healthy.
        """
        resolver = TPUClusterResolver(tpu, zone, project)
        resolver.cluster_spec()
        return resolver

    def cluster_spec(self) -> ClusterSpec:
        """Returns the TPU's hosts; a named TPU is looked up on each call.

        Returns:
            The cluster; empty for "local". With several slices, only this slice's hosts and the
            coordinator are known.

        Raises:
            ImportError: Google's libraries are not installed.
            NotFoundError: the TPU does not exist.
            RuntimeError: the TPU is not ready or not healthy.
        """
        job = self.task_type or "worker"
        if self._tpu == _LOCAL:
            return ClusterSpec({})
        if self._tpu:
            hosts = self._endpoints(self._tpu)
            return ClusterSpec({job: hosts, **self._coordinator})
        start = _slice_start(self._hosts)
        tasks = {start + index: host for index, host in enumerate(self._hosts)}
        if start and (coordinator := self._coordinator_of_slices()):
            tasks[0] = coordinator
        return ClusterSpec({job: tasks, **self._coordinator})

    def processes(self) -> Processes:
        """Returns the processes of all hosts; on a TPU host, of all slices.

        Returns:
            The arguments of `jax.distributed.initialize`.

        Raises:
            ValueError: the variables contradict each other.
        """
        if self._tpu == _LOCAL or not self._hosts:
            spec = self.cluster_spec()
            job = self.task_type or "worker"
            task_id = self._task_id
            if task_id is None and spec and spec.num_tasks(job) > 1:
                # The same program runs on every host, so a default of 0 would be wrong.
                number = "instance/attributes/agent-worker-number"
                task_id = parse_task_index(metadata(number, instead="the resolver a task_id"))
            return processes_of_task(spec, job if spec else None, task_id or 0)
        host = self._coordinator_of_slices() or self._hosts[0]
        port = environment.lookup("JAX_COORDINATOR_PORT") or _COORDINATOR_PORT
        return Processes(
            num_processes=len(self._hosts) * (number_of("MEGASCALE_NUM_SLICES") or 1),
            process_id=self.task_id,
            coordinator_address=join_address(split_address(host)[0], port),
            local_process_id=0,
            num_local_processes=1,
        )

    @property
    def task_id(self) -> int:
        """Index of this process's task; 0 if only the TPU's hosts have it."""
        return self._task_id or 0

    @task_id.setter
    def task_id(self, task_id: int | str | None) -> None:
        self._task_id = None if task_id is None else parse_task_index(task_id)

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a TPU host.

        Args:
            task_type: type of the task; None for this process's.
            task_id: index of the task; None for this process's.
            rpc_layer: prefix of the address; None for "grpc".

        Returns:
            The address; "" for "local".

        Raises:
            ValueError: the task is not in the cluster.
        """
        if self._tpu == _LOCAL:
            return ""
        return super().master(task_type, task_id, rpc_layer)

    def get_master(self) -> str:
        """Returns the address of the first host.

        Returns:
            Result of `master()`.
        """
        return self.master()

    def get_job_name(self) -> str | None:
        """Returns the task type of the hosts.

        Returns:
            `job_name`.
        """
        return self.task_type

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Returns the number of JAX devices per host.

        Args:
            task_type: ignored; all hosts are equal.
            task_id: ignored.
            config_proto: ignored.

        Returns:
            A dict such as `{"TPU": 4}`, from the TPU's type or `TPU_CHIPS_PER_HOST_BOUNDS`; 0 if
            both are unknown.
        """
        del task_type, task_id, config_proto
        if self._tpu and self._tpu != _LOCAL and not _is_address(self._tpu):
            node = self._node(self._tpu)
            kind = str(node.get("acceleratorType", ""))
            total = int(kind.rpartition("-")[2]) if kind.rpartition("-")[2].isdecimal() else 0
            cores_per_device = 2 if _TWO_CORES_A_DEVICE.match(kind) else 1
            return {"TPU": total // cores_per_device // len(_addresses(node))}
        bounds = environment.lookup("TPU_CHIPS_PER_HOST_BOUNDS")
        if bounds is None:
            return {"TPU": 0}
        return {"TPU": math.prod(parse_task_index(side) for side in bounds.split(","))}

    def get_tpu_system_metadata(self) -> TPUSystemMetadata:
        """Returns the number of hosts and devices of the TPU, without starting JAX.

        Returns:
            Numbers of all slices together; devices are 0 if `num_accelerators` is.

        Raises:
            NotFoundError: the TPU does not exist; `cluster_spec` may raise other errors.

        Source: TF 2.21 tpu_cluster_resolver.py, get_tpu_system_metadata.
        """
        job = self.task_type or "worker"
        if self._hosts:
            num_hosts = len(self._hosts) * (number_of("MEGASCALE_NUM_SLICES") or 1)
        else:
            spec = self.cluster_spec()
            num_hosts = spec.num_tasks(job) if job in spec.jobs else 1
        return metadata_of(job, num_hosts, self.num_accelerators()["TPU"])

    def _coordinator_of_slices(self) -> str | None:
        address = environment.lookup("MEGASCALE_COORDINATOR_ADDRESS")
        return None if address is None else with_port(address, _PORT)

    def _endpoints(self, tpu: str) -> list[str]:
        if _is_address(tpu):
            return [with_port(address, _PORT) for address in tpu.split(",")]
        node = self._node(tpu)
        state, health = node.get("state"), node.get("health")
        # Without a health check, the API returns no health.
        if state != "READY" or health not in (None, "", "HEALTHY", "HEALTH_UNSPECIFIED"):
            raise RuntimeError(
                explain(
                    f"TPU {tpu!r} is not ready or not healthy; state: {state!r}, health: "
                    f"{health!r}.",
                    expected="state READY and health HEALTHY.",
                    fix="check it with `gcloud compute tpus describe`; wait, or recreate it.",
                )
            )
        return _addresses(node)

    def _node(self, tpu: str) -> dict[str, Any]:
        project = self._project or metadata("project/project-id", instead="project=")
        zone = self._zone or metadata("instance/zone", instead="zone=").rpartition("/")[2]
        service = self._service or build_service(
            "tpu",
            self._credentials,
            needed_by="TPUClusterResolver",
            discovery_url=self._discovery_url,
        )
        name = f"projects/{project}/locations/{zone}/nodes/{tpu}"
        try:
            return service.projects().locations().nodes().get(name=name).execute()
        except Exception as error:
            # The library's HttpError has the response; its class may not be importable here.
            status = getattr(getattr(error, "resp", None), "status", None)
            if str(status) != "404":
                raise
            raise NotFoundError(
                explain(
                    f"There is no TPU {name}: {error}",
                    expected="the name of a TPU in this project and zone.",
                    fix="correct tpu, project and zone; `gcloud compute tpus list` shows them.",
                )
            ) from error


def _is_address(tpu: str) -> bool:
    return tpu.startswith("grpc://") or bool(re.search(r":\d+$", tpu.split(",")[0]))


def _addresses(node: dict[str, Any]) -> list[str]:
    # A TPU with one host has its address at the top level.
    endpoints = node.get("networkEndpoints") or [node]
    return [join_address(end["ipAddress"], end.get("port") or _PORT) for end in endpoints]


def _name_in_environment() -> str | None:
    return environment.lookup("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS") or environment.lookup("TPU_NAME")


def _tpu_config() -> dict[str, Any]:
    text = environment.lookup("TPU_CONFIG")
    try:
        config = json.loads(text or "{}")
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise invalid(
            f"TPU_CONFIG={text!r} is not a JSON object.",
            expected='{"tpu_node_name": "my-tpu", "zone": "...", "project": "..."}.',
            fix="correct or unset TPU_CONFIG.",
        )
    return config


def _hosts_of_slice() -> list[str]:
    listed = environment.lookup("TPU_PROCESS_ADDRESSES") or environment.lookup(
        "TPU_WORKER_HOSTNAMES"
    )
    return [] if listed is None else [with_port(host, _PORT) for host in listed.split(",")]


def _slice_start(hosts: list[str]) -> int:
    """Returns the index of this slice's first host among the hosts of all slices."""
    return (number_of("MEGASCALE_SLICE_ID") or 0) * len(hosts)
