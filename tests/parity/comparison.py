"""Runs one piece of training with plain Keras and under a strategy, and compares all that came out.

A job is a function of a scope: a context manager to make the model in, which for plain Keras does
nothing. It returns what it measured, by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import keras
import numpy as np

import stratagem as sg
from stratagem.devices.finding import find_devices
from stratagem.devices.mesh import Topology
from stratagem.strategies.placement import pinned_host_store
from stratagem.variables.layouts import Division, VariableLayouts
from stratagem.variables.placement import UniformPlacement
from tests.parity.tensorflow.cases import initial_weights
from tests.platforms import selected_platform

Scope = Callable[[], AbstractContextManager[Any]]
Job = Callable[[Scope], Mapping[str, Any]]

# Three replicas share a batch of five as 2, 2 and 1; plain Keras compiles one shape only.
NUM_EXAMPLES = 10
BATCH_SIZE = 5
# Of a few steps in float32; one device and several add up in another order.
TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class Kind:
    """What takes the place of mirrored variables while a test runs (`conftest.py`).

    Args:
        make: returns the strategy of so many replicas, of devices of these names where it can say.
        num_replicas: in place of the numbers that tests ask for where any would do.
    """

    make: Callable[[list[str]], Any]
    num_replicas: int | None = None


class Current:
    """The kind of the test that runs."""

    kind = Kind(sg.MirroredStrategy)


class _WhateverDivides(VariableLayouts):
    """Divides each variable along its last axis that can be divided."""

    def division(
        self,
        path: str,
        shape: Sequence[int],
        inherited: Division | None = None,
        *,
        is_trainable: bool = True,
        itemsize: int = 4,
    ) -> Division | None:
        count = self._topology.num_logical_devices
        axes = [axis for axis, size in enumerate(shape) if size and size % count == 0]
        names = self._topology.logical_axes
        return (
            Division(tuple(names if i == axes[-1] else () for i in range(len(shape))))
            if axes
            else None
        )


def _of_groups(devices: list[str], group_size: int = 2) -> Any:
    """Replicas of several devices each, where there are enough."""
    count = group_size * len(devices)
    if count > 8:
        return sg.MirroredStrategy(devices)
    names = [f"cpu:{index}" for index in range(count)]
    groups = [names[first : first + group_size] for first in range(0, count, group_size)]
    topology = Topology.of_groups([find_devices(group) for group in groups])
    return sg.MirroredStrategy(groups, layout_map=_WhateverDivides({}, topology))


def _of_tpu(devices: list[str]) -> Any:
    """Chips that CPU devices stand for, of which the first are taken."""
    with mock.patch.dict(os.environ, STRATAGEM_TPU_PLATFORM="cpu"):
        topology = sg.tpu.initialize_tpu_system()
        build = sg.tpu.experimental.DeviceAssignment.build
        return sg.TPUStrategy(None, build(topology, num_replicas=len(devices)))


def _central(devices: list[str]) -> Any:
    return sg.CentralStorageStrategy(devices, "cpu:7")


def _hybrid(devices: list[str]) -> Any:
    return sg.HybridStrategy(devices, placement={"": "sharded"})


def _pinned(devices: list[str]) -> Any:
    """Small variables, too, which no strategy of ours stores there."""
    topology = Topology(find_devices(devices))
    return sg.Strategy(topology, placement=UniformPlacement(pinned_host_store(topology)))


def _shared_out(devices: list[str]) -> Any:
    return sg.MirroredStrategy(devices, shard_state="all")


# The first one is for the default run. Plain Keras computes on a GPU if there is one: so does that
# which is compared with it.
_ON_GPU = {} if selected_platform() == "cpu" else {"one_gpu": Kind(sg.MirroredStrategy, 1)}
KINDS: Mapping[str, Kind] = _ON_GPU | {
    "mirrored": Kind(sg.MirroredStrategy),
    "2x2": Kind(_of_groups, 2),
    "2x4": Kind(functools.partial(_of_groups, group_size=4), 2),
    "central": Kind(_central),
    "central_2": Kind(_central, 2),
    "central_4": Kind(_central, 4),
    "hybrid": Kind(_hybrid),
    "hybrid_2": Kind(_hybrid, 2),
    "hybrid_4": Kind(_hybrid, 4),
    "shared": Kind(_shared_out),
    "shared_2": Kind(_shared_out, 2),
    "shared_4": Kind(_shared_out, 4),
    "pinned_2": Kind(_pinned, 2),
    "pinned_4": Kind(_pinned, 4),
    "tpu_2": Kind(_of_tpu, 2),
    "tpu_4": Kind(_of_tpu, 4),
}


def mirrored(num_replicas: int) -> Any:
    return Current.kind.make([f"cpu:{index}" for index in range(num_replicas)])


def carried_out(job: Job, scope: Scope) -> dict[str, np.ndarray]:
    """Carries a job out in a scope, from the same seed and with the same names each time."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(7)
    return {key: np.asarray(value) for key, value in job(scope).items()}


