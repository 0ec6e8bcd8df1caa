"""minimize records updates."""

from __future__ import annotations

import keras
import pytest

import stratagem as sg
from stratagem.estimator.spec import as_train_ops


def test_loss_may_be_a_function_that_is_called_at_once() -> None:
    calls = []
    op = sg.estimator.minimize(keras.optimizers.SGD(), lambda: calls.append(1) or 0.5)
    assert (op.loss, calls) == (0.5, [1])


def test_optimizers_minimize_the_loss_of_the_spec() -> None:
    optimizer = keras.optimizers.SGD()
    variable = keras.Variable(1.0)
    op = sg.estimator.minimize(optimizer, 2.0, [variable])
    plain, given = as_train_ops([optimizer, op], 0.5)
    assert (plain.optimizer, plain.loss, plain.variables) == (optimizer, 0.5, None)
    assert given is op
    assert given.variables is not None
    assert given.variables[0] is variable
    assert [one.loss for one in as_train_ops(optimizer, 0.25)] == [0.25]


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match="minimize received optimizer='sgd' of type str"):
        sg.estimator.minimize("sgd", 0.5)


def test_an_empty_list_of_variables_is_refused() -> None:
    with pytest.raises(ValueError, match="minimize received an empty var_list"):
        sg.estimator.minimize(keras.optimizers.SGD(), 0.5, [])
