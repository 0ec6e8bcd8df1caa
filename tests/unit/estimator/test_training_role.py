"""Independent workers train one model like one device."""

from __future__ import annotations

import logging
import os
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
from tests.unit.estimator.model_functions import dataset_of, dense_classifier, examples
from tests.unit.estimator.model_functions import estimator_of as dense_estimator
from tests.unit.parameter_server.clusters import local_strategy


def estimator_of(folder: Path, strategy: Any = None, **options: Any) -> sg.estimator.Estimator:
    config = sg.estimator.RunConfig(train_distribute=strategy, **options)
    return sg.estimator.Estimator(model_fn, folder, config)


def values_of(estimator: sg.estimator.Estimator) -> dict[str, np.ndarray]:
    return {name: estimator.get_variable_value(name) for name in estimator.get_variable_names()}


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def data() -> Any:
    return sg.input.Dataset((X, Y), batch_size=32)


class Seen(sg.estimator.SessionRunHook):
    """Records losses and steps, and may wait before the first."""

    def __init__(self, started: threading.Event | None = None) -> None:
        self.losses: list[float] = []
        self.steps: list[int] = []
        self._started = started

    def after_create_session(self, session: Any, coord: Any) -> None:
        self.began_at = session.global_step
        self.is_chief, self.num_workers = session.is_chief, session.num_workers
        if self._started is not None and session.is_chief:
            assert self._started.wait(LIMIT_S)

    def before_run(self, run_context: Any) -> sg.estimator.SessionRunArgs:
        return sg.estimator.SessionRunArgs({"loss": "loss"})

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.losses.append(float(run_values.results["loss"]))
        self.steps.append(run_context.session.global_step)

    def end(self, session: Any) -> None:
        self.at_end = session.global_step, float(session.run("loss"))


@pytest.mark.slow
def test_one_worker_makes_the_updates_of_one_device(tmp_path) -> None:
    alone = estimator_of(tmp_path / "alone")
    alone.train(endless, steps=12)
    with own_strategies(1) as (strategy,):
        trained = estimator_of(tmp_path / "trained", strategy)
        trained.train(endless, max_steps=12)
    assert trained.get_variable_names() == sorted(values_of(alone))
    assert_same(values_of(trained), values_of(alone))
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
        assert_same(trained(tmp_path / "trained", strategy), expected)


@pytest.mark.slow
def test_chief_gives_servers_the_checkpoint_of_one_device(tmp_path) -> None:
    alone = estimator_of(tmp_path)
    alone.train(lambda: (X[:8], Y[:8]), steps=5)
    seen = Seen()
    with own_strategies(1) as (strategy,):
        estimator_of(tmp_path, strategy).train(
            lambda: (X[8:16], Y[8:16]), hooks=[seen], max_steps=9
        )
    assert seen.began_at == 5
    one = estimator_of(tmp_path / "one")
    one.train(lambda: (X[:8], Y[:8]), steps=5)
    one.train(lambda: (X[8:16], Y[8:16]), steps=4)
    assert_same(values_of(alone), values_of(one))


@pytest.mark.slow
def test_workers_share_the_steps_and_the_chief_alone_saves(tmp_path) -> None:
    hooks = [Seen(), Seen()]
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
    hooks = [Seen(goes_on), Seen()]
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
        seen = Seen()
        other.train(endless, hooks=[seen], max_steps=6)
        other.train(endless, hooks=[seen], max_steps=6)
    assert seen.steps == []


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


# Default hooks of a training run.

DATA = dataset_of(*examples(32), 4)


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
    estimator = dense_estimator(
        dense_classifier, tmp_path, save_checkpoints_steps=3, keep_checkpoint_max=2
    )
    estimator.train(DATA, saving_listeners=[listener])
    assert listener.saved == [0, 3, 6, 8]
    assert checkpoints_in(tmp_path) == ["model.ckpt-6", "model.ckpt-8"]
    assert estimator.latest_checkpoint() == str(tmp_path / "model.ckpt-8")


def test_listeners_are_called_by_the_saver_of_the_user(tmp_path) -> None:
    listener = Listener()
    saver = sg.estimator.CheckpointSaverHook(tmp_path, save_steps=5)
    estimator = dense_estimator(dense_classifier, tmp_path, save_checkpoints_steps=2)
    estimator.train(DATA, hooks=[saver], saving_listeners=[listener])
    assert listener.saved == [0, 5, 8]


