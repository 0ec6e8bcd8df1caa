"""Models, data and clusters of the tests of local updates over parameter servers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices.local_updates import LocalUpdates
from stratagem.group.transport.connection import Connections
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.cluster.cluster_plan import rounds_of
from stratagem.parameter_server.cluster.remote_state_strategy import RemoteStateStrategy
from stratagem.parameter_server.server.updates import UpdateMode
from stratagem.parameter_server.strategy.process_parts import independent_parts
from tests.unit.parameter_server.clusters import ThreadCluster, local_strategy

RNG = np.random.default_rng(1)
X = RNG.normal(size=(64, 6)).astype("float32")
Y = RNG.normal(size=(64, 2)).astype("float32")
IDS = RNG.integers(0, 9000, (64, 3), dtype="int32")
FIT: dict[str, Any] = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}


def dense(optimizer: Any, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = keras.layers
    hidden = [layers.Dense(8, "relu", name="hidden"), layers.BatchNormalization(name="normal")]
    out = layers.Dense(2, kernel_regularizer="l2", name="out")
    model = keras.Sequential([layers.Input((6,)), *hidden, out], name="model")
    model.compile(optimizer, "mse", metrics=["mae"], **options)
    return model


def table(optimizer: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = keras.layers
    embedding = layers.Embedding(9000, 8, name="table")
    out = layers.Dense(2, name="out")
    model = keras.Sequential(
        [layers.Input((3,), dtype="int32"), embedding, layers.Flatten(), out], name="model"
    )
    model.compile(optimizer, "mse")
    return model


def mode_of(method: LocalUpdates, num_workers: int, *, synchronous: bool = False) -> UpdateMode:
    rounds = rounds_of(method, num_workers, synchronous=synchronous)
    return UpdateMode(num_workers if synchronous else 0, rounds=rounds)


def training_apart(
    method: LocalUpdates, num_workers: int = 1, *, synchronous: bool = False, **options: Any
) -> Any:
    """A strategy on a cluster of threads."""
    mode = mode_of(method, num_workers, synchronous=synchronous)
    return local_strategy(num_workers, mode=mode, **options)


@contextlib.contextmanager
def independent(cluster: Any, index: int, mode: UpdateMode) -> Iterator[RemoteStateStrategy]:
    """A worker with a program of its own."""
    num_workers = mode.rounds.num_workers if mode.rounds else 1
    parts = independent_parts(cluster, index, num_workers, None, mode, ["cpu:0"])
    with contextlib.closing(RemoteStateStrategy(parts)) as made:
        yield made


class LastingCluster(ThreadCluster):
    """Servers that outlive the strategies."""

    def __init__(self, num_servers: int = 2) -> None:
        super().__init__(num_servers, [])

    def close(self) -> None:
        pass

    def end(self) -> None:
        super().close()


@contextlib.contextmanager
def counting_messages(patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Lists the kinds of the messages that clients send to servers meanwhile."""
    kinds: list[str] = []
    original = Connections.ask_all

    def ask_all(self: Any, requests: dict[int, Message], **options: Any) -> Any:
        kinds.extend(message.kind for message in requests.values())
        return original(self, requests, **options)

    with patch.context() as own:
        own.setattr(Connections, "ask_all", ask_all)
        yield kinds


def weights(model: keras.Model) -> list[np.ndarray]:
    return [np.asarray(one.value) for one in model.variables]


def assert_same(model: Any, other: Any, **tolerance: float) -> None:
    limits = {"rtol": 1e-5, "atol": 1e-6, **tolerance}
    for one, two in zip(model, other, strict=True):
        np.testing.assert_allclose(
            np.asarray(one.value), np.asarray(two.value), err_msg=one.path, **limits
        )


def apart_in_lockstep(method: LocalUpdates) -> sg.LocalUpdateStrategy:
    return sg.LocalUpdateStrategy(method, ["cpu:0", "cpu:1"])
