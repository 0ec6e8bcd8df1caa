"""sg.profile around real training, and with arguments that are wrong."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.keras.callbacks import backup_and_restore as keeping_pace
from stratagem.keras.callbacks.backup_and_restore import (
    SnapshotInterval,
    callback_states,
    set_callback_states,
)
from stratagem.observe.profiling import read_trace
from stratagem.observe.recorder import current_observer

X = np.random.default_rng(0).random((64, 16), np.float32)
Y = X.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        *((ValueError, {"steps": steps}) for steps in ((5, 5), (6, 5), (-1, 3))),
        *((TypeError, {"steps": s}) for s in ((1.5, 3), (True, 3), (1,), (1, 2, 3), "ab")),
        *((ValueError, {"workers": workers}) for workers in ([], [-1])),
        *((TypeError, {"workers": workers}) for workers in (0, ["0"])),
    ],
)
def test_steps_and_workers_that_are_none(kind, wrong) -> None:
    (name,) = wrong
    words = r"(.|\n)*Expected the number" if name == "steps" else ""
    with pytest.raises(kind, match=rf"sg\.profile received {name}={words}"):
        sg.profile(**wrong)


def test_worker_that_does_not_exist(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_RUN_DIR", str(tmp_path))
    assert sg.profile().folder == tmp_path / "profile"
    with pytest.raises(ValueError, match="folder='' is empty"):
        sg.profile(folder="")
    profile = sg.profile(folder=tmp_path, workers=[0, 3])
    with pytest.raises(ValueError, match="this run has 1 process") as caught, profile:
        pass
    assert "leave out 3" in str(caught.value)
    assert current_observer() is None


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


def test_training_that_fails_ends_the_profile(tmp_path) -> None:
    class Failing(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        _model().fit(X, Y, verbose=0, callbacks=[sg.profile(folder=tmp_path), Failing()])
    assert current_observer() is None


def _model(strategy: sg.Strategy | None = None, **compiled: object) -> keras.Model:
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(32, "relu", name="first"), keras.layers.Dense(1, name="last")]
        model = keras.Sequential([keras.Input((16,)), *layers])
        model.compile("adam", "mse", **compiled)
    return model


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
    assert len(read_trace(profile.trace).input) == 8  # a batch is read and placed in each step
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


# How often the state is kept in memory, by a clock that the test sets.


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(keeping_pace, "time", clock)
    return clock


def calls(interval, clock, num, *, call_s, cost_s, batches=1) -> list[int]:
    """After which of these calls the state was kept."""
    kept: list[int] = []
    for call in range(1, num + 1):
        clock.now_s += call_s
        if interval.is_due(batches):
            clock.now_s += cost_s
            interval.note(cost_s)
            kept.append(call)
    return kept


@pytest.mark.parametrize(("batches", "num_batches"), [(1, 30), (4, 120)])
def test_takes_a_two_hundredth_of_the_time(clock: Clock, batches: int, num_batches: int) -> None:
    """Fifteen hundredths of a call are a two-hundredth of thirty calls."""
    interval = SnapshotInterval("auto")
    first = calls(interval, clock, 16, call_s=0.125, cost_s=0.0187, batches=batches)
    assert first == list(range(1, 16))  # while it is measured
    assert interval.num_batches == num_batches
    assert calls(interval, clock, 75, call_s=0.125, cost_s=0.0187, batches=batches) == [29, 59]
    interval.end_epoch()
    assert calls(interval, clock, 40, call_s=0.125, cost_s=0.0187, batches=batches) == [30]


def test_follows_what_changes_at_the_end_of_an_epoch(clock: Clock) -> None:
    interval = SnapshotInterval("auto")
    calls(interval, clock, 40, call_s=0.125, cost_s=0.06)
    assert interval.num_batches == 96
    clock.now_s += 1000.0  # an evaluation
    interval.end_epoch()
    clock.now_s += 1000.0
    calls(interval, clock, 900, call_s=2.0, cost_s=0.06)
    interval.end_epoch()
    assert interval.num_batches == 96  # soon after the first decision
    calls(interval, clock, 100, call_s=2.0, cost_s=0.06)
    assert interval.num_batches == 96  # within an epoch
    interval.end_epoch()
    assert interval.num_batches == 6


# State of callbacks as JSON: names, selected attributes, and callbacks without a state.


class Counter(keras.callbacks.Callback):
    def __init__(self, count: int = 0) -> None:
        super().__init__()
        self.count = count

    def get_state(self) -> Any:
        return {"count": np.int64(self.count)}

    def set_state(self, state: Any) -> None:
        self.count = int(state["count"])


def stopping(wait: int) -> keras.callbacks.EarlyStopping:
    callback = keras.callbacks.EarlyStopping(patience=3)
    callback.on_train_begin()
    callback.wait, callback.best = wait, 0.5
    callback.best_weights = [np.arange(3, dtype=np.float32)]
    return callback


def test_states_come_back_by_class_and_number() -> None:
    plain = keras.callbacks.LambdaCallback()  # has no state
    callbacks = [Counter(3), stopping(1), plain, Counter(5), stopping(2)]
    states = json.loads(json.dumps(callback_states(callbacks)))
    assert list(states) == ["Counter 1", "EarlyStopping 1", "Counter 2", "EarlyStopping 2"]
    stopped = states["EarlyStopping 1"]  # arguments of Keras's callbacks are no state
    assert set(stopped) == {"best", "best_epoch", "best_weights", "stopped_epoch", "wait"}
    others = [stopping(0), stopping(0), Counter(), Counter()]
    set_callback_states(others, states)
    set_callback_states([others[2], plain], {"Counter 2": {"count": 1}})  # of neither
    assert [one.count for one in others[2:]] == [3, 5]
    assert [one.wait for one in others[:2]] == [1, 2]
    assert others[0].best == 0.5
    np.testing.assert_array_equal(others[0].best_weights[0], [0, 1, 2])
