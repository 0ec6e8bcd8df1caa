"""Evaluator task with a fake clock."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stratagem as sg
from stratagem import estimator as est
from stratagem.devices.collectives import host
from stratagem.errors import DeadlineExceededError
from stratagem.estimator.experimental import EarlyStoppingHook
from stratagem.estimator.hooks import StopAtStepHook
from stratagem.estimator.loops import write_eval_metrics
from stratagem.estimator.saving_hooks import CheckpointSaverListener
from stratagem.estimator.tasks import (
    BestExporter,
    CheckpointEvaluator,
    EvalSpec,
    EvaluatorLoop,
    Exporter,
    FinalExporter,
    LatestExporter,
    TrainSpec,
    run_evaluator,
)
from tests.unit.estimator.fake_estimator import FakeEstimator
from tests.unit.estimator.hooks.fake_loop import FakeClock, FakeSession
from tests.unit.estimator.independent_workers import X, Y, model_fn
from tests.unit.launch.remote.heads import Head, head


def input_fn():
    return []


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
    eval_spec = EvalSpec(input_fn, **{"start_delay_secs": 0, "throttle_secs": 0, **spec})
    training.catch_up()
    return EvaluatorLoop(
        CheckpointEvaluator(estimator, eval_spec, max_steps),
        estimator.model_dir,
        eval_spec,
        timeout_s=timeout_s,
        stop_signal=training,
        clock=clock,
    ).run()


def test_each_new_checkpoint_is_evaluated_until_max_steps(tmp_path, clock) -> None:
    estimator = Evaluator(tmp_path, clock)
    training = Training(estimator, clock, {0: 0, 10.5: 10, 30: 20, 40: 30, 50: 40})
    last = run(estimator, clock, training, max_steps=30)
    assert estimator.evaluated == [0, 10, 20, 30]
    assert estimator.at_s == [0, 11, 30, 40]  # it looks once in a second
    assert (last.metrics["global_step"], last.is_final) == (30, True)


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


def test_training_that_never_begins_ends_the_evaluator(tmp_path, clock) -> None:
    estimator = Evaluator(tmp_path, clock)
    with pytest.raises(DeadlineExceededError, match=r"for 100 s \(last evaluated: none\)"):
        run(estimator, clock, Training(estimator, clock, {}), start_delay_secs=500)
    assert clock() == 100 + 500 + 100


def test_news_come_every_ten_minutes(tmp_path, clock, caplog) -> None:
    caplog.set_level(logging.WARNING, logger="stratagem.estimator")
    estimator = Evaluator(tmp_path, clock)
    with pytest.raises(DeadlineExceededError, match="The evaluator found no new checkpoint"):
        run(estimator, clock, Training(estimator, clock, {}), timeout_s=2000)
    waited = [record.args[1] for record in caplog.records]
    assert waited == [30, 630, 1230, 1830]


def test_notice_ends_it_with_the_newest_checkpoint(tmp_path, clock) -> None:
    estimator = Evaluator(tmp_path, clock)
    times = {0: 1, 10: 2, 20: 3}
    last = run(estimator, clock, Training(estimator, clock, times, 20), throttle_secs=30)
    assert estimator.evaluated == [1, 3]
    assert (last.metrics["global_step"], last.is_final) == (3, False)


def test_notice_without_any_checkpoint_returns_none(tmp_path, clock) -> None:
    estimator = Evaluator(tmp_path, clock)
    assert run(estimator, clock, Training(estimator, clock, {}, ends_at_s=5)) is None


def test_checkpoint_that_was_removed_is_passed_over(tmp_path, clock) -> None:
    estimator = Evaluator(tmp_path, clock)
    evaluate = estimator.evaluate

    def evaluate_late(*arguments, checkpoint_path, **options):
        if checkpoint_path.endswith("-1"):
            Path(checkpoint_path).unlink()
        return evaluate(*arguments, checkpoint_path=checkpoint_path, **options)

    estimator.evaluate = evaluate_late
    training = Training(estimator, clock, {0: 1, 10: 2})
    assert run(estimator, clock, training, max_steps=2).metrics["global_step"] == 2
    assert estimator.evaluated == [2]


def test_evaluation_that_fails_is_an_error(tmp_path, clock) -> None:
    estimator = Evaluator(tmp_path, clock)

    def fail(*arguments, **options):
        raise ValueError("labels are missing")

    estimator.evaluate = fail
    with pytest.raises(ValueError, match="labels are missing"):
        run(estimator, clock, Training(estimator, clock, {0: 1}))


def test_exports_of_a_checkpoint_are_returned(tmp_path, clock) -> None:
    estimator = Evaluator(tmp_path, clock)
    exporter = LatestExporter("latest", input_fn)
    last = run(
        estimator, clock, Training(estimator, clock, {0: 7}), max_steps=7, exporters=exporter
    )
    assert last.exports == [str(estimator.exports[0]["path"])]


def test_limit_is_that_of_the_environment(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_CHECKPOINT_TIMEOUT_S", "0.01")
    spec = EvalSpec(input_fn, start_delay_secs=0, throttle_secs=0)
    with pytest.raises(DeadlineExceededError, match=r"a new one every 0.01 s"):
        run_evaluator(FakeEstimator(tmp_path), TrainSpec(input_fn), spec)


def test_sigterm_ends_it_in_order(tmp_path) -> None:
    estimator = FakeEstimator(tmp_path)
    estimator.write_checkpoint(5)
    evaluate = estimator.evaluate

    def evaluate_and_end(*arguments, **options):
        signal.raise_signal(signal.SIGTERM)
        return evaluate(*arguments, **options)

    estimator.evaluate = evaluate_and_end
    spec = EvalSpec(input_fn, start_delay_secs=0, throttle_secs=3600)
    last = run_evaluator(estimator, TrainSpec(input_fn, 10), spec)
    assert last.metrics["global_step"] == 5


# Early-stopping hooks follow TensorFlow's rules.

# Step and value of a metric.
EVALUATIONS = [(10, 0.5), (20, 0.7), (30, 0.6), (40, 0.65)]


@pytest.fixture
def estimator_of_early_stopping(tmp_path) -> FakeEstimator:
    made = FakeEstimator(tmp_path)
    for step, value in EVALUATIONS:
        write_eval_metrics(made.eval_dir(), {"m": value, "global_step": step})
    return made


def num_steps(hook) -> int:
    return FakeSession().loop([hook], 20)


def stops(hook) -> bool:
    return num_steps(hook) == 1


@pytest.mark.parametrize(
    ("make", "argument", "min_steps", "wanted"),
    [
        (est.stop_if_higher_hook, 0.65, 0, True),
        (est.stop_if_higher_hook, 0.7, 0, False),
        (est.stop_if_higher_hook, 0.65, 30, False),
        (est.stop_if_lower_hook, 0.55, 0, True),
        (est.stop_if_lower_hook, 0.5, 0, False),
        (est.stop_if_lower_hook, 0.55, 20, False),
        (est.stop_if_no_increase_hook, 20, 0, True),  # 20 to 40
        (est.stop_if_no_increase_hook, 21, 0, False),
        (est.stop_if_no_increase_hook, 10, 30, False),  # 30, then 40 is higher
        (est.stop_if_no_decrease_hook, 30, 0, True),  # 10 to 40
        (est.stop_if_no_decrease_hook, 31, 0, False),
        (est.stop_if_no_decrease_hook, 10, 30, True),
    ],
)
def test_stops_by_the_record(
    estimator_of_early_stopping, make, argument, min_steps, wanted
) -> None:
    options = {"min_steps": min_steps, "run_every_secs": None, "run_every_steps": 5}
    assert stops(make(estimator_of_early_stopping, "m", argument, **options)) == wanted


def test_other_folder_of_evaluations(estimator_of_early_stopping, tmp_path) -> None:
    write_eval_metrics(tmp_path / "other", {"m": 9.0, "global_step": 1})
    options = {"run_every_secs": None, "run_every_steps": 5}
    hook = est.stop_if_higher_hook(
        estimator_of_early_stopping, "m", 8, str(tmp_path / "other"), **options
    )
    assert stops(hook)
    assert not stops(est.stop_if_higher_hook(estimator_of_early_stopping, "m", 8, **options))


def test_nothing_evaluated_yet_goes_on(tmp_path) -> None:
    hook = est.stop_if_lower_hook(FakeEstimator(tmp_path), "m", 1e9)
    assert num_steps(hook) == 20


def test_metric_that_is_missing_is_an_error(estimator_of_early_stopping) -> None:
    hook = est.stop_if_lower_hook(estimator_of_early_stopping, "loss", 1.0)
    with pytest.raises(ValueError, match="The evaluation of step 10 has no metric 'loss'"):
        num_steps(hook)


@pytest.mark.parametrize(
    ("secs", "steps", "asked"), [(None, 3, [1, 4, 7, 10]), (4.5, None, [1, 6])]
)
def test_asks_every_so_often(secs, steps, asked) -> None:
    clock, session, calls = FakeClock(), FakeSession(), []

    def pass_a_second(step: int) -> None:
        clock.now_s += 1

    session = FakeSession(on_step=pass_a_second)

    def should_stop() -> bool:
        calls.append(session.global_step)
        return False

    session.loop([EarlyStoppingHook(should_stop, secs, steps, clock=clock)], 10)
    assert calls == asked


def test_chief_decides_for_all(monkeypatch) -> None:
    sent = []

    def broadcast(value, *, name):
        sent.append((name, value))
        return True

    monkeypatch.setattr(host, "broadcast_object", broadcast)
    session = FakeSession()
    session.is_chief = False

    def fail() -> bool:
        raise AssertionError("a worker asked")

    assert session.loop([EarlyStoppingHook(fail, None, 5)], 20) == 1
    assert sent == [("whether to stop early", False)]


def test_second_run_asks_at_its_first_step() -> None:
    calls = []
    hook = EarlyStoppingHook(lambda: calls.append(1), None, 100)
    for _ in range(2):
        FakeSession().loop([hook], 3)
    assert len(calls) == 2


def test_wrong_arguments_are_errors(estimator_of_early_stopping) -> None:
    with pytest.raises(TypeError, match="should_stop_fn=3 is not callable"):
        est.make_early_stopping_hook(estimator_of_early_stopping, 3)
    with pytest.raises(TypeError, match="estimator='model' is of type str"):
        est.make_early_stopping_hook("model", lambda: True)
    with pytest.raises(ValueError, match="make_early_stopping_hook received run_every_secs=60"):
        est.make_early_stopping_hook(estimator_of_early_stopping, lambda: True, run_every_steps=1)


# Exporters choose evaluations to export and remove old exports.


def receiver_fn():
    return None


def exported(exporter, estimator, losses, *, first_step=1, is_final=False) -> list[int]:
    """Returns the exported steps; evaluations write their records first."""
    steps = []
    for step, loss in enumerate(losses, start=first_step):
        result = {"loss": loss, "global_step": step}
        write_eval_metrics(estimator.eval_dir(), result)
        path = exporter.export(
            estimator=estimator,
            export_path=f"{estimator.model_dir}/export/{exporter.name}",
            checkpoint_path=f"model.ckpt-{step}",
            eval_result=result,
            is_the_final_export=is_final,
        )
        steps += [] if path is None else [step]
    return steps


@pytest.mark.parametrize("pattern", ["eval/*.tfevents.*", None])
def test_best_is_exported_when_the_loss_is_smaller(tmp_path, pattern) -> None:
    estimator = FakeEstimator(tmp_path)
    exporter = BestExporter("best", receiver_fn, pattern, assets_extra={"a": "b"}, as_text=True)
    assert exported(exporter, estimator, [3.0, 4.0, 3.0, 2.0, 2.5, 1.0]) == [1, 4, 6]
    assert {**estimator.exports[1], "path": None} == {
        "path": None,
        "receiver_fn": receiver_fn,
        "assets_extra": {"a": "b"},
        "as_text": True,
        "checkpoint_path": "model.ckpt-4",
    }


def test_best_of_an_earlier_run_counts(tmp_path) -> None:
    estimator = FakeEstimator(tmp_path)
    assert exported(BestExporter("best", receiver_fn), estimator, [3.0, 1.0]) == [1, 2]
    again = BestExporter("best", receiver_fn)
    assert exported(again, estimator, [2.0, 0.5], first_step=3) == [4]
    forgetful = BestExporter("best", receiver_fn, event_file_pattern=None)
    assert exported(forgetful, estimator, [2.0, 1.5], first_step=5) == [5, 6]


def test_evaluation_of_another_name_has_its_own_folder(tmp_path) -> None:
    estimator = FakeEstimator(tmp_path)
    write_eval_metrics(estimator.eval_dir("test"), {"loss": 0.1, "global_step": 7})
    assert exported(BestExporter("a", receiver_fn), estimator, [2.0]) == [1]
    other = BestExporter("b", receiver_fn, "eval_test/*.tfevents.*")
    assert exported(other, estimator, [2.0]) == []


def test_comparison_is_the_users(tmp_path) -> None:
    def is_higher(best_eval_result, current_eval_result) -> bool:
        return best_eval_result["loss"] < current_eval_result["loss"]

    exporter = BestExporter("best", receiver_fn, compare_fn=is_higher)
    assert exported(exporter, FakeEstimator(tmp_path), [1.0, 0.5, 2.0]) == [1, 3]


def test_latest_exports_each_and_keeps_some(tmp_path) -> None:
    estimator = FakeEstimator(tmp_path)
    exporter = LatestExporter("latest", receiver_fn, exports_to_keep=2)
    (tmp_path / "export" / "latest" / "notes").mkdir(parents=True)
    assert exported(exporter, estimator, [1.0, 2.0, 3.0, 4.0]) == [1, 2, 3, 4]
    left = sorted(path.name for path in (tmp_path / "export" / "latest").iterdir())
    assert left == ["1700000002", "1700000003", "notes"]


def test_all_are_kept_where_that_is_asked_for(tmp_path) -> None:
    exporter = LatestExporter("latest", receiver_fn, exports_to_keep=None)
    exported(exporter, FakeEstimator(tmp_path), [1.0] * 7)
    assert len(list((tmp_path / "export" / "latest").iterdir())) == 7


def test_final_exports_at_the_end_alone(tmp_path) -> None:
    estimator, exporter = FakeEstimator(tmp_path), FinalExporter("final", receiver_fn)
    assert exported(exporter, estimator, [1.0, 0.5]) == []
    assert exported(exporter, estimator, [2.0], first_step=3, is_final=True) == [3]


def test_evaluation_without_loss_needs_a_comparison(tmp_path) -> None:
    exporter = BestExporter("best", receiver_fn, event_file_pattern=None)
    estimator = FakeEstimator(tmp_path)
    options = {"export_path": str(tmp_path), "checkpoint_path": "c", "is_the_final_export": False}
    exporter.export(estimator=estimator, eval_result={"auc": 1.0}, **options)
    with pytest.raises(ValueError, match="cannot compare an evaluation without a loss"):
        exporter.export(estimator=estimator, eval_result={"auc": 2.0}, **options)


def test_exporters_are_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Exporter()


def test_exporters_wrong_arguments_are_errors() -> None:
    with pytest.raises(ValueError, match=r"takes the arguments \['a', 'b'\]"):
        BestExporter(compare_fn=lambda a, b: True)
    with pytest.raises(ValueError, match=r"compare_fn=None takes the arguments \[\]"):
        BestExporter(compare_fn=None)
    with pytest.raises(ValueError, match="exports_to_keep=0 is out of range"):
        BestExporter(exports_to_keep=0)
    with pytest.raises(TypeError, match="serving_input_receiver_fn=3 is not callable"):
        FinalExporter("final", 3)


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


def train_fn() -> Any:
    print("reading", len(X), "rows")
    return sg.input.Dataset((X, Y), batch_size=8)


def eval_fn() -> Any:
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
        sg.estimator.TrainSpec(train_fn, max_steps=7),
        sg.estimator.EvalSpec(eval_fn, steps=None, throttle_secs=0),
    )
    assert exports == []
    assert "reading 96 rows" in capfd.readouterr().out
    assert len(cluster_head.processes) == 1
    here = sg.estimator.Estimator(model_fn, tmp_path / "model")
    assert metrics == pytest.approx(here.evaluate(eval_fn), rel=1e-5)
    assert metrics["global_step"] == 7
    one = sg.estimator.Estimator(model_fn, tmp_path / "one")
    one.train(train_fn, max_steps=7)
    assert metrics == pytest.approx(one.evaluate(eval_fn), rel=1e-4)


def test_what_cannot_be_sent_is_named(cluster_head: Head, tmp_path) -> None:
    lock = threading.Lock()

    def locked_fn() -> Any:
        with lock:
            return train_fn()

    estimator = client_of(tmp_path, sg.OneDeviceStrategy("cpu:0"))
    with pytest.raises(TypeError, match=r"Variable 'lock' of .*input_fn.* cannot be sent to the"):
        sg.estimator.train_and_evaluate(
            estimator,
            sg.estimator.TrainSpec(locked_fn, max_steps=7),
            sg.estimator.EvalSpec(eval_fn),
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
