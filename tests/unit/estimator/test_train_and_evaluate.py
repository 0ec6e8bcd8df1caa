"""train_and_evaluate evaluates in TensorFlow's order and at its times."""

from __future__ import annotations

import itertools
import json
import logging
import os
import pickle
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stratagem as sg
from stratagem.errors import DeadlineExceededError
from stratagem.estimator.experimental import stop_if_lower_hook
from stratagem.estimator.hooks import StopAtStepHook
from stratagem.estimator.run_config import RunConfig, close_strategies
from stratagem.estimator.saving_hooks import CheckpointSaverListener
from stratagem.estimator.tasks import (
    CheckpointEvaluator,
    EvalSpec,
    EvaluationListener,
    EvaluatorLoop,
    FinalExporter,
    LatestExporter,
    TrainSpec,
    train_and_evaluate,
)
from stratagem.strategies.collectives import host
from tests.unit.estimator.fake_estimator import FakeEstimator, in_cluster
from tests.unit.estimator.fake_loop import FakeClock
from tests.unit.estimator.independent_workers import X, Y, model_fn
from tests.unit.launch.remote.heads import Head, head

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


def test_throttle_counts_from_the_start_of_an_evaluation(tmp_path) -> None:
    clock = FakeClock()
    estimator = FakeEstimator(tmp_path, save_steps=10, on_step=clock.passing(1))
    evaluator = CheckpointEvaluator(estimator, EvalSpec(eval_fn), 60)
    listener = EvaluationListener(evaluator, throttle_secs=20, clock=clock)
    estimator.train(train_fn, max_steps=60, saving_listeners=[listener])
    assert estimator.evaluated == [10, 30, 50, 60]


def test_continued_training_does_not_evaluate_what_it_begins_with(tmp_path) -> None:
    estimator = FakeEstimator(tmp_path, save_steps=10)
    spec = EvalSpec(eval_fn, throttle_secs=0)
    train_and_evaluate(estimator, TrainSpec(train_fn, 10), spec)
    train_and_evaluate(estimator, TrainSpec(train_fn, 30), spec)
    assert train_and_evaluate(estimator, TrainSpec(train_fn, 30), spec) == (None, None)
    assert estimator.evaluated == [10, 20, 30]


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


@pytest.mark.parametrize("num_evaluated", [0, 1])
def test_checkpoints_that_are_saved_elsewhere_are_an_error(tmp_path, num_evaluated) -> None:
    """Else, a checkpoint of an earlier training would be evaluated and exported again."""
    estimator = FakeEstimator(tmp_path, save_steps=10)
    estimator.write_checkpoint(0)
    write, num_saves = estimator.write_checkpoint, itertools.count(-1)

    def write_elsewhere(step):
        return write(step) if next(num_saves) < num_evaluated else "elsewhere"

    estimator.write_checkpoint = write_elsewhere
    spec = EvalSpec(eval_fn, exporters=LatestExporter("latest", train_fn), throttle_secs=0)
    with pytest.raises(RuntimeError, match=r"is not in (?s:.)*let the session save"):
        train_and_evaluate(estimator, TrainSpec(train_fn, max_steps=30), spec)
    assert len(estimator.exports) == num_evaluated


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


# Evaluator task with a fake clock.


class Training:
    """Writes checkpoints at given times while the evaluator waits, then signals a stop."""

    def __init__(self, estimator, clock, times: dict[float, int], ends_at_s=float("inf")) -> None:
        self.is_given = False
        self._estimator, self._clock = estimator, clock
        self._start_s = clock()
        self._times = sorted(times.items())
        self._ends_at_s = ends_at_s

    def wait(self, seconds: float) -> None:
        self._clock.now_s += seconds
        self.catch_up()

    def catch_up(self) -> None:
        now_s = self._clock() - self._start_s
        while self._times and self._times[0][0] <= now_s:
            self._estimator.write_checkpoint(self._times.pop(0)[1])
        self.is_given = now_s >= self._ends_at_s


class Evaluator(FakeEstimator):
    """Records when it evaluates; an evaluation takes some time."""

    def __init__(self, folder, clock, took_s=0.0, **options) -> None:
        super().__init__(folder, **options)
        self.clock, self.took_s, self.at_s = clock, took_s, []
        self.start_s = clock()

    def evaluate(self, *arguments, **options):
        self.at_s.append(self.clock() - self.start_s)
        self.clock.now_s += self.took_s
        return super().evaluate(*arguments, **options)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def run(estimator, clock, training, *, max_steps=None, timeout_s=100.0, **spec):
    eval_spec = EvalSpec(train_fn, **{"start_delay_secs": 0, "throttle_secs": 0, **spec})
    training.catch_up()
    evaluator = CheckpointEvaluator(estimator, eval_spec, max_steps)
    EvaluatorLoop(evaluator, timeout_s, training, clock).run()
    return evaluator


