"""train_and_evaluate evaluates in TensorFlow's order and at its times."""

from __future__ import annotations

import json
import sys

import pytest

import stratagem as sg
from stratagem.devices.collectives import host
from stratagem.estimator.experimental import stop_if_lower_hook
from stratagem.estimator.exporters import FinalExporter, LatestExporter
from stratagem.estimator.hooks import StopAtStepHook
from stratagem.estimator.run_config import RunConfig, close_strategies
from stratagem.estimator.saving_hooks import CheckpointSaverListener
from stratagem.estimator.tasks import (
    CheckpointEvaluator,
    EvalSpec,
    EvaluationListener,
    TrainSpec,
    train_and_evaluate,
)
from tests.unit.estimator.fake_estimator import FakeEstimator
from tests.unit.estimator.fake_loop import FakeClock

# The package's name of that is the function.
module = sys.modules[train_and_evaluate.__module__]


def train_fn():
    return []


def eval_fn():
    return []


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)


def test_evaluates_after_each_checkpoint_and_returns_the_last(tmp_path) -> None:
    estimator = FakeEstimator(tmp_path, save_steps=10)
    hook = StopAtStepHook(last_step=100)
    spec = EvalSpec(eval_fn, steps=7, name="test", hooks=[hook], throttle_secs=0)
    metrics, exports = train_and_evaluate(estimator, TrainSpec(train_fn, max_steps=25), spec)
    assert estimator.evaluated == [10, 20, 25]
    assert metrics == {"loss": 1 / 26, "global_step": 25}
    assert exports == []
    evaluation = {"input_fn": eval_fn, "steps": 7, "hooks": [hook], "name": "test"}
    assert estimator.evaluations == [evaluation] * 3
    assert estimator.trained == [{"input_fn": train_fn, "hooks": [], "max_steps": 25}]


def test_throttled_checkpoints_are_passed_over_but_the_last_is_not(tmp_path) -> None:
    estimator = FakeEstimator(tmp_path, save_steps=10)
    train_and_evaluate(estimator, TrainSpec(train_fn, 45), EvalSpec(eval_fn, throttle_secs=3600))
    assert estimator.evaluated == [10, 45]


def test_throttle_counts_from_the_start_of_an_evaluation(tmp_path) -> None:
    clock = FakeClock()

    def pass_a_second(step: int) -> None:
        clock.now_s += 1

    estimator = FakeEstimator(tmp_path, save_steps=10, on_step=pass_a_second)
    evaluator = CheckpointEvaluator(estimator, EvalSpec(eval_fn), 60)
    listener = EvaluationListener(evaluator, throttle_secs=20, clock=clock)
    estimator.train(train_fn, max_steps=60, saving_listeners=[listener])
    assert estimator.evaluated == [10, 30, 50, 60]


def test_continued_training_does_not_evaluate_what_it_begins_with(tmp_path) -> None:
    estimator = FakeEstimator(tmp_path, save_steps=10)
    spec = EvalSpec(eval_fn, throttle_secs=0)
    train_and_evaluate(estimator, TrainSpec(train_fn, 10), spec)
    train_and_evaluate(estimator, TrainSpec(train_fn, 30), spec)
    assert estimator.evaluated == [10, 20, 30]


def test_training_that_is_over_evaluates_nothing(tmp_path) -> None:
    estimator = FakeEstimator(tmp_path, save_steps=10)
    specs = TrainSpec(train_fn, 10), EvalSpec(eval_fn, throttle_secs=0)
    train_and_evaluate(estimator, *specs)
    assert train_and_evaluate(estimator, *specs) == (None, None)
    assert estimator.evaluated == [10]


def test_without_max_steps_training_ends_with_the_data(tmp_path) -> None:
    estimator = FakeEstimator(tmp_path, save_steps=10, num_steps_of_data=12)
    spec = EvalSpec(eval_fn, exporters=FinalExporter("final", train_fn), throttle_secs=0)
    metrics, exports = train_and_evaluate(estimator, TrainSpec(train_fn), spec)
    assert metrics["global_step"] == 12
    assert exports == [None]  # nobody can tell that it is the end


