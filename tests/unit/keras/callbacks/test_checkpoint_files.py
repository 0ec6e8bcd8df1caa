"""Checkpoints that Keras writes: which are there, and what reading one does."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.keras.callbacks import checkpoint_loop as checkpoint_files
from stratagem.keras.callbacks.checkpoint_loop import (
    PATIENCE_S,
    CheckpointFile,
    CheckpointFollower,
    KerasFiles,
    UnreadableCheckpointError,
)
from tests.fresh_process import run_fresh
from tests.parity.comparison import regression


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
    names = "ckpt-2.h5 ckpt-9.keras ckpt-9a.keras ckpt-10.keras ckpt-100.weights.h5 ckpt-1.keras"
    assert [one.name for one in KerasFiles().find(tmp_path)] == names.split()


KINDS = ("weights.h5", "keras")


@pytest.mark.parametrize(
    "name",
    [*(pytest.param(f"a.{kind}", marks=pytest.mark.compatibility) for kind in KINDS), "a.h5"],
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


# Which checkpoints of a folder are new and complete, look by look, without any file.

_FOLDER = Path("folder")


def _checkpoint(name: str, modified: int = 0, size: int = 1) -> CheckpointFile:
    return CheckpointFile(path=_FOLDER / f"{name}.keras", modified_ns=modified, size_bytes=size)


A, A_LONGER, A_LATER = _checkpoint("a"), _checkpoint("a", size=2), _checkpoint("a", modified=9)
B, C = _checkpoint("b", modified=1), _checkpoint("c", modified=2)


class _Shown:
    """A folder in which each look finds what the test says."""

    names = "*.keras"

    def __init__(self) -> None:
        self.now: Sequence[CheckpointFile] = ()

    def find(self, folder: Path) -> Sequence[CheckpointFile]:
        assert folder == _FOLDER
        return self.now


class _Follower(CheckpointFollower):
    def __init__(self) -> None:
        self.shown = _Shown()
        super().__init__(self.shown, _FOLDER, 100.0)

    def sees(
        self, *shown: CheckpointFile, at_s: float = 100.0, is_last: bool = False
    ) -> list[CheckpointFile]:
        self.shown.now = shown
        return self.look(at_s, is_last=is_last)


def test_checkpoint_is_complete_when_it_has_not_changed_and_comes_again_when_it_does() -> None:
    follower = _Follower()
    assert follower.sees(A_LONGER) == []
    assert follower.sees() == []
    assert follower.sees(A, B) == []
    assert follower.has_newer(A)
    assert not follower.has_newer(B)
    assert follower.sees(A, B) == [A, B]
    follower.finish(A)
    assert follower.sees(A, B) == [B]
    assert follower.sees(A_LATER, B) == [B]
    assert follower.sees(A_LATER, B) == [A_LATER, B]


def test_unreadable_one_is_left_alone_until_it_changes_or_patience_ends() -> None:
    follower = _Follower()
    follower.sees(A)
    assert follower.sees(A) == [A]
    assert follower.postpone(A, 100.0)
    assert follower.sees(A, at_s=100.0 + PATIENCE_S / 2) == []
    assert follower.sees(A, at_s=100.0 + PATIENCE_S / 2, is_last=True) == [A]
    assert follower.sees(A, at_s=100.0 + PATIENCE_S) == [A]
    assert not follower.postpone(A, 100.0 + PATIENCE_S)
    # It goes on.
    assert follower.sees(A_LONGER, at_s=100.0 + PATIENCE_S) == []
    assert follower.sees(A_LONGER, at_s=100.0 + PATIENCE_S) == [A_LONGER]
    assert follower.postpone(A_LONGER, 100.0 + PATIENCE_S)


def test_names_are_counted_or_how_often_the_one_name_was_written() -> None:
    # The fourth is training that starts again, and writes an epoch a second time.
    every = [[], [A], [A, B, C], [A, B, A_LATER], [A, A_LONGER, A_LATER]]
    for done, count in zip(every, [0, 1, 3, 2, 3], strict=True):
        follower = _Follower()
        for checkpoint in done:
            follower.finish(checkpoint)
        assert follower.num_done == count, done


# The best model among the checkpoints that an evaluator has seen.

_X, _Y = regression(8)


def _model_of_sidecar_export() -> Any:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", loss="mse", metrics=["mae"])
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    return _model_of_sidecar_export()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four epochs, of which the second is better than the first and the fourth is the best."""
    folder, trainer = tmp_path_factory.mktemp("checkpoints"), _model_of_sidecar_export()
    for epoch, bias in enumerate([8.0, 2.0, 4.0, 1.0], start=1):
        trainer.set_weights([np.zeros((3, 1)), np.array([float(_Y.mean()) + bias])])
        trainer.save_weights(folder / f"run2_{epoch:03d}_of_99.weights.h5")
    return folder


