"""Detection of the environment, in order of precedence."""

from __future__ import annotations

import json

import pytest

from stratagem.cluster.detection import ENVIRONMENTS, detect, detect_with_servers
from stratagem.cluster.processes import Processes
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


def test_without_a_launcher_nothing_is_found() -> None:
    assert detect() is None


def test_every_environment_has_a_case_here() -> None:
    assert list(ENVIRONMENTS) == [
        "Ray Train",  # which sets no variables: tests/unit/cluster/test_ray_train.py
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
    assert found is not None
    assert (type(found).__name__, found.environment) == (resolver, name)
    assert found.processes() == processes


@pytest.mark.parametrize("place", range(len(CASES) - 1))
def test_earlier_environment_wins(variables, place) -> None:
    # JAX_COORDINATOR_ADDRESS of the first two would also be read by the later ones.
    for set_, *_ in reversed(CASES[place:]):
        variables(**set_)
    found = detect()
    assert found is not None
    assert found.processes() == CASES[place][3]


@pytest.mark.parametrize(
    "set_",
    [
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


def test_environment_that_cannot_be_right_does_not_hand_on(variables) -> None:
    variables(**TORCHRUN)
    variables(TF_CONFIG="{")
    with pytest.raises(ValueError, match="TF_CONFIG is not JSON"):
        detect()


def test_slurm_without_a_job_number_has_the_default_ports(variables) -> None:
    variables(**SLURM)
    variables(SLURM_JOB_ID="")
    found = detect()
    assert found is not None
    assert found.processes().coordinator_address == "n1:8888"


def test_slices_of_a_tpu_with_one_host_each_are_found(variables) -> None:
    variables(
        TPU_WORKER_HOSTNAMES="t0",
        TPU_WORKER_ID="0",
        MEGASCALE_NUM_SLICES="2",
        MEGASCALE_SLICE_ID="1",
        MEGASCALE_COORDINATOR_ADDRESS="s0:8080",
    )
    found = detect()
    assert found is not None
    assert found.processes() == Processes(2, 1, "s0:8482", 0, 1)


def test_roles_of_a_slurm_step_are_those_that_the_script_names(variables) -> None:
    variables(**SLURM, STRATAGEM_SLURM_JOBS="chief=1,ps=1,worker=1")
    found = detect_with_servers()
    assert (found.task_type, found.task_id) == ("worker", 0)
    assert found.cluster_spec().jobs == ["chief", "ps", "worker"]
    assert detect().cluster_spec() == found.cluster_spec()


@pytest.mark.parametrize("set_", [{}, SLURM, TORCHRUN])
def test_cluster_of_workers_alone_has_no_servers(variables, set_) -> None:
    variables(**set_)
    assert detect_with_servers().cluster_spec() == {}


def test_tf_config_comes_before_the_roles_of_a_slurm_step(variables) -> None:
    variables(**SLURM, **_TF_CONFIG, STRATAGEM_SLURM_JOBS="chief=1,ps=1,worker=1")
    assert detect_with_servers().cluster_spec().jobs == ["worker"]
