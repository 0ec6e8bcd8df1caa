"""Validation of TrainSpec and EvalSpec."""

from __future__ import annotations

import numpy as np
import pytest

from stratagem.estimator.hooks.checkpoint_saver import CheckpointSaverListener
from stratagem.estimator.hooks.session_run_hook import StopAtStepHook
from stratagem.estimator.tasks.train_spec import EvalSpec, FinalExporter, LatestExporter, TrainSpec


def input_fn():
    return []


def test_defaults_are_tensorflows() -> None:
    train, evaluation = TrainSpec(input_fn), EvalSpec(input_fn)
    assert (train.max_steps, train.hooks, train.saving_listeners) == (None, (), ())
    assert (evaluation.steps, evaluation.name, evaluation.hooks) == (100, None, ())
    assert (evaluation.exporters, evaluation.start_delay_secs) == ((), 120)
    assert evaluation.throttle_secs == 600


def test_parts_are_kept_in_order() -> None:
    hooks, listeners = [StopAtStepHook(1), StopAtStepHook(2)], [CheckpointSaverListener()]
    train = TrainSpec(input_fn, np.int64(3), hooks, listeners)
    assert (train.max_steps, train.hooks) == (3, tuple(hooks))
    assert train.saving_listeners == tuple(listeners)
    exporters = [LatestExporter("a", input_fn), FinalExporter("b", input_fn)]
    assert EvalSpec(input_fn, None, "test", hooks, exporters, 0, 0).exporters == tuple(exporters)
    assert EvalSpec(input_fn, exporters=exporters[0]).exporters == (exporters[0],)
    assert EvalSpec(input_fn, exporters=iter(exporters)).exporters == tuple(exporters)


TWO_OF_ONE_NAME = [LatestExporter("a", input_fn), FinalExporter("a", input_fn)]
WRONG = [
    (TrainSpec, {"input_fn": 3}, TypeError, "input_fn=3 of type int is not callable"),
    (EvalSpec, {"input_fn": None}, TypeError, "input_fn=None of type NoneType is not callable"),
    (TrainSpec, {"max_steps": 0}, ValueError, "max_steps=0 is out of range"),
    (TrainSpec, {"max_steps": 2.5}, TypeError, "max_steps=2.5 is of type float"),
    (EvalSpec, {"steps": -1}, ValueError, "steps=-1 is out of range"),
    (EvalSpec, {"steps": True}, TypeError, "steps=True is of type bool"),
    (EvalSpec, {"name": 3}, TypeError, "name=3 is of type int"),
    (EvalSpec, {"start_delay_secs": -1}, ValueError, "start_delay_secs=-1 is out of range"),
    (EvalSpec, {"throttle_secs": -0.1}, ValueError, "throttle_secs=-0.1 is out of range"),
    (TrainSpec, {"hooks": [3]}, TypeError, r"hooks=\[3\] is not a list of SessionRunHook objects"),
    (EvalSpec, {"hooks": StopAtStepHook(1)}, TypeError, "is not a list of SessionRunHook objects"),
    (
        TrainSpec,
        {"saving_listeners": [3]},
        TypeError,
        r"listeners=\[3\] is not a list of Checkpoint",
    ),
    (EvalSpec, {"exporters": 3}, TypeError, "exporters contains 3 of type int"),
    (EvalSpec, {"exporters": "best"}, TypeError, "exporters contains 'best' of type str"),
    (
        EvalSpec,
        {"exporters": TWO_OF_ONE_NAME},
        ValueError,
        r"names \['a', 'a'\] are empty or not unique",
    ),
    (EvalSpec, {"exporters": LatestExporter("", input_fn)}, ValueError, "are empty or not unique"),
]


@pytest.mark.parametrize(("kind", "changes", "error", "words"), WRONG)
def test_other_parts_are_errors(kind, changes, error, words) -> None:
    with pytest.raises(error, match=words):
        kind(**{"input_fn": input_fn, **changes})
