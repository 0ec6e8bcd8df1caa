"""The global random state is saved, and drawn from again."""

from __future__ import annotations

import json
import random
import sys
import types
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg


def draw() -> list[Any]:
    return [
        random.random(),
        random.gauss(0.0, 1.0),  # keeps a second number for the next call
        np.random.random(),
        np.random.standard_normal(),
        np.random.permutation(9).tolist(),
        np.asarray(keras.random.uniform((2,))).tolist(),
    ]


@pytest.mark.parametrize("has_drawn", [False, True])
def test_what_was_drawn_is_drawn_again(has_drawn: bool, tmp_path: Path) -> None:
    keras.utils.set_random_seed(1)
    if has_drawn:
        draw()
    checkpoint = sg.train.Checkpoint(random=sg.train.RandomState())
    path = checkpoint.save(tmp_path / "ckpt")
    first, second = draw(), draw()
    assert first != second
    keras.utils.set_random_seed(2)
    assert draw() != first
    checkpoint.restore(path)
    assert [draw(), draw()] == [first, second]


def test_state_is_json_and_survives_another_process() -> None:
    state = sg.train.RandomState().get_state()
    wanted = draw()
    sg.train.RandomState().set_state(json.loads(json.dumps(state)))
    assert draw() == wanted


def test_torch_is_asked_where_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tensor:
        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def numpy(self) -> np.ndarray:
            return self.array

    module: Any = types.ModuleType("torch")
    module.state = np.arange(5, dtype=np.uint8)
    module.get_rng_state = lambda: Tensor(module.state)
    module.set_rng_state = lambda tensor: setattr(module, "state", tensor.array)
    module.from_numpy = Tensor
    monkeypatch.setitem(sys.modules, "torch", module)
    state = sg.train.RandomState().get_state()
    module.state = np.zeros(5, dtype=np.uint8)
    sg.train.RandomState().set_state(json.loads(json.dumps(state)))
    assert module.state.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("state", [{}, None, {"python": 1}])
def test_state_of_something_else_is_reported(state: Any) -> None:
    with pytest.raises(ValueError, match=r"RandomState.set_state received"):
        sg.train.RandomState().set_state(state)
