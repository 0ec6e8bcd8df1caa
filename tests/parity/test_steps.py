"""How `fit` runs its steps: several a call, eagerly, one's own; with callbacks and files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import pytest

from tests.parity.comparison import (
    BATCH_SIZE,
    Scope,
    assert_like_plain_keras,
    carried_out,
    differences,
    evaluated,
    fitted,
    mirrored,
    plain_keras,
    regression,
    small_regressor,
    with_known_weights,
)


def _compiled(scope: Scope, **compile_arguments: Any) -> Any:
    with scope():
        model = small_regressor()
        model.compile(
            optimizer=keras.optimizers.Adam(0.05), loss="mse", metrics=["mae"], **compile_arguments
        )
    return model


def _job(scope: Scope, **compile_arguments: Any) -> dict[str, Any]:
    """Five steps an epoch, the last of them with 2 examples of 4."""
    x, y = regression(num_examples=18)
    model = _compiled(scope, **compile_arguments)
    measured = fitted(model, x, y, batch_size=4) | evaluated(model, x, y, batch_size=4)
    return {**measured, "predict": model.predict(x, batch_size=4, verbose=0)}


@pytest.fixture(scope="module")
def one_step_at_a_time() -> dict[str, Any]:
    return plain_keras(_job)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [3, 7])
def test_several_steps_a_call(steps: int, one_step_at_a_time: dict[str, Any]) -> None:
    measured = carried_out(lambda scope: _job(scope, steps_per_execution=steps), mirrored(2).scope)
    assert differences(measured, one_step_at_a_time) == []


@pytest.mark.slow
def test_eager_training() -> None:
    def job(scope: Scope) -> dict[str, Any]:
        x, y = regression(num_examples=5)
        with scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            with_known_weights(model)
            model.compile(optimizer="sgd", loss="mse", metrics=["mae"], run_eagerly=True)
        return fitted(model, x, y, epochs=1)

    assert_like_plain_keras(job)


def test_training_goes_on_where_it_stopped() -> None:
    def job(scope: Scope) -> dict[str, Any]:
        model, (x, y) = _compiled(scope), regression()
        fitted(model, x, y, epochs=1)
        return fitted(model, x, y, epochs=3, initial_epoch=1)

    assert_like_plain_keras(job, replicas=(2,))


class _OwnLoss(keras.Model):
    """Twice the compiled loss plus a penalty, through the public hook."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return 2.0 * loss + 0.1 * keras.ops.sum(keras.ops.square(self.dense.kernel))


def _own_model_job(make_model: Any, *, is_weighted: bool) -> Any:
    def job(scope: Scope) -> dict[str, Any]:
        x, y = regression()
        weights = np.linspace(0.1, 2.0, len(x), dtype="float32") if is_weighted else None
        with scope():
            model = make_model()
            model.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse", metrics=["mae"])
        return fitted(model, x, y, sample_weight=weights)

    return job


def test_own_compute_loss() -> None:
    assert_like_plain_keras(_own_model_job(_OwnLoss, is_weighted=True))


class _OwnStep(keras.Model):
    """A training step written as in Keras's guide for JAX."""

    def train_step(self, state: Any, data: Any) -> tuple[dict[str, Any], Any]:
        trainable, non_trainable, optimizer_state, metric_state = state
        x, y = data
        gradient_of = jax.value_and_grad(self._loss_and_predictions, has_aux=True)
        (loss, (predictions, non_trainable)), gradients = gradient_of(
            trainable, non_trainable, x, y
        )
        trainable, optimizer_state = self.optimizer.stateless_apply(
            optimizer_state, gradients, trainable
        )
        logs, updated = {}, []
        for metric in self.metrics:
            size = len(metric.variables)
            own, metric_state = metric_state[:size], metric_state[size:]
            seen = (loss,) if metric.name == "loss" else (y, predictions)
            own = metric.stateless_update_state(own, *seen)
            result = metric.stateless_result(own)
            logs |= result if isinstance(result, dict) else {metric.name: result}
            updated += own
        return logs, (trainable, non_trainable, optimizer_state, updated)

    def _loss_and_predictions(self, trainable: Any, non_trainable: Any, x: Any, y: Any) -> Any:
        predictions, non_trainable = self.stateless_call(trainable, non_trainable, x, training=True)
        return self.compute_loss(x, y, predictions), (predictions, non_trainable)


def _own_step_model() -> Any:
    inputs = keras.Input((3,))
    return with_known_weights(_OwnStep(inputs, keras.layers.Dense(1)(inputs)))


