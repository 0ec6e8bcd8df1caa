"""Checkpoints that Keras writes: which are there, and what reading one does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from stratagem.keras.evaluation import checkpoint_loop as checkpoint_files
from stratagem.keras.evaluation.checkpoint_loop import (
    CheckpointFile,
    KerasFiles,
    UnreadableCheckpointError,
)
from tests.fresh_process import run_fresh


def _model(num_units: int = 2) -> Any:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(num_units, name="dense")])
    model.set_weights([np.full((3, num_units), 0.5), np.arange(num_units)])
    return model


def _touch(folder: Path, name: str, modified_s: float) -> None:
    (folder / name).write_text(name)
    os.utime(folder / name, (modified_s, modified_s))


@pytest.mark.parametrize(
    ("name", "epoch"),
    [
        ("ckpt-0007.weights.h5", 7),
        ("ckpt_12.keras", 12),
        ("7.keras", 7),
        ("epoch03.weights.h5", 3),
        ("ckpt12.h5", 12),
        # Keras's own examples.
        ("07-0.35.keras", 7),
        ("weights.07-0.35.weights.h5", 7),
        ("model-2-epoch=07.keras", 7),
        ("epoch03-batch100.keras", 3),
        ("best.keras", None),
        ("resnet50.weights.h5", None),
        ("val-0.35.weights.h5", None),
        ("model-v2.keras", None),
        ("step-30", 30),
    ],
)
def test_epoch_is_the_last_number_that_stands_by_itself(name, epoch) -> None:
    assert CheckpointFile(path=Path("folder", name), modified_ns=1, size_bytes=1).epoch == epoch


def test_files_are_found_in_the_order_of_time_and_then_of_numbers(tmp_path) -> None:
    for name in ("ckpt-10.keras", "ckpt-9.keras", "ckpt-9a.keras", "ckpt-100.weights.h5"):
        _touch(tmp_path, name, 50)
    _touch(tmp_path, "ckpt-1.keras", 60)
    _touch(tmp_path, "ckpt-2.h5", 40)
    for name in ("history.csv", ".ckpt-3.keras", "ckpt-4.keras.part"):
        _touch(tmp_path, name, 70)
    (tmp_path / "ckpt-5.keras").mkdir()
    assert [one.name for one in KerasFiles().find(tmp_path)] == [
        "ckpt-2.h5",
        "ckpt-9.keras",
        "ckpt-9a.keras",
        "ckpt-10.keras",
        "ckpt-100.weights.h5",
        "ckpt-1.keras",
    ]


def test_folder_that_is_not_there_has_none(tmp_path) -> None:
    assert KerasFiles().find(tmp_path / "later") == []


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("a.weights.h5", marks=pytest.mark.compatibility),
        pytest.param("a.keras", marks=pytest.mark.compatibility),
        "a.h5",
    ],
)
def test_file_of_every_kind_is_loaded(name, tmp_path) -> None:
    written, model = _model(), _model()
    written.set_weights([np.full((3, 2), -1.0), np.ones(2)])
    save = written.save_weights if name == "a.weights.h5" else written.save
    save(tmp_path / name)
    (found,) = KerasFiles().find(tmp_path)
    KerasFiles().load(found, model)
    np.testing.assert_array_equal(model.get_weights()[0], np.full((3, 2), -1.0))
    np.testing.assert_array_equal(model.get_weights()[1], np.ones(2))


@pytest.mark.compatibility
@pytest.mark.parametrize("name", ["a.weights.h5", "a.keras"])
@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.999])
def test_file_that_is_not_whole_is_unreadable_and_changes_nothing(name, share, tmp_path) -> None:
    model = _model()
    (model.save_weights if name == "a.weights.h5" else model.save)(tmp_path / name)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: int(share * len(whole))])
    (found,) = KerasFiles().find(tmp_path)
    model.set_weights([np.zeros((3, 2)), np.zeros(2)])
    with pytest.raises(UnreadableCheckpointError, match=r"OSError|BadZipFile"):
        KerasFiles().load(found, model)
    assert not np.any(model.get_weights()[0])


def test_file_that_is_open_for_writing_is_unreadable_at_every_moment(tmp_path, monkeypatch) -> None:
    import h5py

    written, model = _model(), _model()
    path = tmp_path / "a.weights.h5"
    create, states = h5py.Group.create_dataset, []

    def created(*args: Any, **kwargs: Any) -> Any:
        dataset = create(*args, **kwargs)
        states.append(path.read_bytes())
        return dataset

    monkeypatch.setattr(h5py.Group, "create_dataset", created)
    written.save_weights(path)
    assert len(states) >= 2
    for state in states:
        path.write_bytes(state)
        with pytest.raises(UnreadableCheckpointError, match="OSError"):
            KerasFiles().load(KerasFiles().find(tmp_path)[0], model)


@pytest.mark.compatibility
def test_file_of_another_model_is_an_error_that_names_it(tmp_path) -> None:
    _model(5).save_weights(tmp_path / "a.weights.h5")
    (found,) = KerasFiles().find(tmp_path)
    with pytest.raises(ValueError, match=r"a\.weights\.h5 does not fit the model: (?s:.)*shape"):
        KerasFiles().load(found, _model(2))


def test_file_that_has_gone_is_not_found(tmp_path) -> None:
    _model().save_weights(tmp_path / "a.weights.h5")
    (found,) = KerasFiles().find(tmp_path)
    found.path.unlink()
    with pytest.raises(FileNotFoundError, match=r"a\.weights\.h5"):
        KerasFiles().load(found, _model())


def test_file_that_is_written_again_meanwhile_is_unreadable(tmp_path, monkeypatch) -> None:
    _model().save_weights(tmp_path / "a.weights.h5")
    (found,) = KerasFiles().find(tmp_path)
    copy = shutil.copyfile

    def copied(source: Path, target: Path) -> None:
        copy(source, target)
        os.utime(source, (1, 1))

    monkeypatch.setattr(checkpoint_files.shutil, "copyfile", copied)
    with pytest.raises(UnreadableCheckpointError, match="was written again while it was read"):
        KerasFiles().load(found, _model())


def test_file_can_be_written_while_it_is_loaded(tmp_path) -> None:
    """HDF5 refuses to open a file for writing that somebody reads, and training would fail."""
    path = tmp_path / "a.weights.h5"
    again = f"import h5py; h5py.File({str(path)!r}, 'w').close(); print('written')"
    printed: list[str] = []

    class Dense(keras.layers.Dense):  # Keras looks for weights under the name of the class
        def load_own_variables(self, store: Any) -> None:
            printed.extend(run_fresh(again))
            super().load_own_variables(store)

    model = keras.Sequential([keras.Input((3,)), Dense(2, name="dense")])
    _model().save_weights(path)
    KerasFiles().load(KerasFiles().find(tmp_path)[0], model)
    assert printed == ["written"]
    np.testing.assert_array_equal(model.get_weights()[0], np.full((3, 2), 0.5))
