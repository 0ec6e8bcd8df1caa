"""Every way in which Keras turns gradients into weights, on several replicas and on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import keras
import pytest

from tests.parity.comparison import (
    Scope,
    assert_like_plain_keras,
    fitted,
    regression,
    small_regressor,
    with_known_weights,
)


def _job(make_optimizer: Callable[[], Any], **fit_arguments: Any) -> Callable[[Scope], Any]:
    def job(scope: Scope) -> dict[str, Any]:
        x, y = regression()
        with scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
            with_known_weights(model)
            model.compile(optimizer=make_optimizer(), loss="mse")
        return fitted(model, x, y, **fit_arguments)

    return job


_OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adadelta": lambda: keras.optimizers.Adadelta(0.5),
    "adafactor": lambda: keras.optimizers.Adafactor(0.02),
    "adagrad": lambda: keras.optimizers.Adagrad(0.05),
    "adam": lambda: keras.optimizers.Adam(0.02),
    "adam_amsgrad": lambda: keras.optimizers.Adam(0.02, amsgrad=True),
    "adamax": lambda: keras.optimizers.Adamax(0.02),
    "adamw": lambda: keras.optimizers.AdamW(0.02, weight_decay=0.01),
    "ftrl": lambda: keras.optimizers.Ftrl(0.05, l1_regularization_strength=0.01),
    "lamb": lambda: keras.optimizers.Lamb(0.02),
    "lion": lambda: keras.optimizers.Lion(0.005),
    "muon": lambda: keras.optimizers.Muon(0.02),
    "nadam": lambda: keras.optimizers.Nadam(0.02),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.02, momentum=0.5, centered=True),
    "schedulefreeadamw": lambda: keras.optimizers.ScheduleFreeAdamW(0.02),
    "sgd": lambda: keras.optimizers.SGD(0.05),
    "sgd_nesterov": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
}


# Of each kind one: what differs between the others is a formula of Keras's own.
_IN_EVERY_RUN = {"adam", "muon", "global_clipnorm"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in _IN_EVERY_RUN else pytest.mark.slow)
        for name in _OPTIMIZERS
    ],
)
def test_built_in_optimizer(name: str) -> None:
    assert_like_plain_keras(_job(_OPTIMIZERS[name]))


def test_all_built_in_optimizers_are_here() -> None:
    base = keras.optimizers.Optimizer
    public = {
        name.lower()
        for name, value in vars(keras.optimizers).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base
    }
    # These two are made of other optimizers and have tests of their own.
    tested = {name.split("_")[0] for name in _OPTIMIZERS}
    assert public == tested | {"lossscaleoptimizer", "multioptimizer"}


# Of the gradients here, the norms lie around 1 and most elements above 0.05: each limit cuts.
_CLIPPING = {
    "clipnorm": {"clipnorm": 0.1},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "clipvalue": {"clipvalue": 0.05},
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in _IN_EVERY_RUN else pytest.mark.slow)
        for name in _CLIPPING
    ],
)
def test_gradients_are_clipped_after_they_are_summed(name: str) -> None:
    job = _job(lambda: keras.optimizers.SGD(0.1, **_CLIPPING[name]))
    clipped = assert_like_plain_keras(job, replicas=(2, 3))
    # Without a limit the loss halves in the second epoch.
    assert clipped["fit loss"][1] > 0.6 * clipped["fit loss"][0]


def test_gradient_accumulation_counts_global_steps() -> None:
    # Four batches in two epochs: an update after three, and one left over.
    job = _job(lambda: keras.optimizers.Adam(0.05, gradient_accumulation_steps=3))
    assert_like_plain_keras(job)


def test_moving_average_of_the_weights() -> None:
    job = _job(
        lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=2)
    )
    # Keras multiplies weights by an integer here, which strict types refuse.
    with jax.numpy_dtype_promotion("standard"):
        assert_like_plain_keras(job)


def test_moving_average_that_replaces_the_weights_at_the_end() -> None:
    job = _job(lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.7))
    assert_like_plain_keras(job, replicas=(2,))


def test_learning_rate_schedule() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.2, decay_steps=2, decay_rate=0.5)
    assert_like_plain_keras(_job(lambda: keras.optimizers.SGD(schedule)))


def _two_optimizers() -> Any:
    kernels, others = keras.optimizers.Adam(0.05), keras.optimizers.SGD(0.1, clipnorm=0.1)
    return keras.optimizers.MultiOptimizer(
        lambda variable: kernels if variable.name == "kernel" else others
    )


def test_an_optimizer_for_each_kind_of_variable() -> None:
    assert_like_plain_keras(_job(_two_optimizers))


def test_loss_scale_that_overflows_and_recovers() -> None:
    # 2**127 times the loss is infinite in float32: such a step is skipped and the scale halved. It
    # doubles after two good steps, and so on. Of six steps, two are skipped.
    job = _job(
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.05), initial_scale=2.0**127, dynamic_growth_steps=2
        ),
        epochs=3,
    )
    measured = assert_like_plain_keras(job)
    scales = [value for name, value in measured.items() if name.endswith("dynamic_scale")]
    assert scales == [2.0**126]


# The rounding of some 20 operations one after the other in the smaller type.
_MIXED = [("mixed_bfloat16", 3e-2), ("mixed_float16", 4e-3)]


def _optimizer_of_policy(policy: str) -> Any:
    optimizer = keras.optimizers.SGD(0.05)
    if policy == "mixed_bfloat16":
        return optimizer
    # The scale with which Keras starts overflows here on one device. Replicas' gradients are
    # smaller than their sum, so that they would overflow at another step.
    return keras.optimizers.LossScaleOptimizer(
        optimizer, initial_scale=64.0, dynamic_growth_steps=4
    )


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "tolerance"), _MIXED)
def test_mixed_precision(policy: str, tolerance: float) -> None:
    def job(scope: Scope) -> dict[str, Any]:
        x, y = regression()
        previous = keras.config.dtype_policy()
        keras.config.set_dtype_policy(policy)
        try:
            with scope():
                model = small_regressor()
                model.compile(optimizer=_optimizer_of_policy(policy), loss="mse", metrics=["mae"])
            measured = fitted(model, x, y)
        finally:
            keras.config.set_dtype_policy(previous)
        assert model.layers[0].compute_dtype == policy.removeprefix("mixed_")
        return measured

    assert_like_plain_keras(job, tolerance=tolerance)
