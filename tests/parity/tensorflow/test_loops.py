"""Loops over distributed datasets against TensorFlow's own, and against one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from tests.parity.comparison import mirrored
from tests.parity.tensorflow.cases import Case, initial_weights
from tests.parity.tensorflow.loops import BATCH_SIZE, LOOPS, NUM_EPOCHS, examples, measured

_QUICK = "dense_adam_even"
_RECORDED = np.load(Path(__file__).parent / "loops.npz")


def _carry_out(case: Case, strategy: sg.Strategy, form: str) -> dict[str, np.ndarray]:
    with strategy.scope():
        model = case.build(keras)
        model.set_weights(initial_weights(model))
        optimizer = case.optimizer(keras)
    data = examples(case)
    dataset = strategy.distribute_dataset(sg.input.Dataset((data.x, data.y), batch_size=BATCH_SIZE))
    per_example = keras.losses.SparseCategoricalCrossentropy(reduction=None)

    def replica_step(batch: Any) -> Any:
        x, y = batch

        def loss_fn() -> Any:
            losses = per_example(y, model(x, training=True))
            return sg.compute_average_loss(losses, global_batch_size=BATCH_SIZE)

        loss, gradients = sg.value_and_grad(loss_fn, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    def step(batch: Any) -> Any:
        losses = strategy.run(replica_step, args=(batch,))
        return sum(float(part) for part in strategy.local_results(losses))

    @sg.function
    def compiled_step(batch: Any) -> Any:
        return sum(strategy.local_results(strategy.run(replica_step, args=(batch,))))

    losses: list[Any] = []
    for _ in range(NUM_EPOCHS):
        if form == "run_steps":
            steps = strategy.run_steps(replica_step, iter(dataset), 10, reduce="sum")
            losses += np.asarray(steps).tolist()
        else:
            losses += [(step if form == "run" else compiled_step)(batch) for batch in dataset]
    return measured(losses, model)


@pytest.mark.parametrize(
    "form",
    ["run", *(pytest.param(form, marks=pytest.mark.slow) for form in ("function", "run_steps"))],
)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name == _QUICK else pytest.mark.slow)
        for case in LOOPS
    ],
)
def test_loop_gives_the_numbers_of_tensorflow_and_of_one_device(case: Case, form: str) -> None:
    two = _carry_out(case, mirrored(2), form)
    three = _carry_out(case, mirrored(3), form)
    one = _carry_out(case, sg.get_strategy(), "run")
    assert len(two["losses"]) == 6
    for key, value in two.items():
        np.testing.assert_allclose(value, _RECORDED[f"{case.name}/{key}"], rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(value, one[key], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(three[key], one[key], rtol=1e-5, atol=1e-6)
