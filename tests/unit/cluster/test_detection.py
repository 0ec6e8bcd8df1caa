"""Detection of the environment, in order of precedence."""

from __future__ import annotations

import json
import os
import sys
import types
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.cluster.addresses import is_loopback, join_address, split_address
from stratagem.cluster.detection import ENVIRONMENTS, detect, detect_with_servers, ray_train
from stratagem.cluster.processes import Processes
from stratagem.cluster.resolvers import gce
from stratagem.cluster.resolvers.kubernetes import resolve_cluster
from stratagem.cluster.resolvers.slurm import expand_hostlist, expand_tasks_per_node
from tests.unit.cluster.test_launchers import KUBEFLOW_JAX, KUBEFLOW_TORCH, OPEN_MPI, TORCHRUN

_TF_CONFIG = {
    "TF_CONFIG": json.dumps(
        {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": "1"}}
    )
}
SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "CUDA_VISIBLE_DEVICES": "",
}
_TPU = {"TPU_WORKER_HOSTNAMES": "t0,t1", "TPU_WORKER_ID": "1"}
_SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}

# In the order in which they are asked: variables, class, environment, processes.
CASES = [
    (_TF_CONFIG, "TFConfigClusterResolver", None, Processes(2, 1, "a:1")),
    (
        KUBEFLOW_JAX,
        "ProcessClusterResolver",
        "Kubeflow Trainer",
        Processes(4, 3, "job-node-0-0.job:29500"),
    ),
    (TORCHRUN, "ProcessClusterResolver", "torchrun", Processes(2, 1, "127.0.0.1:29534", 1, 2)),
    (
        KUBEFLOW_TORCH,
        "ProcessClusterResolver",
        "Kubeflow Trainer",
        Processes(3, 2, "job-node-0-0.job:29400", 0, 1),
    ),
    (
        {**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "0.0;tcp://10.0.0.1:1"},
        "ProcessClusterResolver",
        "Open MPI",
        Processes(4, 3, "10.0.0.1:61440", 1, 2),
    ),
    (SLURM, "SlurmClusterResolver", "", Processes(3, 2, "n1:61442")),
    (_TPU, "TPUClusterResolver", "", Processes(2, 1, "t0:8482", 0, 1)),
    (_SAGEMAKER, "SageMakerClusterResolver", None, Processes(2, 1, "algo-1:2223")),
]


def test_every_environment_has_a_case_here() -> None:
    assert list(ENVIRONMENTS) == [
        "Ray Train",  # which sets no variables: tests/unit/cluster/test_detection.py
        "TF_CONFIG",
        "Kubeflow Trainer, JAX",
        "torchrun",
        "Kubeflow Trainer, torch",
        "Open MPI",
        "Slurm",
        "TPU",
        "SageMaker",
    ]
    assert len(CASES) + 1 == len(ENVIRONMENTS)


@pytest.mark.parametrize(("set_", "resolver", "name", "processes"), CASES)
def test_environment_is_found(variables, set_, resolver, name, processes) -> None:
    variables(**set_)
    found = detect()
    assert (type(found).__name__, found.environment) == (resolver, name)
    assert found.processes() == processes


@pytest.mark.parametrize("place", range(len(CASES) - 1))
def test_earlier_environment_wins(variables, place) -> None:
    # JAX_COORDINATOR_ADDRESS of the first two would also be read by the later ones.
    for set_, *_ in reversed(CASES[place:]):
        variables(**set_)
    found = detect()
    assert found.processes() == CASES[place][3]