def test_listeners_without_anything_that_saves_are_refused(tmp_path) -> None:
    estimator = dense_estimator(dense_classifier, tmp_path, save_checkpoints_steps=None)
    with pytest.raises(
        ValueError, match="saving_listeners are set, but the RunConfig disables checkpoints"
    ):
        estimator.train(DATA, saving_listeners=[Listener()])


def test_loss_and_step_are_logged(tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO, logger="stratagem.estimator")
    dense_estimator(dense_classifier, tmp_path, log_step_count_steps=4).train(DATA)
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

    dense_estimator(model_fn, tmp_path).train(DATA, steps=1)
    dense_estimator(model_fn, tmp_path).train(DATA, steps=1)
    assert calls == [0]


def test_hooks_of_the_model_function_run(tmp_path) -> None:
    def model_fn(features, labels, mode):
        spec = dense_classifier(features, labels, mode)
        stop = sg.estimator.StopAtStepHook(num_steps=3)
        return sg.estimator.EstimatorSpec(
            mode, loss=spec.loss, train_op=spec.train_op, training_chief_hooks=[stop]
        )

    estimator = dense_estimator(model_fn, tmp_path)
    estimator.train(DATA)
    assert estimator.get_variable_value("global_step") == 3


# Coordinated training on workers gives the results of one device.


def own_rows(input_context: sg.InputContext) -> Any:
    """Four batches of each of two workers."""
    assert input_context.num_input_pipelines == 2
    rows = range(8 * input_context.input_pipeline_id, 64, 16)
    return [(X[row : row + 8], Y[row : row + 8]) for row in rows]


@pytest.mark.slow
def test_coordinated_training_one_worker_makes_the_updates_of_one_device(tmp_path) -> None:
    expected, seen = Seen(), Seen()
    alone = estimator_of(tmp_path / "alone")
    alone.train(endless, hooks=[expected], steps=12)
    with local_strategy(1) as strategy:
        trained = estimator_of(tmp_path / "trained", strategy)
        trained.train(endless, hooks=[seen], steps=5)
        trained.train(endless, steps=1)  # from the first batch on, as on one device
        trained.train(endless, hooks=[seen], max_steps=7)
    again = estimator_of(tmp_path / "again")
    for steps in (5, 1, 1):
        again.train(endless, steps=steps)
    assert trained.get_variable_names() == again.get_variable_names()
    assert_same(values_of(trained), values_of(again))
    # The first step is waited for, and in the end all are.
    assert seen.losses[0] == pytest.approx(expected.losses[0], rel=1e-5)
    assert (seen.at_end[0], seen.is_chief, seen.num_workers) == (7, True, 1)


@pytest.mark.slow
def test_workers_read_their_own_parts_to_the_end(tmp_path) -> None:
    seen = Seen()
    with local_strategy(2) as strategy:
        estimator = estimator_of(tmp_path, strategy, save_checkpoints_steps=3)
        estimator.train(own_rows, hooks=[seen])
    assert seen.at_end[0] == 8
    assert seen.steps == sorted(seen.steps)
    assert len(seen.steps) == 8
    assert estimator.get_variable_value("adam/iteration") == 8
    evaluated = estimator.evaluate(lambda: sg.input.Dataset((X, Y), batch_size=32))
    assert evaluated["global_step"] == 8
    assert evaluated["loss"] < np.mean(Y**2)


def test_max_steps_are_those_of_all_workers_and_no_more(tmp_path) -> None:
    with local_strategy(2) as strategy:
        estimator = estimator_of(tmp_path, strategy)
        estimator.train(endless, max_steps=9)
        estimator.train(endless, max_steps=9)
    assert estimator.get_variable_value("global_step") == 9
    assert estimator.get_variable_value("adam/iteration") == 9


def broken() -> Any:
    yield X[:8], Y[:8]
    raise LookupError("no such file")


@pytest.mark.parametrize(
    ("input_fn", "error", "words"),
    [
        (list, ValueError, "input_fn returned an empty dataset"),
        (broken, LookupError, "no such file"),
    ],
)
def test_errors_of_a_worker_are_raised_here(tmp_path, input_fn, error, words) -> None:
    with local_strategy(1) as strategy, pytest.raises(error, match=words):
        estimator_of(tmp_path, strategy).train(input_fn)
