"""Early-stopping hooks follow TensorFlow's rules."""

from __future__ import annotations

import pytest

from stratagem import estimator as est
from stratagem.devices.collectives import host
from stratagem.estimator.loops.evaluation_record import write_eval_metrics
from stratagem.estimator.tasks.early_stopping import EarlyStoppingHook
from tests.unit.estimator.fake_estimator import FakeEstimator
from tests.unit.estimator.hooks.fake_loop import FakeClock, FakeSession

# Step and value of a metric.
EVALUATIONS = [(10, 0.5), (20, 0.7), (30, 0.6), (40, 0.65)]


@pytest.fixture
def estimator(tmp_path) -> FakeEstimator:
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
def test_stops_by_the_record(estimator, make, argument, min_steps, wanted) -> None:
    options = {"min_steps": min_steps, "run_every_secs": None, "run_every_steps": 5}
    assert stops(make(estimator, "m", argument, **options)) == wanted


def test_other_folder_of_evaluations(estimator, tmp_path) -> None:
    write_eval_metrics(tmp_path / "other", {"m": 9.0, "global_step": 1})
    options = {"run_every_secs": None, "run_every_steps": 5}
    hook = est.stop_if_higher_hook(estimator, "m", 8, str(tmp_path / "other"), **options)
    assert stops(hook)
    assert not stops(est.stop_if_higher_hook(estimator, "m", 8, **options))


def test_nothing_evaluated_yet_goes_on(tmp_path) -> None:
    hook = est.stop_if_lower_hook(FakeEstimator(tmp_path), "m", 1e9)
    assert num_steps(hook) == 20


def test_metric_that_is_missing_is_an_error(estimator) -> None:
    hook = est.stop_if_lower_hook(estimator, "loss", 1.0)
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


def test_wrong_arguments_are_errors(estimator) -> None:
    with pytest.raises(TypeError, match="should_stop_fn=3 is not callable"):
        est.make_early_stopping_hook(estimator, 3)
    with pytest.raises(TypeError, match="estimator='model' is of type str"):
        est.make_early_stopping_hook("model", lambda: True)
    with pytest.raises(ValueError, match="make_early_stopping_hook received run_every_secs=60"):
        est.make_early_stopping_hook(estimator, lambda: True, run_every_steps=1)
