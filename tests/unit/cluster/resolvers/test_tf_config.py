"""`TF_CONFIG`, compared with TensorFlow's resolver."""

from __future__ import annotations

import json

import pytest

from stratagem.cluster.processes import Processes
from stratagem.cluster.resolvers.tf_config import TFConfigClusterResolver

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
    assert resolver.processes() == Processes(2, 0, "w0:1")


def test_variable_is_read_again_at_each_question(variables) -> None:
    resolver = TFConfigClusterResolver()
    variables(TF_CONFIG=json.dumps({"cluster": _WORKERS, "task": {"type": "worker", "index": 1}}))
    assert resolver.processes() == Processes(2, 1, "w0:1")


def test_evaluator_outside_of_the_cluster_is_alone(variables) -> None:
    variables(TF_CONFIG=json.dumps({"cluster": _WORKERS, "task": {"type": "evaluator"}}))
    assert TFConfigClusterResolver(task_id=0).processes() == Processes(1, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "TF_CONFIG is not JSON(?s:.)*write it with json.dumps"),
        ("[1]", r"TF_CONFIG is a list: '\[1\]'"),
        ('{"cluster": {"worker": "a:1"}}', "TF_CONFIG, part 'cluster': The tasks of job 'worker'"),
        ('{"cluster": ["a:1"]}', "TF_CONFIG, part 'cluster': cluster="),
        ('{"task": {"index": 0}}', "TF_CONFIG, part 'task': {'index': 0} has no type"),
        ('{"task": "worker"}', "TF_CONFIG, part 'task': 'worker' has no type"),
        ('{"task": {"type": "worker", "index": "x"}}', "TF_CONFIG, part 'task': Task index 'x'"),
        ('{"task": {"type": "worker", "index": null}}', "TF_CONFIG, part 'task': Task index None"),
        (
            json.dumps({"cluster": _WORKERS, "task": {"type": "worker", "index": 2}}),
            r"TF_CONFIG, part 'task': index 2 is outside the job 'worker'(?s:.)*one of \[0, 1\]",
        ),
    ],
)
def test_part_that_is_wrong_is_named(variables, text, message) -> None:
    variables(TF_CONFIG=text)
    with pytest.raises(ValueError, match=message):
        TFConfigClusterResolver()


def test_cluster_without_a_task_has_no_master(variables) -> None:
    variables(TF_CONFIG=json.dumps({"cluster": _WORKERS}))
    with pytest.raises(
        ValueError, match="TF_CONFIG has a cluster of several tasks, but no complete task"
    ):
        TFConfigClusterResolver().master()