def test_own_train_step() -> None:
    measured = assert_like_plain_keras(
        lambda scope: {
            key: value
            for key, value in _own_model_job(_own_step_model, is_weighted=False)(scope).items()
            # A metric without weights averages the losses of batches, not those of examples.
            if key != "fit loss"
        }
    )
    assert "fit mae" in measured


@pytest.mark.slow
def test_own_train_step_reports_the_loss_of_full_batches() -> None:
    def job(scope: Scope) -> dict[str, Any]:
        x, y = regression(num_examples=12)
        with scope():
            model = _own_step_model()
            model.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")
        return fitted(model, x, y, batch_size=6)

    assert_like_plain_keras(job)


@pytest.mark.slow
def test_early_stopping_decides_alike() -> None:
    def job(scope: Scope) -> dict[str, Any]:
        x, y = regression()
        stopping = keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
        model = _compiled(scope)
        measured = fitted(
            model,
            x,
            y,
            batch_size=4,
            epochs=6,
            callbacks=[stopping],
            validation_data=(x[:5], -y[:5]),
        )
        return {**measured, "stopped": stopping.stopped_epoch}

    assert 0 < assert_like_plain_keras(job)["stopped"] < 5


def test_learning_rate_set_by_callbacks() -> None:
    def job(scope: Scope) -> dict[str, Any]:
        model, (x, y) = _compiled(scope), regression()
        callbacks = [
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
            keras.callbacks.ReduceLROnPlateau("loss", patience=0, factor=0.1, min_delta=100.0),
        ]
        return fitted(model, x, y, epochs=3, callbacks=callbacks)

    rates = assert_like_plain_keras(job, replicas=(2,))["fit learning_rate"]
    assert rates[-1] < rates[0] / 10


def test_checkpoints_of_callbacks_hold_the_best_weights(tmp_path: Path) -> None:
    def job(scope: Scope) -> dict[str, Any]:
        model, (x, y) = _compiled(scope), regression()
        path = tmp_path / "best.weights.h5"
        path.unlink(missing_ok=True)
        checkpoint = keras.callbacks.ModelCheckpoint(
            path, monitor="loss", save_best_only=True, save_weights_only=True
        )
        fitted(model, x, y, callbacks=[checkpoint])
        reread = small_regressor()
        reread.load_weights(path)
        return {variable.path: np.asarray(variable.value) for variable in reread.weights}

    assert_like_plain_keras(job, replicas=(2,))


_READ_IN_PLAIN_KERAS = """
import sys
import keras, numpy
folder = sys.argv[1]
model = keras.models.load_model(folder + "/model.keras")
data = numpy.load(folder + "/data.npz")
predicted = model.predict(data["x"], verbose=0)
history = model.fit(data["x"], data["y"], batch_size=5, shuffle=False, verbose=0)
assert not [name for name in sys.modules if name.partition(".")[0] == "stratagem"]
numpy.savez(folder + "/read.npz", predicted=predicted, loss=history.history["loss"])
"""


@pytest.mark.slow
def test_saved_model_goes_on_in_plain_keras_in_a_fresh_process(tmp_path: Path) -> None:
    x, y = regression()
    model = _compiled(mirrored(3).scope)
    fitted(model, x, y)
    model.save(tmp_path / "model.keras")
    np.savez(tmp_path / "data.npz", x=x, y=y)
    predicted = model.predict(x, batch_size=BATCH_SIZE, verbose=0)
    history = fitted(model, x, y, epochs=1)
    subprocess.run(
        [sys.executable, "-c", _READ_IN_PLAIN_KERAS, str(tmp_path)],
        check=True,
        cwd=tmp_path,
        env=os.environ | {"KERAS_BACKEND": "jax"},
    )
    with np.load(tmp_path / "read.npz") as read:
        np.testing.assert_allclose(read["predicted"], predicted, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(read["loss"], history["fit loss"], rtol=1e-5)


@pytest.mark.slow
def test_model_saved_by_plain_keras_goes_on_under_a_strategy(tmp_path: Path) -> None:
    path = tmp_path / "model.keras"
    plain_keras(lambda scope: _save_trained(scope, path))

    def job(scope: Scope) -> dict[str, Any]:
        x, y = regression()
        with scope():
            model = keras.models.load_model(path)
        return fitted(model, x, y)

    assert_like_plain_keras(job)


def _save_trained(scope: Scope, path: Path) -> dict[str, Any]:
    model, (x, y) = _compiled(scope), regression()
    measured = fitted(model, x, y)
    model.save(path)
    return measured
