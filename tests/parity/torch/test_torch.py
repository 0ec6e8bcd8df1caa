"""Local updates and compressed sums against PyTorch's own, which `reference.py` has recorded.

Both start from the same weights, and see the same examples in the same order. PowerSGD also starts
from the same random factors; its error is each process's own and another one in PyTorch, with the
same sum.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from tests.parity.torch.problem import (
    BATCH_SIZE,
    HIDDEN,
    LEARNING_RATE,
    MOMENTUM,
    NUM_CLASSES,
    NUM_FEATURES,
    PERIOD,
    RANK,
    WHOLE_STEPS,
    examples,
    initial_weights,
)

_RECORDED = np.load(Path(__file__).parent / "recorded.npz")
_DEVICES = ["cpu:0", "cpu:1"]
# Of a loss or a weight. The power iteration multiplies rounding errors: after 60 steps, weights
# that began 1e-7 apart differ by 1e-2, ours from ours as ours from PyTorch's. Hence few steps. Sums
# of float16 are added in float32 here and in float16 there.
_TOLERANCES = {"power_sgd": 5e-5, "float16": 1e-4, "local_sgd": 2e-5, "diloco": 2e-5}


def _recorded(name: str) -> list[np.ndarray]:
    return [_RECORDED[f"{name} {place}"] for place in range(4)]


def _compressed(compression: sg.compression.Compression) -> sg.Strategy:
    return sg.MirroredStrategy(_DEVICES, sg.CompressedAllReduce(compression))


def _local(method: sg.local_updates.LocalUpdates) -> sg.Strategy:
    return sg.LocalUpdateStrategy(method, devices=_DEVICES)


def _sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(LEARNING_RATE)


def _with_momentum() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(LEARNING_RATE / 4, momentum=MOMENTUM)


def _adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.AdamW(0.01, epsilon=1e-12, weight_decay=0.01)


_METHODS: dict[str, tuple[Callable[[], sg.Strategy], Callable[[], Any], int]] = {
    "power_sgd": (
        lambda: _compressed(sg.compression.PowerSGD(rank=RANK, min_elements=1)),
        _sgd,
        WHOLE_STEPS,
    ),
    "float16": (
        lambda: _compressed(sg.compression.Float16(error_feedback=False, min_elements=1)),
        _sgd,
        0,
    ),
    "local_sgd": (lambda: _local(sg.local_updates.LocalSGD(period=PERIOD)), _with_momentum, 0),
    "diloco": (lambda: _local(sg.local_updates.DiLoCo(period=PERIOD)), _adam, 0),
}


def _train(
    strategy: sg.Strategy, optimizer: Callable[[], Any], weights: list[np.ndarray], first_step: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns the loss of each step, and the weights in the end."""
    with strategy.scope():
        layers = keras.layers
        model: Any = keras.Sequential(
            [
                layers.Input((NUM_FEATURES,)),
                layers.Dense(HIDDEN, "relu"),
                layers.Dense(NUM_CLASSES),
            ]
        )
        model.set_weights(weights)
        own = optimizer()
        own.build(model.trainable_variables)
    for variable in own.variables:
        if variable.name.endswith("_factor"):
            # Kernels are told apart by their first axis.
            kernel = next(one for one in model.trainable_variables if _names(one, variable))
            variable.assign(_RECORDED[f"power_sgd/factor of {kernel.shape[0]}"])
    make_losses: Any = keras.losses.SparseCategoricalCrossentropy
    per_example = make_losses(from_logits=True, reduction=None)

    def step(batch: Any) -> Any:
        x, y = batch

        def loss_fn() -> Any:
            losses = per_example(y, model(x, training=True))
            return sg.compute_average_loss(losses, global_batch_size=BATCH_SIZE)

        loss, gradients = sg.value_and_grad(loss_fn, model.trainable_variables)
        own.apply(gradients, model.trainable_variables)
        return loss

    x, y = (one[first_step:].reshape(-1, *one.shape[2:]) for one in examples())
    dataset = strategy.distribute_dataset(sg.input.Dataset((x, y), batch_size=BATCH_SIZE))
    losses = strategy.run_steps(step, iter(dataset), len(x) // BATCH_SIZE, reduce="sum")
    return np.asarray(losses), model.get_weights()


def _names(kernel: Any, factor: Any) -> bool:
    return factor.name == f"{kernel.path.replace('/', '_')}_factor"


def _differences(name: str) -> tuple[float, float]:
    """Returns the largest difference of a loss, and of a weight in the end."""
    make_strategy, optimizer, first_step = _METHODS[name]
    begin = _recorded(f"{name}/begin") if first_step else initial_weights()
    losses, weights = _train(make_strategy(), optimizer, begin, first_step)
    wanted = _RECORDED[f"{name}/losses"][first_step:]
    assert wanted[-5:].mean() < wanted[:5].mean() - 0.2
    in_weights = max(
        float(np.abs(ours - theirs).max())
        for ours, theirs in zip(weights, _recorded(f"{name}/weights"), strict=True)
    )
    return float(np.abs(losses - wanted).max()), in_weights


@pytest.mark.parametrize("name", _METHODS)
def test_losses_and_weights_are_those_of_pytorch(name: str) -> None:
    in_losses, in_weights = _differences(name)
    print(f"{name}: losses differ by {in_losses:.1e} at most, weights by {in_weights:.1e}")
    assert max(in_losses, in_weights) < _TOLERANCES[name]


def test_the_recorded_methods_differ_from_each_other_by_more() -> None:
    ends = [_recorded(f"{name}/weights")[0] for name in _METHODS]
    for place, one in enumerate(ends):
        for other in ends[place + 1 :]:
            assert np.abs(one - other).max() > 10 * max(_TOLERANCES.values())
