"""SageMaker's variables."""

from __future__ import annotations

import pytest

from stratagem.cluster.processes import Processes
from stratagem.cluster.resolvers.sagemaker import SageMakerClusterResolver


def test_every_host_is_a_worker(variables) -> None:
    variables(SM_HOSTS='["algo-2", "algo-1"]', SM_CURRENT_HOST="algo-2")
    resolver = SageMakerClusterResolver()
    # TF 2.21 SageMakerClusterResolver.
    assert resolver.cluster_spec() == {"worker": ["algo-1:2223", "algo-2:2223"]}
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, None)
    assert resolver.master() == "algo-2:2223"
    assert resolver.environment is None
    assert resolver.processes() == Processes(2, 1, "algo-1:2223")


def test_arguments_win(variables) -> None:
    variables(SM_HOSTS='["algo-1", "algo-2"]', SM_CURRENT_HOST="algo-1")
    resolver = SageMakerClusterResolver(9999, "worker", "1", "grpc", "test")
    assert resolver.master() == "grpc://algo-2:9999"
    assert (resolver.task_id, resolver.environment) == (1, "test")


def test_single_host_has_no_master(variables) -> None:
    variables(SM_HOSTS='["algo-1"]', SM_CURRENT_HOST="algo-1")
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
