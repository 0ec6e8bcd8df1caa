"""Order of a cluster's tasks, and its leader."""

from __future__ import annotations

import pytest

from stratagem.cluster.spec import ClusterSpec
from stratagem.launch.remote.ray.leader import leader_of, tasks_of


@pytest.mark.parametrize(
    ("cluster", "leader"),
    [
        ({"ps": ["a:1"], "worker": ["b:1"], "chief": ["c:1"]}, ("chief", 0)),
        ({"ps": ["a:1"], "worker": {1: "b:1", 2: "c:1"}}, ("worker", 1)),
        ({"ps": ["a:1", "b:1"], "evaluator": ["c:1"]}, ("ps", 0)),
    ],
)
def test_leader_is_the_chief_or_the_first_worker(cluster, leader) -> None:
    assert leader_of(ClusterSpec(cluster)) == leader


def test_all_tasks_are_named() -> None:
    spec = ClusterSpec({"evaluator": ["e:1"], "ps": ["p:1"], "worker": {0: "a:1", 2: "b:1"}})
    assert tasks_of(spec) == [("worker", 0), ("worker", 2), ("ps", 0), ("evaluator", 0)]


def test_cluster_without_tasks_has_no_leader() -> None:
    with pytest.raises(ValueError, match="has no task"):
        leader_of(ClusterSpec({}))
