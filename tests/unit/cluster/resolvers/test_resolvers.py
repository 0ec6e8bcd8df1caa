"""Cloud TPUs: by address, by name, and on their own hosts."""

from __future__ import annotations

import json
import sys
import types
from typing import Any

import pytest

from stratagem.cluster.processes import Processes
from stratagem.cluster.resolvers.gce import GCEClusterResolver
from stratagem.cluster.resolvers.kubernetes import (
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
)
from stratagem.cluster.resolvers.tf_config import SageMakerClusterResolver, TFConfigClusterResolver
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
    """A fake of the TPU API, with one TPU or an error; each call gives this one again."""

    def __init__(self, node: dict | None = None, *, status: int = 404) -> None:
        self.node = node
        self.status = status
        self.asked = ""
        self.projects = self.locations = self.nodes = lambda: self

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


def test_host_of_a_tpu_knows_the_others(variables) -> None:
    local = TPUClusterResolver("local")  # which needs no cluster
    assert not local.cluster_spec()
    assert (local.master(), local.processes()) == ("", Processes(1, 0))
    variables(TPU_CHIPS_PER_HOST_BOUNDS="2,2,1")
    assert local.num_accelerators() == {"TPU": 4}
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


# `TF_CONFIG`, compared with TensorFlow's resolver.

_TWO_JOBS = {"ps": ["ps0:1", "ps1:1"], "worker": ["w0:1", "w1:1"]}
_WORKERS = {"worker": ["w0:1", "w1:1"]}
_WORKER_0 = {"type": "worker", "index": 0}

# TF 2.21 TFConfigClusterResolver: TF_CONFIG, arguments, then cluster_spec().as_dict(), task_type,
# task_id, rpc_layer, master().
RECORDED = [
    (
        {"cluster": _TWO_JOBS, "task": {"type": "ps", "index": 0}},
        {},
        (_TWO_JOBS, "ps", 0, None, "ps0:1"),
    ),
    (
        {"cluster": _TWO_JOBS, "task": {"type": "worker", "index": "1"}, "rpc_layer": "grpc"},
        {},
        (_TWO_JOBS, "worker", 1, "grpc", "grpc://w1:1"),
    ),
    (
        {"cluster": _WORKERS, "task": _WORKER_0, "rpc_layer": "grpc"},
        {"task_id": 1, "rpc_layer": "http"},
        (_WORKERS, "worker", 1, "http", "http://w1:1"),
    ),
    (
        {"cluster": {"worker": ["w0:1"]}, "task": _WORKER_0},
        {},
        ({"worker": ["w0:1"]}, "worker", 0, None, ""),
    ),
    (
        {"cluster": _WORKERS, "task": _WORKER_0, "session_master": "here:9", "rpc_layer": "grpc"},
        {},
        (_WORKERS, "worker", 0, "grpc", "here:9"),
    ),
    (
        {"cluster": {"worker": {"0": "a:1", "2": "b:1"}}, "task": {"type": "worker", "index": 2}},
        {},
        ({"worker": {0: "a:1", 2: "b:1"}}, "worker", 2, None, "b:1"),
    ),
    (None, {}, ({}, None, None, None, "")),
    ({}, {}, ({}, None, None, None, "")),
    ({"task": _WORKER_0}, {}, ({}, "worker", 0, None, "")),
]


@pytest.mark.parametrize(("config", "arguments", "expected"), RECORDED)
def test_variable_is_read_as_in_tensorflow(variables, config, arguments, expected) -> None:
    if config is not None:
        variables(TF_CONFIG=json.dumps(config))
    resolver = TFConfigClusterResolver(**arguments)
    assert (
        resolver.cluster_spec().as_dict(),
        resolver.task_type,
        resolver.task_id,
        resolver.rpc_layer,
        resolver.master(),
    ) == expected


