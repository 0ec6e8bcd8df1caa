"""The hosts of a Cloud TPU."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from stratagem import environment
from stratagem.cluster.addresses import join_address, split_address, without_scheme
from stratagem.cluster.google_cloud import build_service, metadata
from stratagem.cluster.processes import Processes, processes_of_task
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.cluster.spec import ClusterSpec, parse_task_index
from stratagem.cluster.tpu_metadata import TPUSystemMetadata, metadata_of
from stratagem.errors import NotFoundError
from stratagem.messages import explain

__all__ = ["TPUClusterResolver"]

_PORT = 8470
# What JAX's own start-up takes between TPU hosts, where nobody has chosen a port.
_COORDINATOR_PORT = "8482"
_LOCAL = "local"
# Generations whose names count cores, two of which are one JAX device.
_TWO_CORES_A_DEVICE = re.compile(r"v(4|5p)-")


class TPUClusterResolver(ClusterResolver):
    """Finds the hosts of a TPU by its name, by their addresses, or on the hosts themselves.

    JAX runs one process on each of a TPU's hosts. There, without arguments, the hosts and this
    one's number come from `TPU_WORKER_HOSTNAMES` (or `TPU_PROCESS_ADDRESSES`) and `TPU_WORKER_ID`.

    Args:
        tpu: the TPU's name; its hosts' addresses as `grpc://host:port,...`; "local" for a TPU in
            this machine alone. Without it `KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS`, `TPU_NAME`,
            `TPU_CONFIG` and this host's own variables are looked at.
        zone: the TPU's zone; this machine's without it.
        project: the TPU's project; this machine's without it.
        job_name: the task type of its hosts.
        coordinator_name: the job of the coordinator, which is not added without it.
        coordinator_address: the coordinator's address.
        credentials: what `google.auth` gives, or "default" for the environment's own.
        service: a client of the TPU API, which then needs no credentials.
        discovery_url: where the API is described; `TPU_API_DISCOVERY_URL` wins.

    Raises:
        NotFoundError: nothing names a TPU.
        RuntimeError: this is no machine of Google Cloud, and project or zone are not given.
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
        credentials: Any = "default",
        service: Any = None,
        discovery_url: str | None = None,
    ) -> None:
        if coordinator_name and not coordinator_address:
            raise ValueError(
                explain(
                    f"coordinator_name={coordinator_name!r} came without an address.",
                    expected="coordinator_address beside it: no server is started here.",
                    fix="pass coordinator_address='host:port', or leave coordinator_name out.",
                )
            )
        config = _tpu_config()
        self._tpu = tpu or _name_in_environment() or config.get("tpu_node_name")
        self._hosts = _hosts_of_slice() if not self._tpu else []
        if not self._tpu and not self._hosts:
            raise NotFoundError(
                explain(
                    "No TPU is named, and this machine is no TPU host.",
                    expected="a TPU's name or address, TPU_NAME, or TPU_WORKER_HOSTNAMES.",
                    fix='pass tpu="my-tpu", or tpu="local" for a TPU in this machine.',
                )
            )
        self._zone = zone or config.get("zone")
        self._project = project or config.get("project")
        self._task_type = job_name
        worker_id = _number("TPU_WORKER_ID")
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
        """Returns a resolver for a TPU that is there and healthy.

        Args:
            tpu: its name or address.
            zone: its zone.
            project: its project.

        Returns:
            The resolver, which has asked for the TPU's hosts once. JAX starts the TPU itself when
            it is first used.

        Raises:
            ImportError: Google's libraries are not installed.
            NotFoundError: no such TPU.
            RuntimeError: it is not healthy.
        """
        resolver = TPUClusterResolver(tpu, zone, project)
        resolver.cluster_spec()
        return resolver

    def cluster_spec(self) -> ClusterSpec:
        """Returns the TPU's hosts; a named TPU is asked for at each call.

        Returns:
            The cluster; an empty one for "local". With several slices, which do not know each
            other's hosts, it holds this slice's and the coordinator.

        Raises:
            ImportError: Google's libraries are not installed.
            NotFoundError: no such TPU.
            RuntimeError: the TPU is not ready, or not healthy.
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
        """Returns the hosts' processes; on a TPU host with those of the other slices.

        Returns:
            What `jax.distributed.initialize` has to be told.

        Raises:
            ValueError: the variables contradict each other.
        """
        if self._tpu == _LOCAL or not self._hosts:
            spec = self.cluster_spec()
            job = self.task_type or "worker"
            task_id = self._task_id
            if task_id is None and spec and spec.num_tasks(job) > 1:
                # The same program runs on every host: taking 0 for all would be wrong on most.
                number = "instance/attributes/agent-worker-number"
                task_id = parse_task_index(metadata(number, instead="the resolver a task_id"))
            return processes_of_task(spec, job if spec else None, task_id or 0)
        host = self._coordinator_of_slices() or self._hosts[0]
        port = environment.lookup("JAX_COORDINATOR_PORT") or _COORDINATOR_PORT
        return Processes(
            num_processes=len(self._hosts) * (_number("MEGASCALE_NUM_SLICES") or 1),
            process_id=self.task_id,
            coordinator_address=join_address(split_address(host)[0], port),
            local_process_id=0,
            num_local_processes=1,
        )

    @property
    def task_id(self) -> int:
        """The index of this process's task; 0 where only the TPU's hosts would know."""
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
            task_type: a task's type; without it this process's.
            task_id: its index; without it this process's.
            rpc_layer: the prefix of the address; "grpc" without it.

        Returns:
            The address; "" for "local".

        Raises:
            ValueError: no such task.
        """
        if self._tpu == _LOCAL:
            return ""
        return super().master(task_type, task_id, rpc_layer)

    def get_master(self) -> str:
        """Returns the address of the first host.

        Returns:
            `master()`.
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
        """Returns how many JAX devices a host of the TPU has.

        Args:
            task_type: not used: all hosts are alike.
            task_id: not used.
            config_proto: not used.

        Returns:
            `{"TPU": 4}`, for example, from the TPU's type or `TPU_CHIPS_PER_HOST_BOUNDS`; 0 where
            neither is known.
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
        """Returns how many hosts and devices the TPU has, without starting JAX.

        Returns:
            The numbers, of all slices together; devices are 0 where `num_accelerators` is.

        Raises:
            NotFoundError: no such TPU, and what else `cluster_spec` raises.

        Source: TF 2.21 tpu_cluster_resolver.py, get_tpu_system_metadata.
        """
        job = self.task_type or "worker"
        if self._hosts:
            num_hosts = len(self._hosts) * (_number("MEGASCALE_NUM_SLICES") or 1)
        else:
            spec = self.cluster_spec()
            num_hosts = spec.num_tasks(job) if job in spec.jobs else 1
        return metadata_of(job, num_hosts, self.num_accelerators()["TPU"])

    def _coordinator_of_slices(self) -> str | None:
        address = environment.lookup("MEGASCALE_COORDINATOR_ADDRESS")
        return None if address is None else _with_port(address)

    def _endpoints(self, tpu: str) -> list[str]:
        if _is_address(tpu):
            return [_with_port(address) for address in tpu.split(",")]
        node = self._node(tpu)
        state, health = node.get("state"), node.get("health")
        # Without a health check the API says nothing of health.
        if state != "READY" or health not in (None, "", "HEALTHY", "HEALTH_UNSPECIFIED"):
            raise RuntimeError(
                explain(
                    f"TPU {tpu!r} is not ready or not healthy; state: {state!r}, health: "
                    f"{health!r}.",
                    expected="state READY and health HEALTHY.",
                    fix="wait for it, or make it anew: `gcloud compute tpus describe`.",
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
            # The library's HttpError carries the answer; without the library it has no class here.
            status = getattr(getattr(error, "resp", None), "status", None)
            if str(status) != "404":
                raise
            raise NotFoundError(
                explain(
                    f"There is no TPU {name}: {error}",
                    expected="the name of a TPU in this project and zone.",
                    fix="correct tpu, project and zone: `gcloud compute tpus list`.",
                )
            ) from error


def _is_address(tpu: str) -> bool:
    return tpu.startswith("grpc://") or bool(re.search(r":\d+$", tpu.split(",")[0]))


def _with_port(address: str) -> str:
    address = without_scheme(address.strip())
    return address if re.search(r"[^:]:\d+$", address) else join_address(address, _PORT)


def _addresses(node: dict[str, Any]) -> list[str]:
    # A TPU of one host carries its address itself.
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
        raise ValueError(
            explain(
                f"TPU_CONFIG={text!r} is no JSON object.",
                expected='{"tpu_node_name": "my-tpu", "zone": "...", "project": "..."}.',
                fix="correct or unset the environment variable.",
            )
        )
    return config


def _hosts_of_slice() -> list[str]:
    listed = environment.lookup("TPU_PROCESS_ADDRESSES") or environment.lookup(
        "TPU_WORKER_HOSTNAMES"
    )
    return [] if listed is None else [_with_port(host) for host in listed.split(",")]


def _number(name: str) -> int | None:
    text = environment.lookup(name)
    try:
        return None if text is None else parse_task_index(text)
    except ValueError as error:
        raise ValueError(f"Environment variable {name}: {error}") from error


def _slice_start(hosts: list[str]) -> int:
    """The number of this slice's first host among those of all slices."""
    return (_number("MEGASCALE_SLICE_ID") or 0) * len(hosts)
