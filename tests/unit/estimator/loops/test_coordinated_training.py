"""Coordinated training on workers gives the results of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stratagem as sg
from tests.unit.estimator.independent_workers import X, Y, endless, model_fn
from tests.unit.parameter_server.clusters import local_strategy
from tests.unit.parameter_server.local_models import training_apart


def estimator_of(folder: Path, strategy: Any = None, **options: Any) -> sg.estimator.Estimator:
    config = sg.estimator.RunConfig(train_distribute=strategy, **options)
    return sg.estimator.Estimator(model_fn, folder, config)


def own_rows(input_context: sg.InputContext) -> Any:
    """Four batches of each of two workers."""
    assert input_context.num_input_pipelines == 2
    rows = range(8 * input_context.input_pipeline_id, 64, 16)
    return [(X[row : row + 8], Y[row : row + 8]) for row in rows]


class Seen(sg.estimator.SessionRunHook):
    """Records losses, steps and the final values."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.steps: list[int] = []

    def before_run(self, run_context: Any) -> sg.estimator.SessionRunArgs:
        return sg.estimator.SessionRunArgs({"loss": "loss"})

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.losses.append(float(run_values.results["loss"]))
        self.steps.append(run_context.session.global_step)

    def end(self, session: Any) -> None:
        self.at_end = session.global_step, float(session.run("loss"))
        self.is_chief, self.num_workers = session.is_chief, session.num_workers


@pytest.mark.slow
def test_one_worker_makes_the_updates_of_one_device(tmp_path) -> None:
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
    for name in again.get_variable_names():
        np.testing.assert_allclose(
            trained.get_variable_value(name),
            again.get_variable_value(name),
            rtol=1e-5,
            atol=1e-6,
            err_msg=name,
        )
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


def test_input_without_batches_is_reported(tmp_path) -> None:
    with (
        local_strategy(1) as strategy,
        pytest.raises(ValueError, match="input_fn returned an empty dataset"),
    ):
        estimator_of(tmp_path, strategy).train(list)


def test_error_of_a_step_is_raised_here(tmp_path) -> None:
    def broken() -> Any:
        yield X[:8], Y[:8]
        raise LookupError("no such file")

    with local_strategy(1) as strategy, pytest.raises(LookupError, match="no such file"):
        estimator_of(tmp_path, strategy).train(broken)


def test_local_updates_are_refused(tmp_path) -> None:
    method = sg.local_updates.LocalSGD()
    with training_apart(method) as strategy:
        trained = estimator_of(tmp_path, strategy)
        with pytest.raises(NotImplementedError, match="An Estimator was trained under"):
            trained.train(endless, steps=1)
