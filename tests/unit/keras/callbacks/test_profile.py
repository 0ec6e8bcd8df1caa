"""sg.profile around real training, and with arguments that are wrong."""

from __future__ import annotations

import json
from pathlib import Path

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.observe.profiling.recorder import current_observer
from stratagem.observe.profiling.trace import read_trace

X = np.random.default_rng(0).random((64, 16), np.float32)
Y = X.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(
    "steps", [(5, 5), (6, 5), (-1, 3), (1.5, 3), (True, 3), (1,), (1, 2, 3), "ab"]
)
def test_steps_that_are_no_range(steps) -> None:
    kind = ValueError if all(type(one) is int for one in steps) and len(steps) == 2 else TypeError
    with pytest.raises(kind, match=r"sg\.profile received steps=(.|\n)*Expected the number"):
        sg.profile(steps)


@pytest.mark.parametrize(
    ("workers", "kind"),
    [([], ValueError), ([-1], ValueError), (0, TypeError), (["0"], TypeError)],
)
def test_workers_that_are_no_ids(workers, kind) -> None:
    with pytest.raises(kind, match=r"sg\.profile received workers="):
        sg.profile(workers=workers)


def test_worker_that_does_not_exist(tmp_path) -> None:
    profile = sg.profile(folder=tmp_path, workers=[0, 3])
    with pytest.raises(ValueError, match="this run has 1 process") as caught, profile:
        pass
    assert "leave out 3" in str(caught.value)
    assert current_observer() is None