def plain_keras(job: Job) -> dict[str, np.ndarray]:
    return carried_out(job, contextlib.nullcontext)


def differences(
    measured: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    tolerance: float = TOLERANCE,
) -> list[str]:
    """Says what differs, one line a quantity; nan equals nan."""
    lines = [f"{key}: only one of both has it" for key in measured.keys() ^ expected.keys()]
    for key in measured.keys() & expected.keys():
        one, other = measured[key], expected[key]
        if one.shape != other.shape:
            lines.append(f"{key}: shape {one.shape}, expected {other.shape}")
            continue
        one, other = one.astype("float64"), other.astype("float64")
        if not np.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True):
            distance = np.max(np.abs(one - other))
            lines.append(f"{key}: {one.ravel()[:4]}, expected {other.ravel()[:4]} ({distance:.1e})")
    return sorted(lines)


def assert_like_plain_keras(
    job: Job, replicas: Sequence[int] = (3,), tolerance: float = TOLERANCE
) -> dict[str, np.ndarray]:
    """Carries a job out with plain Keras and with each number of replicas; all must agree.

    Args:
        job: what to carry out.
        replicas: numbers of replicas, for kinds that do not say it.
        tolerance: relative and absolute.

    Returns:
        What plain Keras measured.
    """
    expected = plain_keras(job)
    assert expected
    wrong = {}
    asked = Current.kind.num_replicas
    for num_replicas in replicas if asked is None else (asked,):
        measured = carried_out(job, mirrored(num_replicas).scope)
        wrong[f"{num_replicas} replicas"] = differences(measured, expected, tolerance)
    assert not any(wrong.values()), wrong
    return expected


def with_known_weights(model: Any) -> Any:
    """Gives a built model weights that depend on nothing but its shapes."""
    model.set_weights(initial_weights(model))
    return model


def state_of(model: Any) -> dict[str, Any]:
    """All weights of a model and its optimizer, by position and name."""
    variables = [*model.weights, *(model.optimizer.variables if model.optimizer else ())]
    return {
        f"variable {index} {variable.name}": np.asarray(variable.value)
        for index, variable in enumerate(variables)
    }


def fitted(model: Any, *data: Any, **fit_arguments: Any) -> dict[str, Any]:
    """Trains without shuffling; returns the history of each metric and the state after it."""
    arguments = {"shuffle": False, "epochs": 2, "verbose": 0} | fit_arguments
    history = model.fit(*data, **_batched(data, arguments))
    return {f"fit {key}": value for key, value in history.history.items()} | state_of(model)


def evaluated(model: Any, *data: Any, **arguments: Any) -> dict[str, Any]:
    """Returns each metric of `evaluate`."""
    logs = model.evaluate(*data, verbose=0, return_dict=True, **_batched(data, arguments))
    return {f"evaluate {key}": value for key, value in logs.items()}


def _batched(data: tuple[Any, ...], arguments: dict[str, Any]) -> dict[str, Any]:
    """Adds the batch size, for data that are not in batches already."""
    is_array = isinstance(data[0], np.ndarray | dict)
    return {"batch_size": BATCH_SIZE} | arguments if is_array else arguments


def regression(
    num_examples: int = NUM_EXAMPLES, num_features: int = 3
) -> tuple[np.ndarray, np.ndarray]:
    """Draws features, shape (examples, features), and targets, shape (examples, 1)."""
    random = np.random.RandomState(11)
    x = random.standard_normal((num_examples, num_features)).astype("float32")
    y = x.sum(axis=1, keepdims=True) + random.standard_normal((num_examples, 1))
    return x, y.astype("float32")


def classification(num_examples: int = NUM_EXAMPLES) -> tuple[np.ndarray, np.ndarray]:
    """Draws features, shape (examples, 3), and labels 0 to 2, shape (examples,)."""
    random = np.random.RandomState(12)
    x = random.standard_normal((num_examples, 3)).astype("float32")
    return x, random.randint(0, 3, num_examples).astype("int32")


def example_weights(num_examples: int) -> np.ndarray:
    """Draws a positive weight an example, one of them zero."""
    weights = np.random.RandomState(13).uniform(0.2, 2.0, num_examples).astype("float32")
    weights[1] = 0.0
    return weights


def small_regressor(**dense_arguments: Any) -> Any:
    """A two-layer network for `regression`, with known weights, not compiled."""
    layers = keras.layers
    return with_known_weights(
        keras.Sequential(
            [
                keras.Input((3,)),
                layers.Dense(4, "tanh", **dense_arguments),
                layers.Dense(1),
            ]
        )
    )


def small_classifier() -> Any:
    """A two-layer network for `classification`, with known weights, not compiled."""
    layers = keras.layers
    return with_known_weights(
        keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(3, "softmax")])
    )
