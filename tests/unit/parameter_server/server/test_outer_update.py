"""The servers' update under local updates, beside Keras's SGD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import pytest

from stratagem.parameter_server.server.pushes import Contribution, SynchronousUpdates
from stratagem.parameter_server.server.store import ServerVariables
from stratagem.parameter_server.server.updates import LocalRounds, OuterUpdate, outer_name
from tests.unit.parameter_server.server.test_store import make_store

RNG = np.random.default_rng(5)
START = RNG.normal(size=(2, 3)).astype("float32")
CHANGES = RNG.normal(size=(6, 2, 3)).astype("float32")


def store_of(value: np.ndarray = START, **options: Any) -> ServerVariables:
    store = make_store(w=value)
    store.set_rule(OuterUpdate(LocalRounds(period=4, **options)), ["w"], "outer")
    return store


def pushed(store: ServerVariables, changes: Sequence[np.ndarray]) -> list[np.ndarray]:
    values: list[np.ndarray] = []
    for change in changes:
        store.update({"w": change}, {}, {"w": "outer"})
        values.append(np.array(store.pull(["w"])[0]))
    return values


def nesterov(changes: Sequence[np.ndarray], rate: float, momentum: float) -> np.ndarray:
    """Keras's SGD; a change is a negative gradient."""
    variable = keras.Variable(START)
    optimizer = keras.optimizers.SGD(rate, momentum, nesterov=True)
    for change in changes:
        optimizer.apply([-change], [variable])
    return np.asarray(variable.value)


def test_local_sgd_adds_the_mean_of_the_changes() -> None:
    values = pushed(store_of(num_workers=3, num_pushes=3), CHANGES[:3])
    np.testing.assert_allclose(values[0], START + CHANGES[0] / 3, rtol=1e-6)
    np.testing.assert_allclose(values[-1], START + CHANGES[:3].mean(0), rtol=1e-5)


def test_synchronous_changes_are_those_of_nesterov_momentum() -> None:
    options: Mapping[str, Any] = {"learning_rate": 0.7, "momentum": 0.9}
    values = pushed(store_of(num_workers=3, num_pushes=1, **options), CHANGES)
    np.testing.assert_allclose(values[-1], nesterov(CHANGES, 0.7, 0.9), rtol=1e-4, atol=1e-6)


def test_pushes_of_all_workers_are_one_step_of_nesterov_momentum() -> None:
    store = store_of(num_workers=3, num_pushes=3, learning_rate=0.7, momentum=0.9)
    values = pushed(store, CHANGES)
    means = [CHANGES[:3].mean(0), CHANGES[3:].mean(0)]
    np.testing.assert_allclose(values[2], nesterov(means[:1], 0.7, 0.9), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(values[5], nesterov(means, 0.7, 0.9), rtol=1e-5, atol=1e-6)
    # In between there is no momentum, which a stale change would multiply.
    np.testing.assert_allclose(values[3], values[2] + 0.7 * CHANGES[3] / 3, rtol=1e-5, atol=1e-6)


def test_half_precision_has_momentum_in_float32() -> None:
    store = store_of(START.astype("float16"), num_workers=2, num_pushes=2, momentum=0.5)
    pushed(store, CHANGES[:2].astype("float16"))
    value, momentum, total = store.pull(["w", "w:outer.outer_momentum", "w:outer.outer_sum"])
    assert (value.dtype, momentum.dtype, total.dtype) == ("float16", "float32", "float32")
    np.testing.assert_allclose(momentum, CHANGES[:2].mean(0), rtol=1e-2, atol=1e-3)
    assert not total.any()


@pytest.mark.parametrize("num_pushing", [2, 3])
def test_synchronous_update_averages_over_those_that_pushed(num_pushing: int) -> None:
    store = store_of(num_workers=3, num_pushes=1)
    updates = SynchronousUpdates(store, num_pushing, averages=True)
    answers: list[bool] = []

    def answer(version: int, *, is_used: bool) -> None:
        answers.append(is_used)

    for worker in range(num_pushing):
        whole = {"w": CHANGES[worker]}
        updates.add(Contribution(str(worker), 0, whole, {}, answer, answers.append, {"w": "outer"}))
    assert answers == [True] * num_pushing
    expected = START + CHANGES[:num_pushing].mean(0)
    np.testing.assert_allclose(store.pull(["w"])[0], expected, rtol=1e-5)


def test_another_method_is_another_rule() -> None:
    rounds = LocalRounds(period=4, num_workers=2, num_pushes=2)
    assert OuterUpdate(rounds).describe() == {
        "outer_learning_rate": 1.0,
        "outer_momentum": None,
        "num_pushes": 2,
    }
    assert outer_name("adam") == "outer_adam"
