"""Values that hooks fetch, and the order of their calls."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import stratagem as sg
from tests.unit.estimator.model_functions import (
    dataset_of,
    dense_classifier,
    estimator_of,
    examples,
)

SessionRunArgs = sg.estimator.SessionRunArgs


class Recorder(sg.estimator.SessionRunHook):
    """Records its calls and fetches values in each step."""

    def __init__(self, fetches=None, stop_at=None) -> None:
        self.calls = []
        self.results = []
        self._fetches = fetches
        self._stop_at = stop_at

    def begin(self):
        self.calls.append("begin")

    def after_create_session(self, session, coord):
        self.calls.append(("created", session.global_step))
        self.session = session

    def before_run(self, run_context):
        self.calls.append(("before", run_context.session.global_step))
        return None if self._fetches is None else SessionRunArgs(self._fetches)

    def after_run(self, run_context, run_values):
        step = run_context.session.global_step
        self.calls.append(("after", step))
        self.results.append(run_values.results)
        if step == self._stop_at:
            run_context.request_stop()

    def end(self, session):
        self.calls.append(("end", session.global_step))


X, Y = examples(16)
DATA = dataset_of(X, Y, 4)


@pytest.mark.slow
def test_hooks_are_called_in_the_order_of_tensorflow(tmp_path) -> None:
    hook = Recorder()
    estimator = estimator_of(dense_classifier, tmp_path)
    estimator.train(DATA, hooks=[hook], steps=2)
    assert hook.calls == [
        "begin",
        ("created", 0),
        ("before", 0),
        ("after", 1),
        ("before", 1),
        ("after", 2),
        ("end", 2),
    ]
    assert hook.results == [None, None]
    again = Recorder(stop_at=3)
    estimator.train(DATA, hooks=[again])  # goes on, until the hook asks for the end
    assert again.calls == ["begin", ("created", 2), ("before", 2), ("after", 3), ("end", 3)]
    assert estimator.get_variable_value("global_step") == 3


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_names_variables_and_values_of_the_model_function(num_replicas, tmp_path) -> None:
    made = []

    def model_fn(features, labels, mode):
        layer = keras.layers.Dense(1, name="layer", kernel_initializer="ones")
        product = layer(features)
        mean = sg.estimator.identity(keras.ops.mean(features), name="mean")
        sg.estimator.identity(features.shape[0], name="rows")
        loss = keras.ops.mean(product**2)
        hook = Recorder({"loss": loss, "mean": mean, "kernel": layer.kernel})
        hook.tensors = {"loss": loss, "mean": mean}
        made.append(hook)
        return sg.estimator.EstimatorSpec(
            mode,
            loss=loss,
            train_op=keras.optimizers.SGD(0.1),
            training_hooks=[hook],
        )

    x = np.arange(8, dtype="float32").reshape(4, 2)
    fetches = ["loss", "mean", "global_step", "layer/bias:0", {"rows": "rows"}]
    outside = Recorder(fetches)
    strategy = sg.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    estimator = estimator_of(model_fn, tmp_path, strategy)
    estimator.train(lambda: sg.input.Dataset(x, batch_size=4 // num_replicas), hooks=[outside])

    loss, mean, step, bias, rows = outside.results[0]
    assert loss == pytest.approx(np.mean(x.sum(1) ** 2))
    assert mean == pytest.approx(3.5)
    assert (step, step.dtype) == (1, np.int32)
    np.testing.assert_allclose(bias, -0.1 * 2 * x.sum(1).mean(keepdims=True), rtol=1e-6)
    assert rows == {"rows": 4 // num_replicas}
    used = next(hook for hook in made if hook.results)
    assert used.results[0]["loss"] == loss
    assert used.results[0]["mean"] == mean
    np.testing.assert_array_equal(
        used.results[0]["kernel"], estimator.get_variable_value("layer/kernel")
    )


def test_nothing_is_fetched_that_nobody_asks_for(tmp_path, monkeypatch) -> None:
    from stratagem.estimator.loops import session

    fetched = []
    original = session.ModelSession._fetch
    monkeypatch.setattr(
        session.ModelSession,
        "_fetch",
        lambda self, wanted: fetched.append(wanted) or original(self, wanted),
    )
    estimator_of(dense_classifier, tmp_path).train(DATA, hooks=[Recorder()])
    assert fetched == []


def test_value_of_a_step_before_the_first_is_refused(tmp_path) -> None:
    class Early(sg.estimator.SessionRunHook):
        def after_create_session(self, session, coord):
            assert session.run("global_step") == 0
            session.run("loss")

    with pytest.raises(ValueError, match="A hook fetched 'loss' before the first step"):
        estimator_of(dense_classifier, tmp_path).train(DATA, hooks=[Early()])


@pytest.mark.parametrize("wanted", ["no_such_name", 3])
def test_what_no_step_gives_is_refused(wanted, tmp_path) -> None:
    with pytest.raises(ValueError, match="which the step does not return"):
        estimator_of(dense_classifier, tmp_path).train(DATA, hooks=[Recorder(wanted)])


def test_names_that_the_loop_has_are_not_given_away() -> None:
    with pytest.raises(ValueError, match="identity received name='loss'"):
        sg.estimator.identity(1.0, name="loss")
    assert sg.estimator.identity(1.0, name="outside") == 1.0