def test_each_new_checkpoint_is_evaluated_until_max_steps(tmp_path, clock) -> None:
    estimator = Evaluator(tmp_path, clock)
    training = Training(estimator, clock, {0: 0, 10.5: 10, 30: 20, 40: 30, 50: 40})
    last = run(estimator, clock, training, max_steps=30)
    assert estimator.evaluated == [0, 10, 20, 30]
    assert estimator.at_s == [0, 11, 30, 40]  # it looks once in a second
    assert (last.results[0]["global_step"], last.is_final) == (30, True)


def test_waits_before_it_begins_and_between_evaluations(tmp_path, clock) -> None:
    estimator = Evaluator(tmp_path, clock, took_s=4)
    training = Training(estimator, clock, {second: second for second in range(0, 80, 5)})
    run(estimator, clock, training, max_steps=60, start_delay_secs=20, throttle_secs=15)
    assert estimator.at_s == [20, 35, 50, 65]
    assert estimator.evaluated == [20, 35, 50, 65]  # the latest of those since the last


def test_evaluation_that_takes_longer_than_the_throttle_is_followed_at_once(
    tmp_path, clock
) -> None:
    estimator = Evaluator(tmp_path, clock, took_s=30)
    training = Training(estimator, clock, {0: 1, 5: 2})
    evaluate = estimator.evaluate

    def evaluate_and_catch_up(*arguments, **options):
        result = evaluate(*arguments, **options)
        training.catch_up()
        return result

    estimator.evaluate = evaluate_and_catch_up
    run(estimator, clock, training, max_steps=2, throttle_secs=20)
    assert estimator.at_s == [0, 30]


def test_training_that_dies_ends_the_evaluator(tmp_path, clock, caplog) -> None:
    caplog.set_level(logging.WARNING, logger="stratagem.estimator")
    estimator = Evaluator(tmp_path, clock)
    training = Training(estimator, clock, {50: 10})
    words = r"found no new checkpoint in .* for 100 s \(last evaluated: .*model.ckpt-10"
    with pytest.raises(DeadlineExceededError, match=words):
        run(estimator, clock, training, max_steps=1000)
    assert estimator.evaluated == [10]
    assert clock() == 100 + 50 + 100
    assert "No new checkpoint in" in caplog.text


def test_training_that_never_begins_is_reported_and_ends_the_evaluator(
    tmp_path, clock, caplog
) -> None:
    caplog.set_level(logging.WARNING, logger="stratagem.estimator")
    estimator = Evaluator(tmp_path, clock)
    training = Training(estimator, clock, {})
    with pytest.raises(DeadlineExceededError, match=r"for 2000 s \(last evaluated: none\)"):
        run(estimator, clock, training, timeout_s=2000, start_delay_secs=500)
    assert clock() == 100 + 500 + 2000
    assert [record.args[1] for record in caplog.records] == [30, 630, 1230, 1830]


def test_notice_ends_it_with_the_newest_checkpoint(tmp_path, clock) -> None:
    estimator = Evaluator(tmp_path, clock)
    times = {0: 1, 10: 2, 20: 3}
    last = run(estimator, clock, Training(estimator, clock, times, 20), throttle_secs=30)
    assert estimator.evaluated == [1, 3]
    assert (last.results[0]["global_step"], last.is_final) == (3, False)


def test_notice_without_any_checkpoint_returns_none(tmp_path, clock) -> None:
    estimator = Evaluator(tmp_path, clock)
    last = run(estimator, clock, Training(estimator, clock, {}, ends_at_s=5))
    assert last.results == (None, None)


def test_checkpoint_that_was_removed_is_passed_over(tmp_path, clock) -> None:
    estimator = Evaluator(tmp_path, clock)
    evaluate = estimator.evaluate

    def evaluate_late(*arguments, checkpoint_path, **options):
        if checkpoint_path.endswith("-1"):
            Path(checkpoint_path).unlink()
        return evaluate(*arguments, checkpoint_path=checkpoint_path, **options)

    estimator.evaluate = evaluate_late
    training = Training(estimator, clock, {0: 1, 10: 2})
    assert run(estimator, clock, training, max_steps=2).results[0]["global_step"] == 2
    assert estimator.evaluated == [2]


