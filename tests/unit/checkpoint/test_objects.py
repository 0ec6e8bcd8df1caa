"""Objects that a checkpoint refuses: other types, no variables, states that are no JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg


def test_other_things_in_a_dict_are_refused() -> None:
    for other in ("text", keras.Variable(1.0)):
        with pytest.raises(TypeError, match=r"model\['a'\]=.* cannot be saved") as caught:
            sg.train.Checkpoint(model={"a": other, "b": np.zeros(2)})
        assert "a dict from names to Keras variables" in str(caught.value)


def test_bad_objects() -> None:
    with pytest.raises(TypeError, match="cannot be saved") as caught:
        sg.train.Checkpoint(step=3)
    assert "got int" in str(caught.value)
    with pytest.raises(ValueError, match="Checkpoint received an object named save_counter"):
        sg.train.Checkpoint(save_counter=sg.Variable(1))


def test_object_without_variables_cannot_be_saved(tmp_path: Path) -> None:
    unbuilt = keras.Sequential([keras.layers.Dense(2)])
    with pytest.raises(ValueError, match="has no variables yet"):
        sg.train.Checkpoint(model=unbuilt).save(tmp_path / "ckpt")
    assert not list(tmp_path.iterdir())


class Reader:
    """An object with a JSON state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


def test_state_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match=r"reader\.get_state\(\) returned a value that JSON cannot store"
    ):
        sg.train.Checkpoint(reader=Reader(b"bytes")).save(tmp_path / "ckpt")
    assert not list(tmp_path.iterdir())


def test_object_of_another_kind_changes_nothing(tmp_path: Path) -> None:
    step, reader = sg.Variable(1, dtype="int32"), Reader(5)
    path = sg.train.Checkpoint(step=step, thing=sg.Variable(2.0)).save(tmp_path / "ckpt")
    step.assign(9)
    with pytest.raises(ValueError, match="thing is a state here but was saved in"):
        sg.train.Checkpoint(step=step, thing=reader).restore(path)
    assert (int(step), reader.state) == (9, 5)
