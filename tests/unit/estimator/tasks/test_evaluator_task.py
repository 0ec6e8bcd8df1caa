"""Evaluator task with a fake clock."""

from __future__ import annotations

import logging
import signal
from pathlib import Path

import pytest

from stratagem.errors import DeadlineExceededError
from stratagem.estimator.tasks.train_and_evaluate import (
    CheckpointEvaluator,
    EvaluatorLoop,
    run_evaluator,
)
from stratagem.estimator.tasks.train_spec import EvalSpec, LatestExporter, TrainSpec
from tests.unit.estimator.fake_estimator import FakeEstimator
from tests.unit.estimator.hooks.fake_loop import FakeClock


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