def test_evaluation_that_fails_is_an_error(tmp_path, clock) -> None:
    estimator = Evaluator(tmp_path, clock)

    def fail(*arguments, **options):
        raise ValueError("labels are missing")

    estimator.evaluate = fail
    with pytest.raises(ValueError, match="labels are missing"):
        run(estimator, clock, Training(estimator, clock, {0: 1}))


def test_limit_is_that_of_the_environment(tmp_path, monkeypatch) -> None:
    in_cluster(monkeypatch, "evaluator", 0, chief=1, worker=1)
    monkeypatch.setenv("STRATAGEM_CHECKPOINT_TIMEOUT_S", "0.01")
    spec = EvalSpec(train_fn, start_delay_secs=0, throttle_secs=0)
    with pytest.raises(DeadlineExceededError, match=r"a new one every 0.01 s"):
        train_and_evaluate(FakeEstimator(tmp_path), TrainSpec(train_fn), spec)


def test_sigterm_ends_it_in_order(tmp_path, monkeypatch) -> None:
    in_cluster(monkeypatch, "evaluator", 0, chief=1, worker=1)
    estimator = FakeEstimator(tmp_path)
    estimator.write_checkpoint(5)
    evaluate = estimator.evaluate

    def evaluate_and_end(*arguments, **options):
        signal.raise_signal(signal.SIGTERM)
        return evaluate(*arguments, **options)

    estimator.evaluate = evaluate_and_end
    spec = EvalSpec(train_fn, start_delay_secs=0, throttle_secs=3600)
    metrics, _ = train_and_evaluate(estimator, TrainSpec(train_fn, 10), spec)
    assert metrics["global_step"] == 5


# Standalone clients send training to a cluster.

_CLUSTER = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]}


