"""Resolver of a process count, rank and coordinator."""

from __future__ import annotations

import pytest

from stratagem.cluster.processes import Processes
from stratagem.cluster.resolvers.process import ProcessClusterResolver


def test_every_process_is_a_worker_and_only_worker_0_has_an_address() -> None:
    processes = Processes(4, 2, "a:1", 0, 2)
    resolver = ProcessClusterResolver(processes, "torchrun")
    assert resolver.processes() is processes
    assert (resolver.task_type, resolver.task_id) == ("worker", 2)
    assert resolver.cluster_spec() == {"worker": {0: "a:1"}}
    assert resolver.environment == "torchrun"
    assert resolver.master() == "a:1"
    assert resolver.master("worker", 0, "grpc") == "grpc://a:1"
    with pytest.raises(ValueError, match="No task with index 2 in job 'worker'"):
        resolver.master("worker", 2)


def test_single_process_has_no_cluster() -> None:
    resolver = ProcessClusterResolver(Processes(1, 0))
    assert not resolver.cluster_spec()
    assert resolver.master() == ""


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match=r"is of type tuple(?s:.)*an sg.cluster.Processes"):
        ProcessClusterResolver((4, 2, "a:1"))
