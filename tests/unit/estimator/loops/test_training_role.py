"""Independent workers train one model like one device."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from tests.unit.estimator.independent_workers import (
    LIMIT_S,
    X,
    Y,
    endless,
    in_threads,
    model_fn,
    own_strategies,
)


def estimator_of(folder: Path, strategy: Any = None, **options: Any) -> sg.estimator.Estimator:
    config = sg.estimator.RunConfig(train_distribute=strategy, **options)
    return sg.estimator.Estimator(model_fn, folder, config)


def values_of(estimator: sg.estimator.Estimator) -> dict[str, np.ndarray]:
    return {name: estimator.get_variable_value(name) for name in estimator.get_variable_names()}


def data() -> Any:
    return sg.input.Dataset((X, Y), batch_size=32)


class Watching(sg.estimator.SessionRunHook):
    """Records its calls, and may wait at a step."""

    def __init__(self, started: threading.Event | None = None) -> None:
        self.steps: list[int] = []
        self._started = started

    def after_create_session(self, session: Any, coord: Any) -> None:
        self.began_at = session.global_step
        self.is_chief, self.num_workers = session.is_chief, session.num_workers
        if self._started is not None and session.is_chief:
            assert self._started.wait(LIMIT_S)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.steps.append(run_context.session.global_step)


@pytest.mark.slow
def test_one_worker_makes_the_updates_of_one_device(tmp_path) -> None:
    alone = estimator_of(tmp_path / "alone")
    alone.train(endless, steps=12)
    with own_strategies(1) as (strategy,):
        trained = estimator_of(tmp_path / "trained", strategy)
        trained.train(endless, max_steps=12)
    expected = values_of(alone)
    assert trained.get_variable_names() == sorted(expected)
    for name, value in values_of(trained).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert trained.evaluate(data)["global_step"] == 12


@pytest.mark.slow
def test_keras_model_is_trained_on_servers_as_on_one_device(tmp_path) -> None:
    def trained(folder: Path, strategy: Any = None) -> dict[str, np.ndarray]:
        keras.backend.clear_session(free_memory=False)  # names begin anew
        initializer = keras.initializers.GlorotUniform(seed=1)
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(3, "tanh", kernel_initializer=initializer)]
        )
        model.add(keras.layers.Dense(1, kernel_initializer=keras.initializers.Ones()))
        model.compile(keras.optimizers.Adam(0.01), "mse")
        estimator = sg.estimator.model_to_estimator(
            model, model_dir=folder, config=sg.estimator.RunConfig(train_distribute=strategy)
        )
        estimator.train(endless, steps=5)
        return values_of(estimator)

    expected = trained(tmp_path / "alone")
    with own_strategies(1) as (strategy,):
        found = trained(tmp_path / "trained", strategy)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_chief_gives_servers_the_checkpoint_of_one_device(tmp_path) -> None:
    alone = estimator_of(tmp_path)
    alone.train(lambda: (X[:8], Y[:8]), steps=5)
    watching = Watching()
    with own_strategies(1) as (strategy,):
        estimator_of(tmp_path, strategy).train(
            lambda: (X[8:16], Y[8:16]), hooks=[watching], max_steps=9
        )
    assert watching.began_at == 5
    one = estimator_of(tmp_path / "one")
    one.train(lambda: (X[:8], Y[:8]), steps=5)
    one.train(lambda: (X[8:16], Y[8:16]), steps=4)
    expected = values_of(one)
    for name, value in values_of(alone).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_workers_share_the_steps_and_the_chief_alone_saves(tmp_path) -> None:
    hooks = [Watching(), Watching()]
    parts: list[tuple[int, int]] = []

    def own_part(input_context: sg.InputContext) -> Any:
        parts.append((input_context.input_pipeline_id, input_context.num_input_pipelines))
        return endless()

    with own_strategies(2) as strategies:
        estimators = [
            estimator_of(tmp_path / f"{place}", strategy, save_checkpoints_steps=15)
            for place, strategy in enumerate(strategies)
        ]

        def program(place: int) -> Any:
            return lambda: estimators[place].train(own_part, hooks=[hooks[place]], max_steps=40)

        in_threads([program(0), program(1)])
    assert [hook.is_chief for hook in hooks] == [True, False]
    assert [hook.num_workers for hook in hooks] == [2, 2]
    assert sorted(parts) == [(0, 2), (1, 2)]
    assert max(hooks[0].steps[-1], hooks[1].steps[-1]) in (40, 41)
    assert len(hooks[0].steps) + len(hooks[1].steps) in (40, 41)
    assert estimators[1].latest_checkpoint() is None
    saved = estimators[0].evaluate(data)
    assert saved["global_step"] in (40, 41)
    assert saved["loss"] < np.mean(Y**2)
    # Its counter is the sum of what both have sent; one may send its last while the other saves.
    ahead = estimators[0].get_variable_value("adam/iteration") - saved["global_step"]
    assert ahead in (0, 1)


@pytest.mark.slow
def test_worker_that_comes_late_finds_the_variables(tmp_path) -> None:
    goes_on = threading.Event()
    hooks = [Watching(goes_on), Watching()]
    with own_strategies(2) as strategies:

        def chief() -> None:
            estimator = estimator_of(tmp_path, strategies[0])
            estimator.train(endless, steps=7)
            estimator.train(endless, hooks=[hooks[0]], steps=5)

        def late() -> None:
            estimator = estimator_of(tmp_path / "late", strategies[1])
            estimator.train(endless, hooks=[hooks[1]], steps=3)
            goes_on.set()

        first = threading.Thread(target=chief)
        first.start()
        while strategies[0].cluster._cluster._meeting.num_begun() < 2:
            assert first.is_alive()
        late()
        first.join(LIMIT_S)
    assert hooks[1].began_at == 7
    assert hooks[1].steps == [8, 9, 10]
    assert hooks[0].steps == [11, 12]


@pytest.mark.slow
def test_training_that_has_nothing_to_do_keeps_nobody_waiting(tmp_path) -> None:
    with own_strategies(2) as strategies:
        chief = estimator_of(tmp_path, strategies[0])
        chief.train(endless, max_steps=6)
        chief.train(endless, max_steps=6)  # done already
        other = estimator_of(tmp_path / "other", strategies[1])
        watching = Watching()
        other.train(endless, hooks=[watching], max_steps=6)
        other.train(endless, hooks=[watching], max_steps=6)
    assert watching.steps == []


def test_what_a_worker_saves_is_left_to_the_chief(tmp_path) -> None:
    class Saving(sg.estimator.SessionRunHook):
        def end(self, session: Any) -> None:
            self.told = session.save_checkpoint()

    saving = Saving()
    with own_strategies(2) as strategies:
        estimator_of(tmp_path, strategies[0]).train(endless, max_steps=3)
        before = sorted(path.name for path in tmp_path.iterdir())
        estimator_of(tmp_path, strategies[1]).train(endless, hooks=[saving], steps=2)
    assert Path(saving.told).name == "model.ckpt-3"
    assert sorted(path.name for path in tmp_path.iterdir()) == before
