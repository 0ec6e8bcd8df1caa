"""Random numbers in replicas: others on each, on the first those of one device, repeatable."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest

from tests.parity.comparison import fitted, mirrored, plain_keras, regression
from tests.unit.keras.replicas import copies_of, per_replica

_ONES = np.ones((4, 8), "float32")


def _dropped(strategy: Any, layer: Any, num_steps: int = 1) -> list[list[np.ndarray]]:
    """What dropout leaves of ones on each replica, step by step."""
    parts = per_replica(strategy, [_ONES] * strategy.num_replicas_in_sync)

    def step(rows: Any) -> Any:
        return layer(rows, training=True)

    return [
        [np.asarray(part) for part in strategy.local_results(strategy.run(step, args=(parts,)))]
        for _ in range(num_steps)
    ]


def _dropout(strategy: Any, seed: int | None = 11) -> Any:
    with strategy.scope():
        layer = keras.layers.Dropout(0.5, seed=seed)
        layer.build(_ONES.shape)
    return layer


@pytest.mark.slow
def test_replicas_and_steps_drop_different_elements() -> None:
    strategy = mirrored(3)
    steps = _dropped(strategy, _dropout(strategy), num_steps=2)
    masks = [part.tobytes() for parts in steps for part in parts]
    assert len(set(masks)) == 6
    assert {value for parts in steps for part in parts for value in part.flat} == {0.0, 2.0}


@pytest.mark.parametrize(
    "execution", ["compiled", pytest.param("eager", marks=pytest.mark.slow)], indirect=True
)
def test_first_replica_drops_what_one_device_drops(execution: str) -> None:
    strategy = mirrored(2)
    steps = _dropped(strategy, _dropout(strategy), num_steps=2)
    alone = keras.layers.Dropout(0.5, seed=11)
    for parts in steps:
        np.testing.assert_array_equal(parts[0], np.asarray(alone(_ONES, training=True)))


def test_state_of_the_seed_stays_the_same_on_all_replicas() -> None:
    strategy = mirrored(2)
    layer = _dropout(strategy)
    before = copies_of(layer.seed_generator.state)
    _dropped(strategy, layer)
    after = copies_of(layer.seed_generator.state)
    np.testing.assert_array_equal(after[0], after[1])
    assert (after[0] != before[0]).any()


def test_layers_of_one_seed_draw_alike_and_of_another_seed_do_not() -> None:
    strategy = mirrored(2)
    first, again = (_dropped(strategy, _dropout(strategy))[0] for _ in range(2))
    other = _dropped(strategy, _dropout(strategy, seed=12))[0]
    np.testing.assert_array_equal(first, again)
    assert (np.asarray(first) != np.asarray(other)).any()


@pytest.mark.slow
def test_one_seed_gives_one_run_however_many_steps_a_call() -> None:
    def job(steps_per_execution: int) -> dict[str, Any]:
        x, y = regression()
        with mirrored(2).scope():
            model = keras.Sequential(
                [
                    keras.Input((3,)),
                    keras.layers.Dense(8),
                    keras.layers.Dropout(0.5),
                    keras.layers.GaussianNoise(0.3),
                    keras.layers.Dense(1),
                ]
            )
            model.compile(optimizer="sgd", loss="mse", steps_per_execution=steps_per_execution)
        return fitted(model, x, y, batch_size=2)

    one, three = (plain_keras(lambda _, steps=steps: job(steps)) for steps in (1, 3))
    for key, value in one.items():
        np.testing.assert_allclose(three[key], value, rtol=1e-5, atol=1e-6, err_msg=key)


def test_seed_generator_of_ones_own_draws_differently_on_each_replica() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        generator = keras.random.SeedGenerator(5)
    drawn = strategy.run(lambda: keras.random.normal((3,), seed=generator))
    parts = [np.asarray(part) for part in strategy.local_results(drawn)]
    alone = np.asarray(keras.random.normal((3,), seed=keras.random.SeedGenerator(5)))
    np.testing.assert_array_equal(parts[0], alone)
    assert (parts[0] != parts[1]).any()


def test_seed_generator_outside_the_replicas_is_that_of_keras() -> None:
    with mirrored(2).scope():
        generator = keras.random.SeedGenerator(5)
    drawn = [np.asarray(keras.random.normal((3,), seed=generator)) for _ in range(2)]
    alone = keras.random.SeedGenerator(5)
    for values in drawn:
        np.testing.assert_array_equal(values, np.asarray(keras.random.normal((3,), seed=alone)))
    assert (drawn[0] != drawn[1]).any()


def test_random_numbers_without_a_seed_work_under_one_strategy_after_another() -> None:
    # Keras keeps one generator for the program, made by whoever draws first.
    keras.backend.clear_session(free_memory=False)
    drawn = []
    for scope in (mirrored(2).scope, mirrored(3).scope, contextlib.nullcontext):
        with scope():
            drawn.append(np.asarray(keras.random.normal((3,))).tobytes())
    assert len(set(drawn)) == 3
    keras.backend.clear_session(free_memory=False)


def test_random_numbers_without_a_seed_are_refused_in_a_compiled_step() -> None:
    with pytest.raises(ValueError, match="should only use seeded random ops"):
        mirrored(2).run(lambda: keras.random.normal((3,)))