def test_exporters_export_below_the_models_folder(tmp_path) -> None:
    estimator = FakeEstimator(tmp_path, save_steps=10)
    exporters = [LatestExporter("latest", train_fn), FinalExporter("final", eval_fn)]
    spec = EvalSpec(eval_fn, exporters=exporters, throttle_secs=0)
    _, exports = train_and_evaluate(estimator, TrainSpec(train_fn, 15), spec)
    folders = [
        export["path"].parent.relative_to(tmp_path).as_posix() for export in estimator.exports
    ]
    assert folders == ["export/latest", "export/latest", "export/final"]
    assert exports == [str(export["path"]) for export in estimator.exports[1:]]
    steps = [export["checkpoint_path"].rsplit("-")[-1] for export in estimator.exports]
    assert steps == ["10", "15", "15"]


def test_listeners_of_the_user_come_first(tmp_path) -> None:
    estimator, calls = FakeEstimator(tmp_path, save_steps=10), []

    class Listener(CheckpointSaverListener):
        def after_save(self, session, global_step_value) -> None:
            calls.append((global_step_value, list(estimator.evaluated)))

    train_spec = TrainSpec(train_fn, 10, saving_listeners=[Listener()])
    train_and_evaluate(estimator, train_spec, EvalSpec(eval_fn, throttle_secs=0))
    assert calls == [(0, []), (10, [])]


def test_early_stopping_sees_the_evaluations_of_this_training(tmp_path) -> None:
    estimator = FakeEstimator(tmp_path, save_steps=10)
    hook = stop_if_lower_hook(estimator, "loss", 1 / 25, run_every_secs=None, run_every_steps=1)
    train_spec = TrainSpec(train_fn, max_steps=1000, hooks=[hook])
    metrics, _ = train_and_evaluate(estimator, train_spec, EvalSpec(eval_fn, throttle_secs=0))
    assert metrics["global_step"] == 30
    assert estimator.evaluated == [10, 20, 30]


def test_checkpoint_that_is_gone_is_an_error(tmp_path) -> None:
    estimator = FakeEstimator(tmp_path, save_steps=10)
    evaluator = CheckpointEvaluator(estimator, EvalSpec(eval_fn), None)
    listener = EvaluationListener(evaluator, throttle_secs=0)
    listener.begin()
    with pytest.raises(RuntimeError, match="The checkpoint of step 3 is missing"):
        listener.end(None, 3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("model", TrainSpec(train_fn), EvalSpec(eval_fn)), "estimator='model' is of type str"),
        ((None, None, EvalSpec(eval_fn)), "train_spec=None is of type NoneType"),
        ((None, TrainSpec(train_fn), TrainSpec(train_fn)), "eval_spec=.* is of type TrainSpec"),
    ],
)
def test_other_types_are_errors(tmp_path, arguments, words) -> None:
    estimator = arguments[0] or FakeEstimator(tmp_path)
    with pytest.raises(TypeError, match=words):
        train_and_evaluate(estimator, *arguments[1:])


def in_cluster(monkeypatch, task_type: str, index: int, **jobs) -> None:
    cluster = {job: [f"{job}{i}:1" for i in range(number)] for job, number in jobs.items()}
    task = {"type": task_type, "index": index}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))


class Group:
    num_processes = 2


@pytest.mark.parametrize(("index", "num_saves"), [(0, 3), (1, 0)])
def test_workers_in_lockstep_train_and_evaluate_nothing(
    tmp_path, monkeypatch, index, num_saves
) -> None:
    in_cluster(monkeypatch, "worker", index, worker=2)
    monkeypatch.setattr(module, "current_group", Group)
    saves = []

    class Listener(CheckpointSaverListener):
        def after_save(self, session, global_step_value) -> None:
            saves.append(global_step_value)

    config = RunConfig(train_distribute=sg.OneDeviceStrategy("cpu:0"))
    estimator = FakeEstimator(tmp_path, config=config)
    train_spec = TrainSpec(train_fn, 20, saving_listeners=[Listener()])
    assert train_and_evaluate(estimator, train_spec, EvalSpec(eval_fn)) == (None, None)
    assert len(saves) == num_saves  # listeners are the chief's
    assert estimator.sessions[0].global_step == 20
    assert estimator.evaluated == []


