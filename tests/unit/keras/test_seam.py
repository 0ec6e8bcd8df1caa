"""Keras with another backend is refused by the seam; plain Keras stays as it is."""

from __future__ import annotations

import pytest

from tests.fresh_process import run_fresh


@pytest.mark.parametrize(
    "module", [pytest.param("stratagem", marks=pytest.mark.slow), "stratagem.keras"]
)
def test_keras_that_was_loaded_with_another_backend_is_refused(module: str) -> None:
    # NumPy is a backend that needs nothing else installed.
    program = f"import keras\ntry:\n    import {module}\nexcept ImportError as e:\n    print(e)"
    assert run_fresh(program, KERAS_BACKEND="numpy") == [
        "Keras runs on the 'numpy' backend.",
        "Expected the 'jax' backend, which cannot be changed once Keras is loaded.",
        "Fix: put `import stratagem` before `import keras`, or set KERAS_BACKEND=jax.",
        "Help: stratagem explain SG101",
    ]


@pytest.mark.slow
def test_model_of_no_strategy_is_trained_by_plain_keras() -> None:
    program = """
import stratagem.keras
import keras, numpy as np
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
assert type(model.layers[0].kernel) is keras.Variable
model.fit(np.ones((4, 3), "float32"), np.zeros((4, 1), "float32"), verbose=0)
print(type(model.train_function).__module__.split(".")[0], model.layers[0].kernel.value[0, 0])
"""
    where, value = run_fresh(program, KERAS_BACKEND="jax")[-1].split()
    assert where != "stratagem"
    # Every row predicts 3 instead of 0: the gradient is 2 * 3 * 1.
    assert float(value) == pytest.approx(1 - 0.1 * 6)