def test_folder_of_the_run_is_the_default(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("STRATAGEM_RUN_DIR", raising=False)
    assert sg.profile().folder == Path("profile")
    monkeypatch.setenv("STRATAGEM_RUN_DIR", str(tmp_path))
    assert sg.profile().folder == tmp_path / "profile"
    with pytest.raises(ValueError, match="folder='' is empty"):
        sg.profile(folder="")


def test_folder_that_cannot_be_written(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    profile = sg.profile(folder=tmp_path / "file" / "inside")
    with pytest.raises(OSError, match=r"sg\.profile cannot write to .*worker-0"), profile:
        pass
    assert current_observer() is None


def test_profile_in_a_profile(tmp_path) -> None:
    outer, inner = sg.profile(folder=tmp_path), sg.profile(folder=tmp_path)
    outer.__enter__()
    with pytest.raises(RuntimeError, match="while another profile is active"), inner:
        pass
    assert current_observer() is not None
    with pytest.warns(RuntimeWarning, match="recorded nothing: 0 training steps ran"):
        outer.__exit__(None, None, None)
    assert current_observer() is None


def test_error_in_training_is_not_hidden(tmp_path, recwarn) -> None:
    with pytest.raises(ZeroDivisionError), sg.profile(folder=tmp_path):
        raise ZeroDivisionError
    assert current_observer() is None
    assert not recwarn.list


def test_training_that_fails_ends_the_profile(tmp_path) -> None:
    class Failing(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        _model().fit(X, Y, verbose=0, callbacks=[sg.profile(folder=tmp_path), Failing()])
    assert current_observer() is None


def _model(strategy: sg.Strategy | None = None, **compiled: object) -> keras.Model:
    def make() -> keras.Model:
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(32, "relu", name="first"), keras.layers.Dense(1, name="last")]
        model = keras.Sequential([keras.Input((16,)), *layers])
        model.compile("adam", "mse", **compiled)
        return model

    if strategy is None:
        return make()
    with strategy.scope():
        return make()


def _fit(model: keras.Model, *callbacks: object, **options: object) -> list[float]:
    given = {"batch_size": 8, "epochs": 2, "verbose": 0, "shuffle": False} | options
    return model.fit(X, Y, callbacks=list(callbacks), **given).history["loss"]


def _mirrored() -> sg.Strategy:
    return sg.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.mark.slow
def test_callback_of_fit_on_two_replicas(tmp_path, capfd) -> None:
    profile = sg.profile(steps=(3, 7), folder=tmp_path, top=100)
    losses = _fit(_model(_mirrored()), profile, validation_data=(X, Y))
    summary = profile.summary
    assert summary is not None
    assert (summary.platform, summary.num_devices, summary.num_steps) == ("cpu", 2, 4)
    assert sum(summary.parts_s.values()) == pytest.approx(summary.whole_s)
    assert all(part_s >= 0 for part_s in summary.parts_s.values())
    assert 0 < summary.parts_s["collectives"] <= summary.collectives_s
    assert summary.parts_s["compute"] > 0
    (reduce,) = [one for one in summary.operations if one.kind == "collective"]
    assert reduce.count == 4
    products = {(one.layer, one.phase) for one in summary.operations}
    assert {("sequential/first", "forward"), ("sequential/first", "backward")} <= products
    assert any(layer.startswith("adam") and not phase for layer, phase in products)
    assert profile.trace is not None
    assert len(read_trace(profile.trace).input) == 4  # one batch ahead of each step
    # What is read from the files is the same.
    assert sg.profiling.read_profile(tmp_path) == summary
    assert profile.trace.is_relative_to(tmp_path / "worker-0")
    shown = capfd.readouterr().out
    assert "Worker 0, steps 3 to 6: 4 steps of" in shown
    assert f"Trace: {profile.trace.parent}" in shown
    assert losses == _fit(_model(_mirrored()), validation_data=(X, Y))  # nothing else changed


def _loop(strategy: sg.Strategy, model: keras.Model):
    def step(x: object, y: object) -> object:
        def loss() -> object:
            return sg.compute_average_loss(
                keras.losses.mean_squared_error(y, model(x)), global_batch_size=8
            )

        value, gradients = sg.value_and_grad(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)
        return value

    return step


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["run", "run_steps", "function"])
def test_loops(kind, tmp_path) -> None:
    strategy = _mirrored()
    model = _model(strategy)
    step = _loop(strategy, model)
    batches = [(X[at : at + 8], Y[at : at + 8]) for at in range(0, 64, 8)]
    data = iter(strategy.distribute_dataset(batches))
    compiled = sg.function(lambda x, y: strategy.run(step, args=(x, y)))

    def predict() -> None:  # no training step
        strategy.run(lambda: model(X[:4]))

    with sg.profile(steps=(4, 6), folder=tmp_path, verbose=False) as profile:
        if kind == "run_steps":
            strategy.run_steps(step, data, 4)
            strategy.run_steps(step, data, 4)
        for batch in data:
            predict()
            if kind == "function":
                compiled(*batch)
            else:
                strategy.run(step, args=batch)
    assert profile.summary is not None
    assert profile.summary.num_steps == (4 if kind == "run_steps" else 2)
    assert profile.summary.num_devices == 2
    assert any("first" in one.layer for one in profile.summary.operations)
    assert profile.trace is not None
    assert read_trace(profile.trace).input
    (trace,) = tmp_path.rglob("*.xplane.pb")
    named = json.loads(trace.with_name("operations.json").read_text())["programs"]
    assert named


@pytest.mark.slow
def test_model_without_a_strategy(tmp_path, capfd) -> None:
    """As a callback, around fit, with several steps per call, and afterwards unchanged."""
    callback = sg.profile(steps=(3, 7), folder=tmp_path / "a", verbose=False)
    model = _model()
    losses = _fit(model, callback)
    with sg.profile(steps=(2, 4), folder=tmp_path / "b", verbose=False) as around:
        losses += _fit(model)
    losses += _fit(model)
    for profile, num_steps in ((callback, 4), (around, 2)):
        assert profile.summary is not None
        assert profile.summary.num_steps == num_steps
        assert profile.trace is not None
        assert len(read_trace(profile.trace).input) == num_steps
        assert profile.summary.parts_s["compute"] > 0
    plain = _model()
    assert losses == _fit(plain) + _fit(plain) + _fit(plain)
    assert type(model.train_function) is type(plain.train_function)
    several = sg.profile(steps=(4, 5), folder=tmp_path / "c", verbose=False)
    _fit(_model(steps_per_execution=4), several)
    assert several.summary is not None
    assert several.summary.num_steps == 4
    assert capfd.readouterr().out == ""
    # It ends with the training, and is printed then.
    _fit(_model(), sg.profile(steps=(9, 99), folder=tmp_path / "d"), verbose=0)
    assert "Worker 0, steps 9 to 15: 7 steps of" in capfd.readouterr().out
