"""Keras models as estimators of scikit-learn, in its pipelines and cross-validation."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from validation.third_party.programs.measuring import Measurements, Place, Program, state_of

_BATCH_SIZE = 4


def _examples() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(14)
    x = random.standard_normal((15, 3)).astype("float32")
    return x, np.argmax(x, axis=1).astype("int32")


def _classifier(place: Place, num_features: int, units: int) -> Any:
    with place.scope():
        model = keras.Sequential(
            [
                keras.Input((num_features,)),
                keras.layers.Dense(units, "tanh", kernel_initializer=_draws(1)),
                keras.layers.Dense(3, "softmax", kernel_initializer=_draws(2)),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1), loss="categorical_crossentropy")
    return model


def _draws(seed: int) -> Any:
    """An initializer with a seed, because scikit-learn copies models."""
    return keras.initializers.GlorotUniform(seed)


def classifier(place: Place) -> Measurements:
    """A function that builds in the scope: fitted in a pipeline, and cross-validated."""
    x, y = _examples()

    def build(X: Any, y: Any, units: int) -> Any:  # noqa: N803 - the wrapper's name
        return _classifier(place, X.shape[1], units)

    fit = {"batch_size": _BATCH_SIZE, "epochs": 2, "shuffle": False, "verbose": 0}
    estimator = keras.wrappers.SKLearnClassifier(build, model_kwargs={"units": 4}, fit_kwargs=fit)
    pipeline = make_pipeline(StandardScaler(), estimator).fit(x, y)
    return {
        **state_of(place.check(pipeline[-1].model_)),
        "classes": pipeline.predict(x),
        "scores": cross_val_score(pipeline, x, y, cv=2),
        "probabilities": pipeline[-1].model_.predict(x, batch_size=_BATCH_SIZE, verbose=0),
    }


def classifier_of_a_model(place: Place) -> Measurements:
    """A compiled model, which the wrapper clones: `fit` is called in the scope."""
    x, y = _examples()
    fit = {"batch_size": _BATCH_SIZE, "epochs": 2, "shuffle": False, "verbose": 0}
    estimator = keras.wrappers.SKLearnClassifier(_classifier(place, 3, 4), fit_kwargs=fit)
    with place.scope():
        estimator.fit(x, y)
    return {**state_of(place.check(estimator.model_)), "classes": estimator.predict(x)}


PROGRAMS: dict[str, Program] = {
    program.__name__: program for program in (classifier, classifier_of_a_model)
}
