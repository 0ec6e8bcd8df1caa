"""`LocalUpdateStrategy`: its arguments."""

from __future__ import annotations

import pytest

import stratagem as sg


def test_method_is_local_sgd_by_default() -> None:
    strategy = sg.LocalUpdateStrategy(devices=["cpu:0", "cpu:1"])
    assert strategy.local_updates == sg.local_updates.LocalSGD()
    assert strategy.num_replicas_in_sync == 2
    assert sg.LocalUpdateStrategy().cluster_resolver.task_type is None


def test_other_strategies_train_in_lockstep() -> None:
    assert sg.MirroredStrategy(["cpu:0", "cpu:1"]).local_updates is None


def test_method_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="method='diloco' is of type str"):
        sg.LocalUpdateStrategy("diloco")


def test_devices_and_a_cluster_are_refused() -> None:
    resolver = sg.cluster_resolver.SimpleClusterResolver(
        sg.ClusterSpec({"worker": ["127.0.0.1:1234"]})
    )
    with pytest.raises(ValueError, match="a cluster resolver were given"):
        sg.LocalUpdateStrategy(devices=["cpu:0"], cluster_resolver=resolver)
