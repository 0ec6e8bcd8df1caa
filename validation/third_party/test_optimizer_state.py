"""Bytes of optimizer state for each parameter, beside the table of the guide to fine-tuning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

import stratagem as sg

_GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "fine_tune.md"
_SHAPES = ((256, 1024), (1024, 256))
_NUM_PARAMETERS = sum(rows * columns for rows, columns in _SHAPES)
_OF_KERAS = ("AdamW", "Lion", "Muon", "Adafactor")
_OF_OPTAX: dict[str, Callable[[], optax.GradientTransformation]] = {
    'adamw(rate, mu_dtype="bfloat16")': lambda: optax.adamw(1e-3, mu_dtype="bfloat16"),
    'lion(rate, mu_dtype="bfloat16")': lambda: optax.lion(1e-3, mu_dtype="bfloat16"),
    "adafactor(rate)": lambda: optax.adafactor(1e-3),
}


def _documented(name: str) -> float:
    rows = [line.split("|") for line in _GUIDE.read_text().splitlines() if f"`{name}`" in line]
    return float(next(row[2] for row in rows if len(row) == 4))


def _bytes_a_parameter(arrays: Any) -> float:
    return sum(one.nbytes for one in jax.tree.leaves(arrays)) / _NUM_PARAMETERS


@pytest.mark.parametrize("name", _OF_KERAS)
def test_optimizer_of_keras(name: str) -> None:
    with sg.OneDeviceStrategy("cpu:0").scope():
        variables = [keras.Variable(np.zeros(shape, "float32")) for shape in _SHAPES]
        optimizer: Any = getattr(keras.optimizers, name)(1e-3)
        optimizer.build(variables)
    found = _bytes_a_parameter([one.value for one in optimizer.variables])
    assert found == pytest.approx(_documented(f"keras.optimizers.{name}"), abs=0.05)


@pytest.mark.parametrize("name", _OF_OPTAX)
def test_optimizer_of_optax(name: str) -> None:
    state = _OF_OPTAX[name]().init([jnp.zeros(shape) for shape in _SHAPES])
    found = _bytes_a_parameter(state)
    assert found == pytest.approx(_documented(f"optax.{name}"), abs=0.005)
