"""Training and evaluation summaries that TensorBoard reads."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

import stratagem as sg
from stratagem.estimator.loops import training as training_summaries
from tests.unit.estimator.loops.test_training import Losses, two_players
from tests.unit.estimator.model_functions import (
    dataset_of,
    dense_classifier,
    estimator_of,
    examples,
)

X, Y = examples(32)


def scalars_in(folder) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    return {
        tag: [
            (event.step, tensor_util.make_ndarray(event.tensor_proto).item())
            for event in events.Tensors(tag)
        ]
        for tag in events.Tags()["tensors"]
    }


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_losses_and_what_the_model_function_writes(num_replicas, tmp_path) -> None:
    def model_fn(features, labels, mode):
        sg.summary.scalar("first", features[0, 0])
        return dense_classifier(features, labels, mode)

    strategy = sg.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    estimator = estimator_of(model_fn, tmp_path, strategy, save_summary_steps=3)
    losses = Losses()
    data = dataset_of(X, Y, 4 // num_replicas)
    estimator.train(data, hooks=[losses])
    found = scalars_in(tmp_path)
    assert [step for step, _ in found["loss"]] == [1, 4, 7]
    assert [value for _, value in found["loss"]] == pytest.approx(losses.values[::3])
    assert found["first"] == [(step, X[4 * (step - 1), 0]) for step in (1, 4, 7)]

    results = estimator.evaluate(data)
    evaluated = scalars_in(estimator.eval_dir())
    assert evaluated == {name: [(8, pytest.approx(results[name]))] for name in ("loss", "accuracy")}
    estimator.evaluate(data, name="again")
    assert scalars_in(tmp_path / "eval_again") == evaluated


def test_each_summary_is_written_once_however_often_the_function_is_called(tmp_path) -> None:
    def model_fn(features, labels, mode):
        sg.summary.scalar("one", 1.0)
        return two_players(features, labels, mode)

    estimator = estimator_of(model_fn, tmp_path, save_summary_steps=1)
    estimator.train(lambda: sg.input.Dataset(X, batch_size=16))
    assert scalars_in(tmp_path)["one"] == [(1, 1.0), (2, 1.0)]


def test_hooks_write_in_every_step(tmp_path) -> None:
    class Writer(sg.estimator.SessionRunHook):
        def after_run(self, run_context, run_values):
            session = run_context.session
            with session.summary_writer.as_default():
                sg.summary.scalar("hook", 0.5, step=session.global_step)

    estimator = estimator_of(dense_classifier, tmp_path, save_summary_steps=100)
    estimator.train(dataset_of(X, Y, 16), hooks=[Writer()])
    assert scalars_in(tmp_path)["hook"] == [(1, 0.5), (2, 0.5)]


@pytest.mark.slow
def test_without_tensorboard_training_goes_on(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(training_summaries.importlib.util, "find_spec", lambda name: None)
    caplog.set_level(logging.WARNING, logger="stratagem.estimator")
    estimator = estimator_of(dense_classifier, tmp_path)
    estimator.train(dataset_of(X, Y, 16))
    assert "pip install 'stratagem[tensorboard]'" in caplog.text
    assert not list(tmp_path.glob("events*"))
    assert np.isfinite(estimator.evaluate(dataset_of(X, Y, 16))["loss"])
