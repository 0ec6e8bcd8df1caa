"""Errors of saving and restoring name the cause, and change nothing else."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg


def dense(units: int = 3, inputs: int = 2, count: int = 1) -> keras.Model:
    layers = [keras.layers.Dense(units) for _ in range(count)]
    return keras.Sequential([keras.layers.Input((inputs,)), *layers])


def test_another_shape_names_the_path_and_both_shapes(tmp_path: Path) -> None:
    path = sg.train.Checkpoint(model=dense(3)).save(tmp_path / "ckpt")
    other = dense(4)
    before = [np.asarray(variable.value) for variable in other.variables]
    with pytest.raises(ValueError, match="has shape") as caught:
        sg.train.Checkpoint(model=other).restore(path)
    assert re.search(
        r"model/trainable_variables/\S*kernel.* has shape \(2, 4\) here but \(2, 3\) in .*ckpt-1",
        str(caught.value),
    )
    for variable, value in zip(other.variables, before, strict=True):
        np.testing.assert_array_equal(variable.value, value)


def test_another_model_names_the_missing_variables(tmp_path: Path) -> None:
    path = sg.train.Checkpoint(model=dense(count=1)).save(tmp_path / "ckpt")
    with pytest.raises(ValueError, match=r"holds 2 variables of model, which has 4"):
        sg.train.Checkpoint(model=dense(count=2)).restore(path)


def test_unknown_object_name_tells_those_that_are_there(tmp_path: Path) -> None:
    path = sg.train.Checkpoint(step=sg.Variable(1)).save(tmp_path / "ckpt")
    with pytest.raises(ValueError, match="holds no epoch") as caught:
        sg.train.Checkpoint(epoch=sg.Variable(1)).restore(path)
    assert "save_counter, step" in str(caught.value)


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


def test_no_such_checkpoint_names_those_beside_it(tmp_path: Path) -> None:
    checkpoint = sg.train.Checkpoint(step=sg.Variable(1))
    checkpoint.save(tmp_path / "ckpt")
    with pytest.raises(sg.errors.NotFoundError, match=r"does not exist") as caught:
        checkpoint.restore(tmp_path / "ckpt-7")
    assert "ckpt-1" in str(caught.value)


def test_unfinished_checkpoint_is_not_found(tmp_path: Path) -> None:
    checkpoint = sg.train.Checkpoint(step=sg.Variable(1))
    path = Path(checkpoint.save(tmp_path / "ckpt"))
    (path / "commit_success.txt").unlink()
    with pytest.raises(sg.errors.NotFoundError, match="is not a complete checkpoint"):
        checkpoint.restore(path)


def error_of(work: Callable[[], None]) -> Exception | None:
    try:
        work()
    except (sg.errors.DataLossError, sg.errors.NotFoundError) as error:
        return error
    return None


def test_every_damaged_file_that_is_read_is_noticed(tmp_path: Path) -> None:
    """Truncated, changed or deleted files raise an error, or a second copy is read."""
    step = sg.Variable(np.arange(3000.0, dtype="float32"))
    checkpoint = sg.train.Checkpoint(step=step)
    whole = Path(checkpoint.save(tmp_path / "ckpt"))
    wanted = np.asarray(step.value)
    noticed = 0
    for file in sorted(p.relative_to(whole) for p in whole.rglob("*") if p.is_file()):
        if not str(file).startswith(("step", "_CHECKPOINT")):
            continue
        for damage in ("cut", "flipped", "gone"):
            copy = tmp_path / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(whole, copy)
            content = bytearray((copy / file).read_bytes())
            if damage == "gone":
                (copy / file).unlink()
            else:
                content[len(content) // 2] ^= 0xFF
                keep = len(content) // 2 if damage == "cut" else len(content)
                (copy / file).write_bytes(content[:keep])
            step.assign(np.zeros(3000))
            error = error_of(lambda copy=copy: checkpoint.restore(copy))
            if error is not None:
                assert str(copy) in str(error)
                noticed += 1
                assert not np.any(np.asarray(step.value)), (file, damage)
            else:
                np.testing.assert_array_equal(step.value, wanted, err_msg=f"{file} {damage}")
    assert noticed >= 9


def test_later_format_and_foreign_checkpoint_are_refused(tmp_path: Path) -> None:
    ocp = pytest.importorskip("orbax.checkpoint.experimental.v1")
    checkpoint = sg.train.Checkpoint(step=sg.Variable(1))
    ocp.save_checkpointables(tmp_path / "theirs", {"x": {"y": np.zeros(2)}})
    with pytest.raises(ValueError, match=r"was not written by sg\.train\.Checkpoint"):
        checkpoint.restore(tmp_path / "theirs")
    ocp.save_checkpointables(
        tmp_path / "later", {"x": {"y": np.zeros(2)}}, custom_metadata={"format": 99}
    )
    with pytest.raises(ValueError, match="has format 99"):
        checkpoint.restore(tmp_path / "later")


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


def test_name_that_is_taken_is_left_as_it_is(tmp_path: Path) -> None:
    step = sg.Variable(1, dtype="int32")
    checkpoint = sg.train.Checkpoint(step=step)
    checkpoint.write(tmp_path / "ckpt")
    step.assign(2)
    with pytest.raises(FileExistsError, match="already exists"):
        checkpoint.write(tmp_path / "ckpt")
    checkpoint.read(tmp_path / "ckpt")
    assert int(step) == 1


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    checkpoint = sg.train.Checkpoint(step=sg.Variable(1))
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="could not be written"):
        checkpoint.save(tmp_path / "file" / "ckpt")
    assert int(checkpoint.save_counter) == 0