def test_arguments_and_settings_win(variables) -> None:
    variables(TF_CONFIG=json.dumps({"cluster": _TWO_JOBS, "task": _WORKER_0, "rpc_layer": "grpc"}))
    resolver = TFConfigClusterResolver("ps", "1", "http", "test")
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("ps", 1, "http")
    assert resolver.environment == "test"
    assert TFConfigClusterResolver().environment is None
    assert resolver.master("worker", 1, "quic") == "quic://w1:1"
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", "0", None
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 0, "grpc")
    resolver.task_type = resolver.task_id = None
    # The variable is read again at each question.
    variables(TF_CONFIG=json.dumps({"cluster": _WORKERS, "task": {"type": "worker", "index": 1}}))
    assert TFConfigClusterResolver().processes() == Processes(2, 1, "w0:1")
    assert resolver.cluster_spec() == _WORKERS


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "TF_CONFIG is not JSON(?s:.)*write it with json.dumps"),
        ([1], r"TF_CONFIG is a list: '\[1\]'"),
        ({"cluster": {"worker": "a:1"}}, "TF_CONFIG, part 'cluster': The tasks of job 'worker'"),
        ({"cluster": ["a:1"]}, "TF_CONFIG, part 'cluster': cluster="),
        ({"task": {"index": 0}}, "TF_CONFIG, part 'task': {'index': 0} has no type"),
        ({"task": "worker"}, "TF_CONFIG, part 'task': 'worker' has no type"),
        ({"task": {**_WORKER_0, "index": "x"}}, "TF_CONFIG, part 'task': Task index 'x'"),
        ({"task": {**_WORKER_0, "index": None}}, "TF_CONFIG, part 'task': Task index None"),
        (
            {"cluster": _WORKERS, "task": {"type": "worker", "index": 2}},
            r"TF_CONFIG, part 'task': index 2 is outside the job 'worker'(?s:.)*one of \[0, 1\]",
        ),
        ({"cluster": _WORKERS}, "TF_CONFIG has a cluster of several tasks, but no complete task"),
    ],
)
def test_part_that_is_wrong_is_named(variables, given, message) -> None:
    variables(TF_CONFIG=given if isinstance(given, str) else json.dumps(given))
    with pytest.raises(ValueError, match=message):
        TFConfigClusterResolver().master()


@pytest.mark.parametrize("text", ["{", "[]"])
def test_configuration_of_a_tpu_of_another_form_is_refused(variables, text) -> None:
    variables(TPU_CONFIG=text)
    with pytest.raises(ValueError, match=r"is not a JSON object(?s:.)*tpu_node_name"):
        TPUClusterResolver()


# Pods from a fake Kubernetes client.


def _pod(name: str, address: str | None, phase: str = "Running") -> types.SimpleNamespace:
    return types.SimpleNamespace(
        metadata=types.SimpleNamespace(name=name),
        status=types.SimpleNamespace(phase=phase, pod_ip=address, host_ip="192.168.0.1"),
    )


class _Client:
    """A fake of CoreV1Api with `list_pod_for_all_namespaces`."""

    def __init__(self, **pods: list[types.SimpleNamespace]) -> None:
        self.pods = {f"job-name={job}": listed for job, listed in pods.items()}

    def list_pod_for_all_namespaces(self, *, label_selector: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(items=self.pods.get(label_selector, []))


def test_pods_are_sorted_by_name_selector_by_selector() -> None:
    client = _Client(
        a=[_pod("a-10", "10.0.0.3"), _pod("a-9", "10.0.0.2"), _pod("a-1", "10.0.0.1")],
        b=[_pod("b-0", "fd00::1")],
        ps=[_pod("ps-0", "10.0.0.9")],
    )
    resolver = KubernetesClusterResolver(
        {"worker": ["job-name=a", "job-name=b"], "ps": ["job-name=ps"]},
        tf_server_port=5000,
        override_client=client,
    )
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["10.0.0.1:5000", "10.0.0.2:5000", "10.0.0.3:5000", "[fd00::1]:5000"],
        "ps": ["10.0.0.9:5000"],
    }


def test_defaults_are_tensorflow_s() -> None:
    client = _Client(tensorflow=[_pod("t-0", "10.0.0.1"), _pod("t-1", "10.0.0.2")])
    resolver = KubernetesClusterResolver(override_client=client)
    assert resolver.cluster_spec() == {"worker": ["10.0.0.1:8470", "10.0.0.2:8470"]}
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, "grpc")
    assert resolver.master() == ""
    assert resolver.master("worker", 1) == "grpc://10.0.0.2:8470"
    resolver.task_type, resolver.task_id = "worker", 1
    assert resolver.master(rpc_layer="http") == "http://10.0.0.2:8470"
    assert resolver.processes() == Processes(2, 1, "10.0.0.1:8470")
    client.pods["job-name=tensorflow"].pop()
    assert resolver.cluster_spec() == {"worker": ["10.0.0.1:8470"]}


