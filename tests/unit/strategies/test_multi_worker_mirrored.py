"""The strategy of many processes, as far as one process sees it; more is in multiprocess/."""

from __future__ import annotations

import json
import re

import jax
import keras
import pytest

import stratagem as sg
from stratagem.group.authentication import secret


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)


def test_without_a_cluster_it_takes_the_local_devices() -> None:
    strategy = sg.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == jax.local_device_count()
    assert strategy.topology.devices == sg.MirroredStrategy().topology.devices
    assert strategy.cluster_resolver.task_type is None
    assert not strategy.topology.spans_processes


@pytest.mark.parametrize("task_type", ["worker", "evaluator"])
def test_a_task_that_trains_alone_takes_the_local_devices(monkeypatch, task_type) -> None:
    task = {"type": task_type, "index": 0}
    cluster = {task["type"]: ["localhost:1"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    strategy = sg.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == jax.local_device_count()
    assert strategy.cluster_resolver.task_type == task["type"]


def test_alias_and_options_are_kept() -> None:
    options = sg.CommunicationOptions(bytes_per_pack=10)
    strategy = sg.CollectiveAllReduceStrategy(communication_options=options)
    assert type(strategy) is sg.MultiWorkerMirroredStrategy
    assert strategy.communication_options is options


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cluster_resolver": "localhost:1"}, "cluster_resolver='localhost:1' is of type str"),
        ({"communication_options": 4}, "communication_options=4 is of type int"),
        ({"devices_per_replica": 3}, "devices_per_replica=3 does not divide the 8 devices"),
        (
            {"shard_state": "all", "placement": {"embedding": "sharded"}},
            "shard_state='all' and a placement were given",
        ),
        (
            {"placement": {"embedding": "central"}},
            "placement has the place 'central' for 'embedding'.\nExpected one of 'mirrored', "
            "'sharded', 'pinned_host'.\nFix: use sg.HybridStrategy",
        ),
    ],
)
def test_arguments_of_another_type_are_refused(arguments, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        sg.MultiWorkerMirroredStrategy(**arguments)


def test_several_hosts_need_a_secret_or_permission(monkeypatch) -> None:
    assert jax.devices()
    secret._warn_once.cache_clear()
    for name in ("SECRET", "SECRET_FILE", "ALLOW_UNAUTHENTICATED"):
        monkeypatch.delenv(f"STRATAGEM_{name}", raising=False)
    cluster = sg.ClusterSpec({"worker": ["host0:2222", "host1:2222"]})
    resolver = sg.cluster_resolver.SimpleClusterResolver(cluster, task_type="worker", task_id=1)
    with pytest.raises(
        ValueError,
        match=r"worker 1 \(host1:2222\) has no secret(?s:.)*host0, host1(?s:.)*stratagem secret",
    ):
        sg.MultiWorkerMirroredStrategy(resolver)
    # JAX has started in this process, which is found after the secret is.
    with (
        pytest.warns(UserWarning, match="This run has no secret"),
        pytest.raises(RuntimeError, match="JAX started before"),
    ):
        sg.MultiWorkerMirroredStrategy(resolver, allow_unauthenticated=True)
    monkeypatch.setenv("STRATAGEM_SECRET", "s" * 32)
    with pytest.raises(RuntimeError, match="JAX started before"):
        sg.MultiWorkerMirroredStrategy(resolver)


def test_cluster_that_changes_afterwards_is_warned_of(monkeypatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    strategy = sg.MultiWorkerMirroredStrategy()
    with strategy.scope():
        pass
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": ["a:1", "b:1"]}}))
    with pytest.warns(UserWarning, match="TF_CONFIG has changed since"), strategy.scope() as made:
        assert made is strategy


def test_rules_say_which_variables_are_in_parts() -> None:
    strategy = sg.MultiWorkerMirroredStrategy(placement={"table": "sharded"})
    count = strategy.num_replicas_in_sync
    with strategy.scope():
        table = keras.layers.Embedding(1024 * count, 8, name="table")
        table.build()
        dense = keras.layers.Dense(512)
        dense.build((None, 64))
    shapes = {shard.data.shape for shard in table.embeddings.stored.addressable_shards}
    assert shapes == {(1024, 8)}
    assert dense.kernel.value.shape == (64, 512)
    assert not hasattr(dense.kernel, "kept") or dense.kernel.store is None