def _start(model: Any, checkpoints: Path, export: Any) -> list[Any]:
    given: Any = {"max_evaluations": 4, "every_checkpoint": True, "poll_s": 0.001}
    return sg.SidecarEvaluator(model, (_X, _Y), checkpoints, callbacks=[export], **given).start()


@pytest.mark.parametrize("monitor", ["val_loss", "mae"])
def test_each_better_one_is_saved_under_its_epoch(model, checkpoints, tmp_path, monitor) -> None:
    export = sg.SidecarEvaluatorModelExport(
        tmp_path / "best" / "{epoch:02d}.weights.h5",
        "elsewhere/run2_{epoch:03d}_of_{total}.weights.h5",
        monitor=monitor,
        mode="min",
        save_weights_only=True,
        save_freq="eval",
    )
    _start(model, checkpoints, export)
    saved = sorted((tmp_path / "best").iterdir())
    assert [path.name for path in saved] == ["01.weights.h5", "02.weights.h5", "04.weights.h5"]
    best = _model_of_sidecar_export()
    best.load_weights(saved[-1])
    np.testing.assert_allclose(best.get_weights()[1], [_Y.mean() + 1], rtol=1e-6)


def test_wrong_exports_are_errors(model, checkpoints, tmp_path) -> None:
    export = sg.SidecarEvaluatorModelExport(tmp_path / "best.keras", monitor="accuracy")
    words = r"'val_accuracy' is not among the metrics: \['loss', 'mae'\]"
    with pytest.raises(ValueError, match=words):
        _start(model, checkpoints, export)
    with pytest.raises(ValueError, match="SidecarEvaluatorModelExport was given to fit"):
        model.fit(_X, _Y, verbose=0, callbacks=[export])
    with pytest.raises(ValueError, match="save_freq=3 is not supported in an evaluator"):
        sg.SidecarEvaluatorModelExport(tmp_path / "best.keras", save_freq=3)
    model.save_weights(tmp_path / "latest.weights.h5")
    export = sg.SidecarEvaluatorModelExport(tmp_path / "best" / "{epoch}.keras")
    words = r"needs an epoch, but the name of latest\.weights\.h5 contains none"
    with pytest.raises(ValueError, match=words):
        _start(model, tmp_path, export)


def test_only_what_is_better_than_the_threshold_is_saved(model, checkpoints, tmp_path) -> None:
    name = tmp_path / "{val_loss:.3f}-{mae:.2f}.keras"
    _start(model, checkpoints, sg.SidecarEvaluatorModelExport(name, initial_value_threshold=1e-9))
    assert not list(tmp_path.iterdir())
    best = _start(model, checkpoints, sg.SidecarEvaluatorModelExport(name))[3].logs
    assert (tmp_path / f"{best['loss']:.3f}-{best['mae']:.2f}.keras").exists()


def test_worst_is_kept_where_more_is_better(model, checkpoints, tmp_path) -> None:
    path = tmp_path / "best.keras"
    export = sg.SidecarEvaluatorModelExport(path, monitor="mae", mode="max")
    evaluations = _start(model, checkpoints, export)
    assert export.best == max(one.logs["mae"] for one in evaluations) == evaluations[0].logs["mae"]
    kept = keras.models.load_model(path)
    np.testing.assert_allclose(kept.get_weights()[1], [_Y.mean() + 8], rtol=1e-6)