@pytest.mark.parametrize(
    ("pods", "message"),
    [
        (
            [_pod("t-0", "10.0.0.1"), _pod("t-1", "10.0.0.2", "Pending")],
            "Pod 't-1' is not running; phase: 'Pending'",
        ),
        ([_pod("t-1", None)], "Pod 't-1' is not running; phase: 'Running', address: None"),
        ([], "No pod has the labels 'job-name=tensorflow'"),
    ],
)
def test_pod_that_is_not_running_is_named(pods, message) -> None:
    with pytest.raises(RuntimeError, match=message):
        KubernetesClusterResolver(override_client=_Client(tensorflow=pods)).cluster_spec()


@pytest.mark.parametrize(
    ("location", "loaded"),
    [
        (KubernetesExecutableLocation.WITHIN_CLUSTER, "load_incluster_config"),
        (KubernetesExecutableLocation.OFF_CLUSTER, "load_kube_config"),
    ],
)
def test_client_is_made_where_the_process_runs(monkeypatch, location, loaded) -> None:
    calls: list[str] = []
    config = types.ModuleType("kubernetes.config")
    for name in ("load_incluster_config", "load_kube_config"):
        config.__dict__[name] = lambda name=name: calls.append(name)
    client = types.ModuleType("kubernetes.client")
    client.__dict__["CoreV1Api"] = lambda: _Client(tensorflow=[_pod("t-0", "10.0.0.1")])
    monkeypatch.setitem(sys.modules, "kubernetes", types.ModuleType("kubernetes"))
    monkeypatch.setitem(sys.modules, "kubernetes.config", config)
    monkeypatch.setitem(sys.modules, "kubernetes.client", client)
    resolver = KubernetesClusterResolver(executable_location=location)
    assert resolver.cluster_spec() == {"worker": ["10.0.0.1:8470"]}
    assert calls == [loaded]


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        *(
            (_named(node).cluster_spec, RuntimeError, "'my-tpu' is not ready or not healthy; state")
            for node in (
                {**_NODE, "state": "CREATING"},
                {**_NODE, "health": "UNHEALTHY_TENSORFLOW"},
                {},
            )
        ),
        (_named().cluster_spec, NotFoundError, f"There is no TPU {_NAME}"),
        (_named(service=_Service(status=403)).cluster_spec, _HttpError, "403"),
        (
            TPUClusterResolver,
            NotFoundError,
            "No TPU is specified, and this machine is not a TPU host",
        ),
        (TPUClusterResolver.connect, NotFoundError, "No TPU is specified"),
        (
            lambda: KubernetesClusterResolver(override_client=_Client(), executable_location=0),
            ValueError,
            r"executable_location=0.(?s:.)*WITHIN_CLUSTER or OFF_CLUS",
        ),
    ],
    ids=["creating", "unhealthy", "empty", "absent", "refused", "no name", "no target", "place"],
)
def test_what_cannot_be_found_is_refused(make, error, words) -> None:
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize(
    ("module", "make", "words"),
    [
        (
            "kubernetes.config",
            KubernetesClusterResolver,
            r"KubernetesClusterResolver needs kubernetes.config(?s:.)*'stratagem\[clusters\]'",
        ),
        (
            "googleapiclient.discovery",
            lambda: GCEClusterResolver("p", "z", "g", 1),
            r"GCEClusterResolver needs googleapiclient.discovery, which cannot be imported"
            r"(?s:.)*pip install google-api-python-client google-auth",
        ),
    ],
)
def test_library_that_is_missing_is_named(monkeypatch, module, make, words) -> None:
    monkeypatch.setitem(sys.modules, module.partition(".")[0], None)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=words):
        make()


# Instance groups from a fake compute API.


class _Request:
    def __init__(self, response: dict) -> None:
        self.response = response

    def execute(self) -> dict:
        return self.response


