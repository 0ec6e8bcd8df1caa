"""The best model among the checkpoints that an evaluator has seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from tests.parity.comparison import regression

_X, _Y = regression(8)


def _model() -> Any:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", loss="mse", metrics=["mae"])
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    return _model()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four epochs, of which the second is better than the first and the fourth is the best."""
    folder, trainer = tmp_path_factory.mktemp("checkpoints"), _model()
    for epoch, bias in enumerate([8.0, 2.0, 4.0, 1.0], start=1):
        trainer.set_weights([np.zeros((3, 1)), np.array([float(_Y.mean()) + bias])])
        trainer.save_weights(folder / f"run2_{epoch:03d}_of_99.weights.h5")
    return folder


def _start(model: Any, checkpoints: Path, export: Any) -> list[Any]:
    return sg.SidecarEvaluator(
        model,
        (_X, _Y),
        checkpoints,
        max_evaluations=4,
        callbacks=[export],
        every_checkpoint=True,
        poll_s=0.001,
    ).start()


@pytest.mark.parametrize("monitor", ["loss", "val_loss", "mae"])
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
    best = _model()
    best.load_weights(saved[-1])
    np.testing.assert_allclose(best.get_weights()[1], [_Y.mean() + 1], rtol=1e-6)


def test_worst_is_kept_where_more_is_better(model, checkpoints, tmp_path) -> None:
    path = tmp_path / "best.keras"
    export = sg.SidecarEvaluatorModelExport(path, monitor="mae", mode="max")
    evaluations = _start(model, checkpoints, export)
    assert export.best == max(one.logs["mae"] for one in evaluations) == evaluations[0].logs["mae"]
    kept = keras.models.load_model(path)
    np.testing.assert_allclose(kept.get_weights()[1], [_Y.mean() + 8], rtol=1e-6)


def test_metric_stands_in_the_name_of_the_file(model, checkpoints, tmp_path) -> None:
    export = sg.SidecarEvaluatorModelExport(tmp_path / "{val_loss:.3f}-{mae:.2f}.keras")
    evaluations = _start(model, checkpoints, export)
    best = evaluations[3].logs
    assert (tmp_path / f"{best['loss']:.3f}-{best['mae']:.2f}.keras").exists()


def test_nothing_is_saved_that_is_not_better_than_the_threshold(
    model, checkpoints, tmp_path
) -> None:
    path = tmp_path / "best.keras"
    _start(model, checkpoints, sg.SidecarEvaluatorModelExport(path, initial_value_threshold=1e-9))
    assert not path.exists()


def test_name_that_needs_an_epoch_that_nobody_knows_is_an_error(model, tmp_path) -> None:
    model.save_weights(tmp_path / "latest.weights.h5")
    export = sg.SidecarEvaluatorModelExport(tmp_path / "best" / "{epoch}.keras")
    with pytest.raises(
        ValueError, match=r"needs an epoch, but the name of latest\.weights\.h5 contains none"
    ):
        _start(model, tmp_path, export)


def test_metric_that_is_not_measured_is_an_error(model, checkpoints, tmp_path) -> None:
    export = sg.SidecarEvaluatorModelExport(tmp_path / "best.keras", monitor="accuracy")
    with pytest.raises(
        ValueError, match=r"'val_accuracy' is not among the metrics: \['loss', 'mae'\]"
    ):
        _start(model, checkpoints, export)


def test_it_is_not_for_training(model, tmp_path) -> None:
    export = sg.SidecarEvaluatorModelExport(tmp_path / "best.keras")
    with pytest.raises(ValueError, match="SidecarEvaluatorModelExport was given to fit"):
        model.fit(_X, _Y, verbose=0, callbacks=[export])


def test_other_frequencies_are_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="save_freq=3 is not supported in an evaluator"):
        sg.SidecarEvaluatorModelExport(tmp_path / "best.keras", save_freq=3)
