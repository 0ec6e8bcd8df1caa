"""Searches of KerasTuner: the strategy is given to the tuner, or models are built in its scope."""

from __future__ import annotations

import tempfile
from typing import Any

import keras
import keras_tuner
import numpy as np

from validation.third_party.programs.measuring import Measurements, Place, Program, state_of

_BATCH_SIZE = 4


def _examples() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(9)
    x = random.standard_normal((11, 3)).astype("float32")
    return x, (x.sum(axis=1, keepdims=True) > 0).astype("float32")


def _build(parameters: keras_tuner.HyperParameters) -> Any:
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(parameters.Int("units", 2, 6, step=2), "tanh"),
            keras.layers.Dense(1, "sigmoid"),
        ]
    )
    rate = parameters.Float("learning_rate", 1e-2, 1.0, sampling="log")
    model.compile(keras.optimizers.SGD(rate), loss="binary_crossentropy", metrics=["accuracy"])
    return model


def _search(tuner: Any, place: Place) -> Measurements:
    """Searches, then reports every trial and the best model, which is built and loaded anew."""
    x, y = _examples()
    tuner.search(
        x[:7],
        y[:7],
        validation_data=(x[7:], y[7:]),
        epochs=2,
        batch_size=_BATCH_SIZE,
        shuffle=False,
        verbose=0,
    )
    results: dict[str, Any] = {}
    for number, trial in enumerate(tuner.oracle.get_best_trials(num_trials=3)):
        results[f"trial {number} score"] = trial.score
        results |= {f"trial {number} {key}": v for key, v in trial.hyperparameters.values.items()}
    (best,) = tuner.get_best_models(num_models=1)
    retrained = tuner.hypermodel.build(tuner.get_best_hyperparameters()[0])
    return {
        **results,
        **state_of(place.check(best)),
        "best loss": best.evaluate(x, y, batch_size=_BATCH_SIZE, verbose=0),
        "best predictions": best.predict(x, batch_size=_BATCH_SIZE, verbose=0),
        "units of the model to retrain": retrained.layers[0].units,
    }


def random_search(place: Place) -> Measurements:
    """The argument `distribution_strategy` takes the strategy as it took TensorFlow's."""
    with tempfile.TemporaryDirectory() as folder:
        tuner = keras_tuner.RandomSearch(
            _build,
            objective="val_loss",
            max_trials=3,
            seed=5,
            directory=folder,
            distribution_strategy=place.strategy,
        )
        return _search(tuner, place)


class _ScopedModel(keras_tuner.HyperModel):
    """Builds models in a scope of its own."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place = place

    def build(self, hp: keras_tuner.HyperParameters) -> Any:
        with self._place.scope():
            return _build(hp)

    def fit(self, hp: keras_tuner.HyperParameters, model: Any, *data: Any, **options: Any) -> Any:
        options["batch_size"] = hp.Choice("batch_size", [3, 5])
        return model.fit(*data, **options)


def hyperband(place: Place) -> Measurements:
    """A hypermodel that builds in the scope, and tunes the batch size; trials go on from others."""
    with tempfile.TemporaryDirectory() as folder:
        tuner = keras_tuner.Hyperband(
            _ScopedModel(place),
            objective="val_loss",
            max_epochs=2,
            factor=2,
            seed=6,
            directory=folder,
        )
        return _search(tuner, place)


PROGRAMS: dict[str, Program] = {program.__name__: program for program in (random_search, hyperband)}