@pytest.mark.parametrize(
    "set_",
    [
        {},
        {"TF_CONFIG": "{}"},
        {"TF_CONFIG": '{"environment": "cloud", "cluster": {}}'},
        {"TF_CONFIG": ""},
        {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
        {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
        {"TPU_NAME": "my-tpu"},
        {"SM_HOSTS": "[]"},
        {"JAX_COORDINATOR_ADDRESS": "a:1"},
        {"WORLD_SIZE": "4"},
    ],
)
def test_environment_that_names_no_cluster_does_not_answer(variables, set_) -> None:
    variables(**set_)
    assert detect() is None
    variables(**TORCHRUN, TF_CONFIG="{")
    with pytest.raises(ValueError, match="TF_CONFIG is not JSON"):
        detect()  # one that cannot be right does not hand on


def test_slices_of_a_tpu_with_one_host_each_are_found(variables) -> None:
    variables(
        TPU_WORKER_HOSTNAMES="t0",
        TPU_WORKER_ID="0",
        MEGASCALE_NUM_SLICES="2",
        MEGASCALE_SLICE_ID="1",
        MEGASCALE_COORDINATOR_ADDRESS="s0:8080",
    )
    found = detect()
    assert found.processes() == Processes(2, 1, "s0:8482", 0, 1)


def test_roles_of_a_slurm_step_are_those_that_the_script_names(variables) -> None:
    variables(**SLURM, STRATAGEM_SLURM_JOBS="chief=1,ps=1,worker=1")
    found = detect_with_servers()
    assert (found.task_type, found.task_id) == ("worker", 0)
    assert found.cluster_spec().jobs == ["chief", "ps", "worker"]
    assert detect().cluster_spec() == found.cluster_spec()
    variables(**_TF_CONFIG)  # which comes before
    assert detect_with_servers().cluster_spec().jobs == ["worker"]


@pytest.mark.parametrize("set_", [{}, SLURM, TORCHRUN])
def test_cluster_of_workers_alone_has_no_servers(variables, set_) -> None:
    variables(**set_)
    assert detect_with_servers().cluster_spec() == {}


# Clusters from load balancers of a fake Kubernetes client.


def _service(name: str, *addresses: str | None, kind: str = "LoadBalancer") -> object:
    ingress = [
        types.SimpleNamespace(
            ip=one if one and one[0].isdigit() else None,
            hostname=one if one and not one[0].isdigit() else None,
        )
        for one in addresses
    ]
    return types.SimpleNamespace(
        metadata=types.SimpleNamespace(name=name),
        spec=types.SimpleNamespace(type=kind),
        status=types.SimpleNamespace(load_balancer=types.SimpleNamespace(ingress=ingress or None)),
    )


def _client(*services: object) -> object:
    listed = types.SimpleNamespace(items=list(services))
    return types.SimpleNamespace(list_service_for_all_namespaces=lambda: listed)


_TASKS = [_service(f"train-worker-{index}", f"10.0.0.{index}") for index in range(11)]
_OTHERS = [
    _service("kubernetes", kind="ClusterIP"),
    _service("train-worker", kind="ClusterIP"),
    _service("nginx", "10.9.9.9"),
    _service("my-own-web-1", "10.9.9.8"),
]


def test_tasks_stand_at_their_index_whatever_the_order() -> None:
    servers = [
        _service("train-ps-0", None, "lb.example.com"),
        _service("a-b-evaluator-0", "1.2.3.4"),
    ]
    client = _client(*_OTHERS, *reversed(_TASKS), *servers)
    assert resolve_cluster(override_client=client) == {
        "worker": [f"10.0.0.{index}:5000" for index in range(11)],
        "ps": ["lb.example.com:5000"],
        "evaluator": ["1.2.3.4:5000"],
    }
    ports = resolve_cluster(6000, override_client=client).job_tasks("ps")
    assert ports == ["lb.example.com:6000"]


def test_names_of_another_form_are_read_by_a_function() -> None:
    client = _client(_service("w1", "10.0.0.2"), _service("w0", "10.0.0.1"), *_OTHERS)

    def parse(name: str) -> tuple[str | None, int | None]:
        return ("worker", int(name[1:])) if name[0] == "w" else (None, None)

    spec = resolve_cluster(parse_task_name_fn=parse, override_client=client)
    assert spec == {"worker": ["10.0.0.1:5000", "10.0.0.2:5000"]}


@pytest.mark.parametrize(
    ("services", "message"),
    [
        (
            _OTHERS,
            r"No load balancer belongs to a task; the others are \['nginx', 'my-own-web-1'\]"
            r"(?s:.)*<name>-<type>-<index>",
        ),
        (_TASKS[1:], r"Load balancers are missing: worker \[0\] of 11"),
        (
            [*_TASKS[:3], *_TASKS[5:8]],
            r"Load balancers are missing: worker \[3, 4\] of 8(?s:.)*start",
        ),
        ([_service("t-worker-0")], r"Service 't-worker-0' has no address yet(?s:.)*--watch"),
        ([_service("t-worker-0", None)], "Service 't-worker-0' has no address yet"),
        (
            [*_TASKS, _service("other-worker-3", "10.0.1.1")],
            r"Services 'train-worker-3' and 'other-worker-3' are both for worker 3(?s:.)*one cl",
        ),
        (
            [_service("t-worker-x", "10.0.0.1")],
            r"'t-worker-x' has a task type in its name(?s:.)*rename",
        ),
        ([_service("worker-0", "10.0.0.1")], "'worker-0' has a task type in its name"),
    ],
)
def test_cluster_that_is_not_whole_is_refused(services, message) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_cluster(override_client=_client(*services))


# Workers of Ray Train, by a context that says what Ray's says.


@pytest.fixture
def in_worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this process a worker of Ray Train; `heard` is what rank 0 has sent."""
    for name in ("STRATAGEM_SECRET", "STRATAGEM_SECRET_FILE", "JAX_COORDINATOR_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def make(rank: int, size: int, heard: Any = None) -> None:
        train: Any = types.ModuleType("ray.train")
        context = {"get_world_rank": lambda: rank, "get_world_size": lambda: size}
        train.get_context = lambda: types.SimpleNamespace(**context)
        collective: Any = types.ModuleType("ray.train.collective")
        collective.broadcast_from_rank_zero = lambda value: heard if value is None else value
        util: Any = types.ModuleType("ray.util")
        util.get_node_ip_address = lambda: "127.0.0.1"
        for module in (train, collective, util):
            monkeypatch.setitem(sys.modules, module.__name__, module)

    return make


def test_rank_0_makes_the_address_and_the_secret(in_worker, monkeypatch) -> None:
    in_worker(0, 2)
    found = ray_train()
    assert (found.num_processes, found.process_id) == (2, 0)
    assert split_address(str(found.coordinator_address))[0] == "127.0.0.1"
    assert len(os.environ["STRATAGEM_SECRET"]) == 64
    assert ray_train() == found  # without another exchange
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "2345")
    in_worker(0, 3)
    assert ray_train() == Processes(3, 0, "127.0.0.1:2345")


def test_other_ranks_hear_both_and_a_secret_of_the_user_stays(in_worker, monkeypatch) -> None:
    in_worker(0, 1)
    assert ray_train() == Processes(1, 0)  # which exchanges nothing
    assert "STRATAGEM_SECRET" not in os.environ
    in_worker(1, 3, ("10.0.0.1:2222", "s" * 64))
    assert ray_train() == Processes(3, 1, "10.0.0.1:2222")
    assert os.environ["STRATAGEM_SECRET"] == "s" * 64
    monkeypatch.setenv("STRATAGEM_SECRET", "of the user")
    ray_train()
    assert os.environ["STRATAGEM_SECRET"] == "of the user"


@pytest.mark.parametrize("error", [RuntimeError, DeprecationWarning, None])
def test_outside_a_training_function_there_are_no_workers(in_worker, monkeypatch, error) -> None:
    in_worker(0, 2)

    def refuse() -> None:
        raise error("only in a training function")

    monkeypatch.setattr(sys.modules["ray.train"], "get_context", refuse)
    if error is None:
        monkeypatch.delitem(sys.modules, "ray.train")
    assert ray_train() is None


# Google Cloud's clients, and the metadata server of its machines.


@pytest.fixture
def libraries(monkeypatch) -> list[tuple]:
    """A fake of Google's libraries that records how the client is built."""
    calls: list[tuple] = []

    def fake(name: str, **functions: Any) -> None:
        module = types.ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)

    fake("googleapiclient")
    fake(
        "googleapiclient.discovery",
        build=lambda *api, **options: calls.append((*api, options)) or "client",
    )
    fake(
        "google.auth",
        default=lambda scopes: calls.append(("default", *scopes)) or ("own credentials", "project"),
    )
    return calls


def test_client_is_built_with_credentials_and_address(libraries) -> None:
    assert gce.build_service("compute", "default", needed_by="a test") == "client"
    assert libraries == [
        ("default", "https://www.googleapis.com/auth/cloud-platform"),
        ("compute", "v1", {"credentials": "own credentials", "cache_discovery": False}),
    ]
    gce.build_service("tpu", "mine", needed_by="a test", discovery_url="https://x")
    options = {"credentials": "mine", "cache_discovery": False, "discoveryServiceUrl": "https://x"}
    assert libraries[2:] == [("tpu", "v1", options)]


# Slurm's compact lists of hosts and tasks.

# TF 2.21 slurm_cluster_resolver.expand_hostlist and expand_tasks_per_node.
EXPANDED = [
    (expand_hostlist, "n1", ["n1"]),
    (
        expand_hostlist,
        "n[1-2],m5,o[3-4,6,7-9]",
        ["n1", "n2", "m5", "o3", "o4", "o6", "o7", "o8", "o9"],
    ),
    (expand_hostlist, "n[08-11]", ["n08", "n09", "n10", "n11"]),
    (expand_hostlist, "node[001-003,7],gpu-a", ["node001", "node002", "node003", "node7", "gpu-a"]),
    (expand_hostlist, "a,b,a", ["a", "b", "a"]),
    (expand_hostlist, "[1-3]", ["1", "2", "3"]),
    (expand_hostlist, "", []),
    # Not recorded: ranges may stand anywhere in a name.
    (expand_hostlist, "rack[1-2]n[1-2]", ["rack1n1", "rack1n2", "rack2n1", "rack2n2"]),
    (expand_hostlist, "n[1-2]-ib,m1", ["n1-ib", "n2-ib", "m1"]),
    (expand_tasks_per_node, "3(x2),2,1", [3, 3, 2, 1]),
    (expand_tasks_per_node, "1", [1]),
    (expand_tasks_per_node, "2(x3)", [2, 2, 2]),
    (expand_tasks_per_node, "4(x1),4", [4, 4]),
]
_NO_HOSTS = ("n[1-3", "n]1", "n[a-b]", "a,,b", "n[3-1]", "n[1-2-3]", "n[]", ",n1", "n1,", "n[[1]]")
_NO_TASKS = ("", "x2", "2(3)", "2,", "2(x)", "2 (x3)")


@pytest.mark.parametrize(("expand", "text", "expanded"), EXPANDED)
def test_list_is_expanded_as_in_tensorflow(expand, text, expanded) -> None:
    assert expand(text) == expanded


@pytest.mark.parametrize(
    ("expand", "text", "words"),
    [
        *(
            (expand_hostlist, text, r"hostlist format(?s:.)*scontrol show hostnames")
            for text in _NO_HOSTS
        ),
        *((expand_tasks_per_node, text, "tasks-per-node list format") for text in _NO_TASKS),
    ],
)
def test_bad_list_is_refused(expand, text, words) -> None:
    with pytest.raises(ValueError, match=f"Invalid {words}"):
        expand(text)


@settings(deadline=None, max_examples=50)
@given(first=st.integers(0, 200), length=st.integers(1, 50), digits=st.integers(1, 4))
def test_range_names_each_number_once(first, length, digits) -> None:
    last = first + length - 1
    hosts = expand_hostlist(f"n[{first:0{digits}}-{last:0{digits}}]")
    assert [int(host[1:]) for host in hosts] == list(range(first, last + 1))
    assert all(len(host) > digits for host in hosts)


# Parsing of addresses, and detection of loopback addresses.


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("host:1", ("host", 1)),
        ("grpc://Host.Example:65535", ("host.example", 65535)),
        ("10.0.0.1:2222", ("10.0.0.1", 2222)),
        ("[fd00::1]:2222", ("fd00::1", 2222)),
    ],
)
def test_address_has_a_host_and_a_port(address, parts) -> None:
    assert split_address(address) == parts
    assert split_address(join_address(*parts)) == parts


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":1", "host:0", "host:65536", "host:x", "fd00::1:1", "[]:1"]
)
def test_other_text_is_no_address(address) -> None:
    with pytest.raises(ValueError, match=r"is not of the form host:port(?s:.)*in brackets"):
        split_address(address)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *((host, True) for host in ("localhost", "127.0.0.1", "127.0.1.1", "::1")),
        *((host, False) for host in ("10.0.0.1", "fd00::1", "localhost.example.com", "127")),
        *((host, False) for host in ("0.0.0.0", "::")),
    ],
)
def test_loopback_is_known(host, expected) -> None:
    assert is_loopback(host) is expected
