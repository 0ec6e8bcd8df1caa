"""Datasets that input workers read for a strategy: the same training, and no process is left."""

from __future__ import annotations

import gc
import os
import threading
import types
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.execution.programs.elastic_lockstep import ElasticLockstep
from stratagem.execution.programs.lockstep import Lockstep
from stratagem.strategies.base.datasets import on_input_workers
from tests.unit.input.service.servers import InputServers, input_servers
from tests.unit.launch.remote.living import descendants, wait_for_end

_X = np.random.default_rng(0).normal(size=(100, 3)).astype("float32")
_Y = _X.sum(1, keepdims=True)
_LIMIT_S = 60


def _trained(strategy: sg.Strategy, dataset: Any) -> list[np.ndarray]:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(dataset, epochs=2, verbose=0)
    return model.get_weights()


@pytest.fixture
def servers(monkeypatch) -> Iterator[InputServers]:
    with input_servers(1) as servers:
        monkeypatch.setenv("STRATAGEM_INPUT_SERVICE", servers.target)
        yield servers


@pytest.mark.slow
def test_fit_with_a_worker_of_its_own_is_plain_fit() -> None:
    before = descendants(os.getpid())
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = sg.input.Dataset((_X, _Y), batch_size=8, shuffle=True)
    distributed = strategy.distribute_dataset(dataset, sg.InputOptions(input_workers=1))
    assert len(distributed) == 13
    plain = _trained(strategy, strategy.distribute_dataset(dataset))
    np.testing.assert_array_equal(plain[0], _trained(strategy, distributed)[0])
    workers = descendants(os.getpid()) - before
    assert workers
    del distributed
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "input service close":
            thread.join(_LIMIT_S)
    assert not wait_for_end(workers)


def test_a_running_service_is_used(servers) -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = sg.input.Dataset((_X, _Y), batch_size=8, shuffle=True)
    options = sg.InputOptions(input_workers=4)
    distributed = strategy.distribute_dataset(dataset, options)
    plain = _trained(strategy, strategy.distribute_dataset(dataset))
    np.testing.assert_array_equal(plain[0], _trained(strategy, distributed)[0])
    with pytest.raises(TypeError, match="cannot be sent to input workers"):
        strategy.distribute_dataset((np.full(2, n) for n in range(5)), options)


def _strategy(executor: type, *, spans_processes: bool, replicas_span: bool = False) -> Any:
    topology = types.SimpleNamespace(
        spans_processes=spans_processes,
        processes_of_inputs=((0, 1),) if replicas_span else ((0,), (1,)),
    )
    return types.SimpleNamespace(executor=object.__new__(executor), topology=topology)


@pytest.mark.parametrize(
    ("executor", "spans_processes", "policy", "message"),
    [
        (Lockstep, False, sg.AutoShardPolicy.DATA, "was passed with <AutoShardPolicy.DATA: 2>"),
        (Lockstep, True, sg.AutoShardPolicy.AUTO, "have no common input service"),
        (ElasticLockstep, True, sg.AutoShardPolicy.AUTO, "was passed to an ElasticStrategy"),
    ],
)
def test_workers_that_do_not_suit_are_refused(executor, spans_processes, policy, message) -> None:
    options = sg.InputOptions(input_workers=1, auto_shard_policy=policy)
    source = sg.input.Dataset([_X]).as_source()
    with pytest.raises(ValueError, match=message):
        on_input_workers(_strategy(executor, spans_processes=spans_processes), source, options)


def test_replicas_that_span_processes_are_refused() -> None:
    strategy = _strategy(Lockstep, spans_processes=True, replicas_span=True)
    options = sg.InputOptions(input_workers=1)
    with pytest.raises(ValueError, match="passed to a strategy whose replicas span processes"):
        on_input_workers(strategy, sg.input.Dataset([_X]).as_source(), options)
