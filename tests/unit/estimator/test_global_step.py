"""The global step variable."""

from __future__ import annotations

import stratagem as sg
from tests.unit.estimator.model_functions import (
    dataset_of,
    dense_classifier,
    estimator_of,
    examples,
)


def test_there_is_one_for_each_strategy() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        assert sg.train.get_global_step() is None
        step = sg.train.get_or_create_global_step()
        assert sg.train.get_or_create_global_step() is step
        assert sg.estimator.get_global_step() is step
        assert (step.dtype, int(step)) == ("int32", 0)
    with sg.OneDeviceStrategy("cpu:0").scope():
        assert sg.train.get_global_step() is None


def test_in_a_model_function_it_is_that_of_the_estimator(tmp_path) -> None:
    seen, values = [], []

    def model_fn(features, labels, mode):
        sg.estimator.identity(sg.train.get_global_step().value, name="before")
        seen.append(sg.train.get_or_create_global_step() is sg.train.get_global_step())
        return dense_classifier(features, labels, mode)

    class Steps(sg.estimator.SessionRunHook):
        def before_run(self, run_context):
            return sg.estimator.SessionRunArgs(["before", "global_step", "global_step:0"])

        def after_run(self, run_context, run_values):
            values.append([int(value) for value in run_values.results])

    x, y = examples(6)
    estimator_of(model_fn, tmp_path).train(dataset_of(x, y, 2), hooks=[Steps()])
    assert values == [[0, 1, 1], [1, 2, 2], [2, 3, 3]]
    assert all(seen)