@pytest.fixture
def cluster_head(tmp_path, monkeypatch):
    """Fake cluster head that runs jobs as local processes."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    path = os.pathsep.join([str(Path(sg.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    (tmp_path / "head").mkdir()
    with head(tmp_path / "head") as made:
        monkeypatch.setenv("STRATAGEM_JOBS_PORT", made.url.rpartition(":")[2])
        made.machines = [{f"{job}:0": 1.0} for job in _CLUSTER]
        yield made


def reading_fn() -> Any:
    print("reading", len(X), "rows")
    return sg.input.Dataset((X, Y), batch_size=8)


def whole_fn() -> Any:
    return sg.input.Dataset((X, Y), batch_size=32)


def client_of(folder: Path, strategy: Any) -> sg.estimator.Estimator:
    both = sg.estimator.DistributeConfig(train_distribute=strategy, remote_cluster=_CLUSTER)
    config = sg.estimator.RunConfig(experimental_distribute=both, save_checkpoints_steps=5)
    return sg.estimator.Estimator(model_fn, folder, config)


@pytest.mark.slow
def test_model_is_trained_on_the_cluster_and_its_metrics_come_back(
    cluster_head: Head, tmp_path, capfd
) -> None:
    # As a laptop has it: there the task makes it again.
    estimator = client_of(tmp_path / "model", sg.OneDeviceStrategy("cpu:0"))
    metrics, exports = sg.estimator.train_and_evaluate(
        estimator,
        sg.estimator.TrainSpec(reading_fn, max_steps=7),
        sg.estimator.EvalSpec(whole_fn, steps=None, throttle_secs=0),
    )
    assert exports == []
    assert "reading 96 rows" in capfd.readouterr().out
    assert len(cluster_head.processes) == 1
    here = sg.estimator.Estimator(model_fn, tmp_path / "model")
    assert metrics == pytest.approx(here.evaluate(whole_fn), rel=1e-5)
    assert metrics["global_step"] == 7
    one = sg.estimator.Estimator(model_fn, tmp_path / "one")
    one.train(reading_fn, max_steps=7)
    assert metrics == pytest.approx(one.evaluate(whole_fn), rel=1e-4)


def test_what_cannot_be_sent_is_named(cluster_head: Head, tmp_path) -> None:
    lock = threading.Lock()

    def locked_fn() -> Any:
        with lock:
            return reading_fn()

    estimator = client_of(tmp_path, sg.OneDeviceStrategy("cpu:0"))
    with pytest.raises(TypeError, match=r"Variable 'lock' of .*input_fn.* cannot be sent to the"):
        sg.estimator.train_and_evaluate(
            estimator,
            sg.estimator.TrainSpec(locked_fn, max_steps=7),
            sg.estimator.EvalSpec(whole_fn),
        )
    with pytest.raises(TypeError, match=r"Variable 'lock' of .* cannot be sent to the"):
        estimator.train(locked_fn, steps=3)
    assert cluster_head.processes == {}


def test_settings_that_are_sent_are_of_the_task_that_gets_them(monkeypatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    both = sg.estimator.DistributeConfig(strategy, remote_cluster=_CLUSTER)
    config = sg.estimator.RunConfig(
        "folder", experimental_distribute=both, save_checkpoints_steps=3, tf_random_seed=1
    )
    sent = pickle.dumps(config)
    cluster_config = {"cluster": _CLUSTER, "task": {"type": "chief", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster_config))
    got = pickle.loads(sent)
    assert (got.task_type, got.num_ps_replicas, got.num_worker_replicas) == ("chief", 1, 2)
    assert (got.model_dir, got.save_checkpoints_steps, got.save_checkpoints_secs) == (
        "folder",
        3,
        None,
    )
    assert got.tf_random_seed == 1
    assert got.experimental_distribute.remote_cluster is None
    assert not isinstance(got.train_distribute, sg.Strategy)
    assert re.search("cpu:0.*cpu:1", repr(got.train_distribute()))


# Validation of TrainSpec and EvalSpec.


def test_defaults_of_specs_are_tensorflows_and_parts_are_kept_in_order() -> None:
    train, evaluation = TrainSpec(train_fn), EvalSpec(train_fn)
    assert (train.max_steps, train.hooks, train.saving_listeners) == (None, (), ())
    assert (evaluation.steps, evaluation.name, evaluation.hooks) == (100, None, ())
    assert (evaluation.exporters, evaluation.start_delay_secs) == ((), 120)
    assert evaluation.throttle_secs == 600
    hooks, listeners = [StopAtStepHook(1), StopAtStepHook(2)], [CheckpointSaverListener()]
    train = TrainSpec(train_fn, np.int64(3), hooks, listeners)
    assert (train.max_steps, train.hooks) == (3, tuple(hooks))
    assert train.saving_listeners == tuple(listeners)
    exporters = [LatestExporter("a", train_fn), FinalExporter("b", train_fn)]
    for given in (exporters, iter(exporters)):
        assert EvalSpec(train_fn, exporters=given).exporters == tuple(exporters)
    assert EvalSpec(train_fn, exporters=exporters[0]).exporters == (exporters[0],)


TWO_OF_ONE_NAME = [LatestExporter("a", train_fn), FinalExporter("a", train_fn)]
WRONG = [
    (TrainSpec, {"input_fn": 3}, TypeError, "input_fn=3 is of type int"),
    (EvalSpec, {"input_fn": None}, TypeError, "input_fn=None is of type NoneType"),
    (TrainSpec, {"max_steps": 0}, ValueError, "max_steps=0"),
    (EvalSpec, {"steps": -1}, ValueError, "steps=-1"),
    (EvalSpec, {"name": 3}, TypeError, "name=3 is of type int"),
    (EvalSpec, {"start_delay_secs": -1}, ValueError, "start_delay_secs=-1"),
    (EvalSpec, {"throttle_secs": -0.1}, ValueError, "throttle_secs=-0.1"),
    (TrainSpec, {"hooks": [3]}, TypeError, r"hooks=\[3\](?s:.)*a list or tuple of SessionRunHook"),
    (EvalSpec, {"hooks": StopAtStepHook(1)}, TypeError, "a list or tuple of SessionRun"),
    (TrainSpec, {"saving_listeners": [3]}, TypeError, r"listeners=\[3\](?s:.)*a list or tuple of "),
    (EvalSpec, {"exporters": 3}, TypeError, "exporters=3 is of type int"),
    (EvalSpec, {"exporters": "best"}, TypeError, "exporters='b' is of type str"),
    (EvalSpec, {"exporters": TWO_OF_ONE_NAME}, ValueError, r"names \['a', 'a'\], of folders, are"),
    (EvalSpec, {"exporters": LatestExporter("", train_fn)}, ValueError, "are empty or not unique"),
]


@pytest.mark.parametrize(("kind", "changes", "error", "words"), WRONG)
def test_other_parts_are_errors(kind, changes, error, words) -> None:
    with pytest.raises(error, match=words):
        kind(**{"input_fn": train_fn, **changes})
