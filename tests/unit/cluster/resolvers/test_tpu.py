"""Cloud TPUs: by address, by name, and on their own hosts."""

from __future__ import annotations

import pytest

from stratagem.cluster.processes import Processes
from stratagem.cluster.resolvers.tpu import TPUClusterResolver
from stratagem.errors import NotFoundError

_NAME = "projects/my-project/locations/us-central2-b/nodes/my-tpu"
_NODE = {
    "state": "READY",
    "health": "HEALTHY",
    "acceleratorType": "v3-16",
    "networkEndpoints": [
        {"ipAddress": "10.0.0.1", "port": 8470},
        {"ipAddress": "10.0.0.2", "port": 8470},
    ],
}


class _HttpError(Exception):
    """Like googleapiclient's, with the status in `resp`."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HttpError {status}")
        self.status = status
        self.resp = self


class _Service:
    """A fake of the TPU API, with one TPU or an error."""

    def __init__(self, node: dict | None = None, *, status: int = 404) -> None:
        self.node = node
        self.status = status
        self.asked = ""

    def projects(self) -> _Service:
        return self

    def locations(self) -> _Service:
        return self

    def nodes(self) -> _Service:
        return self

    def get(self, *, name: str) -> _Service:
        self.asked = name
        return self

    def execute(self) -> dict:
        if self.node is None:
            raise _HttpError(self.status)
        return self.node


def _named(node: dict | None = None, **arguments) -> TPUClusterResolver:
    service = arguments.pop("service", None) or _Service(node)
    return TPUClusterResolver("my-tpu", "us-central2-b", "my-project", service=service, **arguments)


@pytest.mark.parametrize(
    ("tpu", "hosts"),
    [
        # TF 2.21 TPUClusterResolver with addresses: the port is 8470 where none is given.
        ("grpc://10.2.3.4:8470", ["10.2.3.4:8470"]),
        ("grpc://10.2.3.4", ["10.2.3.4:8470"]),
        ("grpc://10.0.0.1:1,grpc://10.0.0.2:2", ["10.0.0.1:1", "10.0.0.2:2"]),
        ("10.0.0.1:1,10.0.0.2", ["10.0.0.1:1", "10.0.0.2:8470"]),
        ("grpc://fd00::1", ["[fd00::1]:8470"]),
    ],
)
def test_tpu_is_found_by_its_addresses(variables, tpu, hosts) -> None:
    for resolver in (TPUClusterResolver(tpu), TPUClusterResolver.connect(tpu)):
        assert resolver.cluster_spec() == {"worker": hosts}
    variables(KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS=tpu)
    resolver = TPUClusterResolver()
    assert resolver.cluster_spec() == {"worker": hosts}
    assert resolver.master() == resolver.get_master() == f"grpc://{hosts[0]}"
    assert resolver.num_accelerators() == {"TPU": 0}


def test_tpu_is_asked_for_by_its_name() -> None:
    service = _Service(_NODE)
    resolver = _named(service=service, job_name="tpu_worker")
    assert resolver.cluster_spec() == {"tpu_worker": ["10.0.0.1:8470", "10.0.0.2:8470"]}
    assert service.asked == _NAME
    assert (resolver.task_type, resolver.task_id) == ("tpu_worker", 0)
    assert resolver.get_job_name() == "tpu_worker"
    assert resolver.master() == "grpc://10.0.0.1:8470"
    assert resolver.master("tpu_worker", 1, "http") == "http://10.0.0.2:8470"


def test_coordinator_is_a_job_of_its_own() -> None:
    resolver = _named(_NODE, coordinator_name="coordinator", coordinator_address="10.9.9.9:1")
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["10.0.0.1:8470", "10.0.0.2:8470"],
        "coordinator": ["10.9.9.9:1"],
    }
    with pytest.raises(ValueError, match="coordinator_name='c' was passed without an address"):
        _named(_NODE, coordinator_name="c")


@pytest.mark.parametrize(
    ("kind", "endpoints", "number"),
    [
        ("v3-16", 2, 8),
        ("v2-8", 1, 8),
        ("v4-16", 2, 4),
        ("v5p-8", 1, 4),
        ("v5litepod-16", 2, 8),
        ("v6e-8", 1, 8),
        ("", 1, 0),
    ],
)
def test_devices_of_a_host_follow_from_the_type(kind, endpoints, number) -> None:
    node = {"acceleratorType": kind, "networkEndpoints": [{"ipAddress": "10.0.0.1"}] * endpoints}
    assert _named(node).num_accelerators() == {"TPU": number}


@pytest.mark.usefixtures("metadata_server")
def test_project_and_zone_are_those_of_the_machine() -> None:
    service = _Service(_NODE)
    TPUClusterResolver("my-tpu", service=service).cluster_spec()
    assert service.asked == _NAME


def test_name_is_found_in_the_environment(variables) -> None:
    variables(TPU_CONFIG='{"tpu_node_name": "other", "zone": "z", "project": "p"}')
    service = _Service({"state": "READY", "ipAddress": "10.0.0.1", "port": 1})
    assert TPUClusterResolver(service=service).cluster_spec() == {"worker": ["10.0.0.1:1"]}
    assert service.asked == "projects/p/locations/z/nodes/other"
    variables(TPU_NAME="my-tpu")
    TPUClusterResolver(service=service).cluster_spec()
    assert service.asked == "projects/p/locations/z/nodes/my-tpu"


@pytest.mark.parametrize(
    "node",
    [{**_NODE, "state": "CREATING"}, {**_NODE, "health": "UNHEALTHY_TENSORFLOW"}, {}],
)
def test_tpu_that_is_not_healthy_is_refused(node) -> None:
    with pytest.raises(RuntimeError, match="TPU 'my-tpu' is not ready or not healthy; state: "):
        _named(node).cluster_spec()


def test_tpu_that_does_not_exist_is_not_found() -> None:
    with pytest.raises(NotFoundError, match=f"There is no TPU {_NAME}"):
        _named().cluster_spec()
    with pytest.raises(_HttpError, match="403"):
        _named(service=_Service(status=403)).cluster_spec()


def test_without_a_name_there_is_no_tpu() -> None:
    with pytest.raises(
        NotFoundError, match="No TPU is specified, and this machine is not a TPU host"
    ):
        TPUClusterResolver()
    with pytest.raises(NotFoundError, match="No TPU is specified"):
        TPUClusterResolver.connect()


@pytest.mark.parametrize("text", ["{", "[]"])
def test_configuration_of_another_form_is_refused(variables, text) -> None:
    variables(TPU_CONFIG=text)
    with pytest.raises(ValueError, match=r"is not a JSON object(?s:.)*tpu_node_name"):
        TPUClusterResolver()


def test_tpu_in_this_machine_needs_no_cluster(variables) -> None:
    resolver = TPUClusterResolver("local")
    assert not resolver.cluster_spec()
    assert resolver.master() == ""
    assert resolver.processes() == Processes(1, 0)
    variables(TPU_CHIPS_PER_HOST_BOUNDS="2,2,1")
    assert resolver.num_accelerators() == {"TPU": 4}


def test_host_of_a_tpu_knows_the_others(variables) -> None:
    variables(TPU_WORKER_HOSTNAMES="t0,t1,t2", TPU_WORKER_ID="2")
    resolver = TPUClusterResolver()
    assert resolver.cluster_spec() == {"worker": ["t0:8470", "t1:8470", "t2:8470"]}
    assert (resolver.task_type, resolver.task_id) == ("worker", 2)
    # The coordinator's port is that of JAX's clusters/cloud_tpu_cluster.py.
    assert resolver.processes() == Processes(3, 2, "t0:8482", 0, 1)
    variables(JAX_COORDINATOR_PORT="99", TPU_PROCESS_ADDRESSES="p0:1,p1:1,p2:1")
    assert TPUClusterResolver().processes() == Processes(3, 2, "p0:99", 0, 1)
    variables(TPU_WORKER_ID="first")
    with pytest.raises(ValueError, match="Environment variable TPU_WORKER_ID: Task index 'first'"):
        TPUClusterResolver()


def test_slices_know_their_own_hosts_and_the_coordinator(variables) -> None:
    variables(
        TPU_WORKER_HOSTNAMES="t0,t1",
        TPU_WORKER_ID="1",
        MEGASCALE_NUM_SLICES="3",
        MEGASCALE_SLICE_ID="2",
        MEGASCALE_COORDINATOR_ADDRESS="s0",
    )
    resolver = TPUClusterResolver()
    assert resolver.cluster_spec() == {"worker": {0: "s0:8470", 4: "t0:8470", 5: "t1:8470"}}
    assert resolver.processes() == Processes(6, 5, "s0:8482", 0, 1)


@pytest.mark.usefixtures("metadata_server")
def test_host_of_a_named_tpu_asks_which_it_is(variables) -> None:
    assert _named(_NODE).processes() == Processes(2, 1, "10.0.0.1:8470")
    told = _named(_NODE)
    told.task_id = "0"
    assert told.processes() == Processes(2, 0, "10.0.0.1:8470")
    variables(TPU_WORKER_ID="0")
    assert _named(_NODE).processes() == Processes(2, 0, "10.0.0.1:8470")


def test_machine_that_is_no_host_of_a_named_tpu_does_not_guess(variables) -> None:
    variables(GCE_METADATA_HOST="127.0.0.1:1")
    with pytest.raises(
        RuntimeError, match="did not return 'instance/attributes/agent-worker-number"
    ):
        _named(_NODE).processes()


def test_hosts_and_devices_are_counted_without_jax(variables) -> None:
    told = _named(_NODE, job_name="tpu_worker").get_tpu_system_metadata()
    assert (told.num_hosts, told.num_of_cores_per_host, told.num_cores) == (2, 8, 16)
    assert told.topology is None
    assert told.devices[9] == "/job:tpu_worker/replica:0/task:1/device:TPU:1"
    assert TPUClusterResolver("local").get_tpu_system_metadata().num_hosts == 1
    variables(
        TPU_WORKER_HOSTNAMES="t0,t1", TPU_CHIPS_PER_HOST_BOUNDS="2,2,1", MEGASCALE_NUM_SLICES="3"
    )
    told = TPUClusterResolver().get_tpu_system_metadata()
    assert (told.num_hosts, told.num_cores, len(told.devices)) == (6, 24, 24)
