"""Optimizers from names, objects and functions are new in each call."""

from __future__ import annotations

import keras
import pytest

from stratagem.estimator.premade.premade_estimator import optimizer_factory


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Adagrad", keras.optimizers.Adagrad),
        ("Adam", keras.optimizers.Adam),
        ("Ftrl", keras.optimizers.Ftrl),
        ("RMSProp", keras.optimizers.RMSprop),
        ("SGD", keras.optimizers.SGD),
    ],
)
def test_names_are_those_of_tensorflow(name, kind) -> None:
    made = optimizer_factory(name, 0.25)()
    assert type(made) is kind
    assert float(made.learning_rate) == 0.25
    assert float(optimizer_factory(name)().learning_rate) == float(kind().learning_rate)


def test_optimizer_is_copied_with_its_settings_and_without_its_name() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.9)
    inner = keras.optimizers.SGD(schedule, momentum=0.5, name="mine")
    make = optimizer_factory(keras.optimizers.LossScaleOptimizer(inner))
    first, second = make(), make()
    assert first is not second
    assert not first.built
    assert first.inner_optimizer.momentum == 0.5
    assert first.inner_optimizer.name != "mine"
    assert float(first.inner_optimizer.learning_rate) == 0.5


def test_function_is_called_for_each_optimizer() -> None:
    make = optimizer_factory(lambda: keras.optimizers.SGD(0.5))
    assert make() is not make()
    with pytest.raises(ValueError, match="optimizer='Sgd' is not an optimizer"):
        optimizer_factory("Sgd")
