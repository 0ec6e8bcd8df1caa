"""Default hooks of a training run."""

from __future__ import annotations

import logging
import os

import keras
import pytest

import stratagem as sg
from tests.unit.estimator.model_functions import (
    dataset_of,
    dense_classifier,
    estimator_of,
    examples,
)

X, Y = examples(32)
DATA = dataset_of(X, Y, 4)


class Listener(sg.estimator.CheckpointSaverListener):
    def __init__(self, stop_at=None) -> None:
        self.saved = []
        self._stop_at = stop_at

    def after_save(self, session, global_step_value):
        self.saved.append(global_step_value)
        return global_step_value == self._stop_at


def checkpoints_in(folder) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.startswith("model.ckpt"))


def test_checkpoints_are_saved_as_often_as_the_config_says(tmp_path) -> None:
    listener = Listener()
    estimator = estimator_of(
        dense_classifier, tmp_path, save_checkpoints_steps=3, keep_checkpoint_max=2
    )
    estimator.train(DATA, saving_listeners=[listener])
    assert listener.saved == [0, 3, 6, 8]
    assert checkpoints_in(tmp_path) == ["model.ckpt-6", "model.ckpt-8"]
    assert estimator.latest_checkpoint() == str(tmp_path / "model.ckpt-8")


def test_a_listener_may_end_training(tmp_path) -> None:
    estimator = estimator_of(dense_classifier, tmp_path, save_checkpoints_steps=2)
    estimator.train(DATA, saving_listeners=[Listener(stop_at=4)])
    assert estimator.get_variable_value("global_step") == 4


def test_listeners_are_called_by_the_saver_of_the_user(tmp_path) -> None:
    listener = Listener()
    saver = sg.estimator.CheckpointSaverHook(tmp_path, save_steps=5)
    estimator = estimator_of(dense_classifier, tmp_path, save_checkpoints_steps=2)
    estimator.train(DATA, hooks=[saver], saving_listeners=[listener])
    assert listener.saved == [0, 5, 8]


def test_listeners_without_anything_that_saves_are_refused(tmp_path) -> None:
    estimator = estimator_of(dense_classifier, tmp_path, save_checkpoints_steps=None)
    with pytest.raises(
        ValueError, match="saving_listeners are set, but the RunConfig disables checkpoints"
    ):
        estimator.train(DATA, saving_listeners=[Listener()])


def test_loss_and_step_are_logged(tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO, logger="stratagem.estimator")
    estimator_of(dense_classifier, tmp_path, log_step_count_steps=4).train(DATA)
    lines = [record.getMessage() for record in caplog.records]
    steps = [line.split("step = ")[1].split()[0] for line in lines if "loss = " in line]
    assert steps == ["1", "5"]


@pytest.mark.slow
def test_scaffold_initializes_only_what_is_not_restored(tmp_path) -> None:
    calls = []

    def init_fn(scaffold, session):
        calls.append(session.global_step)

    def model_fn(features, labels, mode):
        spec = dense_classifier(features, labels, mode)
        scaffold = sg.estimator.Scaffold(init_fn=init_fn)
        return sg.estimator.EstimatorSpec(
            mode, loss=spec.loss, train_op=spec.train_op, scaffold=scaffold
        )

    estimator_of(model_fn, tmp_path).train(DATA, steps=1)
    estimator_of(model_fn, tmp_path).train(DATA, steps=1)
    assert calls == [0]


def test_hooks_of_the_model_function_run(tmp_path) -> None:
    def model_fn(features, labels, mode):
        spec = dense_classifier(features, labels, mode)
        stop = sg.estimator.StopAtStepHook(num_steps=3)
        return sg.estimator.EstimatorSpec(
            mode, loss=spec.loss, train_op=spec.train_op, training_chief_hooks=[stop]
        )

    estimator = estimator_of(model_fn, tmp_path)
    estimator.train(DATA)
    assert estimator.get_variable_value("global_step") == 3


def test_a_loss_that_is_not_finite_ends_training_where_a_hook_looks(tmp_path) -> None:
    def model_fn(features, labels, mode):
        loss = keras.ops.mean(keras.layers.Dense(1)(features)) * float("nan")
        return sg.estimator.EstimatorSpec(
            mode,
            loss=loss,
            train_op=keras.optimizers.SGD(),
            training_hooks=[sg.estimator.NanTensorHook(loss)],
        )

    with pytest.raises(sg.estimator.NanLossDuringTrainingError):
        estimator_of(model_fn, tmp_path).train(lambda: sg.input.Dataset(X, batch_size=4))