def test_cluster_of_one_trains_and_evaluates_nothing(tmp_path, monkeypatch) -> None:
    in_cluster(monkeypatch, "chief", 0, chief=1)
    estimator = FakeEstimator(tmp_path)
    specs = TrainSpec(train_fn, 20), EvalSpec(eval_fn)
    assert train_and_evaluate(estimator, *specs) == (None, None)
    assert (estimator.sessions[0].global_step, estimator.evaluated) == (20, [])


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (None, "2 tasks of .* cannot train together without a strategy"),
        (lambda: sg.OneDeviceStrategy("cpu:0"), "trains with 1 of 2 workers"),
    ],
)
def test_workers_that_nothing_brings_together_are_an_error(
    tmp_path, monkeypatch, strategy, words
) -> None:
    in_cluster(monkeypatch, "worker", 0, chief=1, worker=1)
    estimator = FakeEstimator(tmp_path, config=RunConfig(train_distribute=strategy))
    with pytest.raises(ValueError, match=words):
        train_and_evaluate(estimator, TrainSpec(train_fn, 20), EvalSpec(eval_fn))
    assert estimator.trained == []


@pytest.mark.parametrize(
    ("task_type", "strategy"), [("ps", None), ("worker", sg.ParameterServerStrategy)]
)
def test_tasks_that_serve_a_training_wait_for_its_end(
    tmp_path, monkeypatch, task_type, strategy
) -> None:
    class Server:
        num_joined = 0

        def join(self) -> None:
            Server.num_joined += 1

    in_cluster(monkeypatch, task_type, 0, chief=1, ps=1, worker=1)
    monkeypatch.setattr(module, "run_standard_server", Server)
    estimator = FakeEstimator(tmp_path, config=RunConfig(train_distribute=strategy))
    specs = TrainSpec(train_fn, 20), EvalSpec(eval_fn)
    assert train_and_evaluate(estimator, *specs) == (None, None)
    assert (Server.num_joined, estimator.trained) == (1, [])
    close_strategies()


@pytest.mark.parametrize("is_due", [True, False])
def test_processes_that_train_together_evaluate_together(tmp_path, monkeypatch, is_due) -> None:
    decisions = []

    def broadcast(own, *, name):
        decisions.append(own)
        return is_due

    monkeypatch.setattr(host, "broadcast_object", broadcast)
    estimator = FakeEstimator(tmp_path, save_steps=10)
    train_and_evaluate(estimator, TrainSpec(train_fn, 25), EvalSpec(eval_fn, throttle_secs=3600))
    assert estimator.evaluated == ([10, 20, 25] if is_due else [25])
    assert decisions == ([True, False, False] if is_due else [True, True, True])


def test_evaluator_evaluates_what_is_there(tmp_path, monkeypatch) -> None:
    in_cluster(monkeypatch, "evaluator", 0, chief=1, worker=1)
    estimator = FakeEstimator(tmp_path)
    estimator.write_checkpoint(20)
    spec = EvalSpec(eval_fn, start_delay_secs=0, throttle_secs=0)
    metrics, exports = train_and_evaluate(estimator, TrainSpec(train_fn, 20), spec)
    assert (metrics["global_step"], exports, estimator.trained) == (20, [], [])


def test_second_evaluator_is_an_error(monkeypatch) -> None:
    in_cluster(monkeypatch, "evaluator", 1, chief=1)
    with pytest.raises(ValueError, match="Task id 1 of 'evaluator' is not in the cluster"):
        RunConfig()