class _Compute:
    """A fake of the compute API, with a page per list of instances."""

    def __init__(self, *pages: dict[str, str]) -> None:
        self.pages = pages
        self.asked: list[dict] = []
        self.instanceGroups = self.instances = lambda: self

    def listInstances(self, **asked: Any) -> _Request:  # noqa: N802
        self.asked.append(asked)
        return self._page(0)

    def listInstances_next(  # noqa: N802
        self, *, previous_request: _Request, previous_response: dict
    ) -> _Request | None:
        assert previous_request.response is previous_response
        number = previous_response["number"] + 1
        return self._page(number) if number < len(self.pages) else None

    def get(self, *, project: str, zone: str, instance: str) -> _Request:
        (address,) = (page[instance] for page in self.pages if instance in page)
        return _Request({"networkInterfaces": [{"networkIP": address}]})

    def _page(self, number: int) -> _Request:
        url = "https://www.googleapis.com/compute/v1/projects/p/zones/z/instances/"
        items = [{"instance": f"{url}{name}"} for name in self.pages[number]]
        return _Request({"number": number, **({"items": items} if items else {})})


def test_running_instances_of_all_pages_are_sorted() -> None:
    service = _Compute({"b": "10.0.0.2", "a": "10.0.0.3"}, {}, {"c": "10.0.0.1"})
    resolver = GCEClusterResolver("p", "z", "g", 8470, task_id="2", service=service)
    assert resolver.cluster_spec() == {"worker": [f"10.0.0.{n}:8470" for n in (1, 2, 3)]}
    group = {"project": "p", "zone": "z", "instanceGroup": "g"}
    running = {"body": {"instanceState": "RUNNING"}, "orderBy": "name"}
    assert service.asked == [group | running]
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 2, "grpc")
    assert resolver.master() == "grpc://10.0.0.3:8470"
    assert resolver.master("worker", 0, "http") == "http://10.0.0.1:8470"
    assert resolver.processes() == Processes(3, 2, "10.0.0.1:8470")
    service.pages = ({},)
    with pytest.raises(RuntimeError, match="No instance of group 'g' in p/z is running"):
        resolver.cluster_spec()


def test_instances_have_the_type_they_are_given() -> None:
    service = _Compute({"a": "10.0.0.1"})
    resolver = GCEClusterResolver("p", "z", "g", 1, "ps", rpc_layer=None, service=service)
    assert resolver.cluster_spec() == {"ps": ["10.0.0.1:1"]}
    assert resolver.master() == "10.0.0.1:1"
    resolver.task_id = 3
    assert resolver.task_id == 3
    with pytest.raises(RuntimeError, match="task_type='worker' was set on a GCEClusterResolver"):
        resolver.task_type = "worker"


# SageMaker's variables.


def test_every_host_is_a_worker(variables) -> None:
    variables(SM_HOSTS='["algo-2", "algo-1"]', SM_CURRENT_HOST="algo-2")
    resolver = SageMakerClusterResolver()
    # TF 2.21 SageMakerClusterResolver.
    assert resolver.cluster_spec() == {"worker": ["algo-1:2223", "algo-2:2223"]}
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, None)
    assert resolver.master() == "algo-2:2223"
    assert resolver.environment is None
    assert resolver.processes() == Processes(2, 1, "algo-1:2223")
    given = SageMakerClusterResolver(9999, "worker", "0", "grpc", "test")
    assert given.master() == "grpc://algo-1:9999"
    assert (given.task_id, given.environment) == (0, "test")
    variables(SM_HOSTS='["algo-2"]')
    assert SageMakerClusterResolver().master() == ""


@pytest.mark.parametrize(
    ("set_", "error", "message"),
    [
        ({}, RuntimeError, "Not a SageMaker environment: SM_HOSTS=None, SM_CURRENT_HOST=None"),
        ({"SM_HOSTS": '["a"]'}, RuntimeError, "Not a SageMaker environment: SM_HOSTS="),
        (
            {"SM_HOSTS": "a,b", "SM_CURRENT_HOST": "a"},
            ValueError,
            "SM_HOSTS='a,b' is not a list of h",
        ),
        ({"SM_HOSTS": "[1]", "SM_CURRENT_HOST": "1"}, ValueError, "is not a list of hosts"),
        ({"SM_HOSTS": '["a"]', "SM_CURRENT_HOST": "b"}, ValueError, "'b' is not among SM_HOSTS="),
    ],
)
def test_variables_that_cannot_be_are_refused(variables, set_, error, message) -> None:
    variables(**set_)
    with pytest.raises(error, match=message):
        SageMakerClusterResolver()
