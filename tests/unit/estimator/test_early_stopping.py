"""Early-stopping hooks and exporters decide by the record of evaluations."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratagem import estimator as est
from stratagem.estimator.experimental import EarlyStoppingHook
from stratagem.estimator.loops import write_eval_metrics
from stratagem.estimator.tasks import BestExporter, FinalExporter, LatestExporter
from stratagem.strategies.collectives import host
from tests.unit.estimator.fake_estimator import FakeEstimator
from tests.unit.estimator.fake_loop import FakeClock, FakeSession

# Early-stopping hooks follow TensorFlow's rules: step and value of a metric.
EVALUATIONS = [(10, 0.5), (20, 0.7), (30, 0.6), (40, 0.65)]


@pytest.fixture
def evaluated(tmp_path) -> FakeEstimator:
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
def test_stops_by_the_record(evaluated, make, argument, min_steps, wanted) -> None:
    options = {"min_steps": min_steps, "run_every_secs": None, "run_every_steps": 5}
    assert stops(make(evaluated, "m", argument, **options)) == wanted


def test_other_folder_of_evaluations(evaluated, tmp_path) -> None:
    write_eval_metrics(tmp_path / "other", {"m": 9.0, "global_step": 1})
    options = {"run_every_secs": None, "run_every_steps": 5}
    assert stops(est.stop_if_higher_hook(evaluated, "m", 8, str(tmp_path / "other"), **options))
    assert not stops(est.stop_if_higher_hook(evaluated, "m", 8, **options))


def test_metric_that_is_missing_is_an_error_where_something_was_evaluated(evaluated) -> None:
    other = FakeEstimator(Path(evaluated.model_dir) / "other")
    assert num_steps(est.stop_if_lower_hook(other, "loss", 1e9)) == 20
    with pytest.raises(ValueError, match="The evaluation of step 10 has no metric 'loss'"):
        num_steps(est.stop_if_lower_hook(evaluated, "loss", 1e9))


@pytest.mark.parametrize(
    ("secs", "steps", "asked"), [(None, 3, [1, 4, 7, 10]), (4.5, None, [1, 6])]
)
def test_asks_every_so_often(secs, steps, asked) -> None:
    clock, calls = FakeClock(), []
    session = FakeSession(on_step=clock.passing(1))

    def should_stop() -> bool:
        calls.append(session.global_step)
        return False

    hook = EarlyStoppingHook(should_stop, secs, steps, clock=clock)
    session.loop([hook], 10)
    session.loop([hook], 1)  # a second run asks at its first step
    assert calls == [*asked, 11]


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
    final = FinalExporter("final", receiver_fn)
    assert exported(final, estimator, [1.0, 0.5]) == []
    assert exported(final, estimator, [2.0], first_step=3, is_final=True) == [3]


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (
            lambda e: est.make_early_stopping_hook(e, 3),
            TypeError,
            "should_stop_fn=3 is of type int",
        ),
        (
            lambda _: est.make_early_stopping_hook("model", lambda: True),
            TypeError,
            "estimator='model' is of type str",
        ),
        (
            lambda e: est.make_early_stopping_hook(e, lambda: True, run_every_steps=1),
            ValueError,
            "A timer received every_secs=60",
        ),
        (
            lambda _: BestExporter(compare_fn=lambda a, b: True),
            ValueError,
            r"takes the arguments \['a', 'b'\]",
        ),
        (
            lambda _: BestExporter(compare_fn=None),
            ValueError,
            r"compare_fn=None takes the arguments \[\]",
        ),
        (lambda _: BestExporter(exports_to_keep=0), ValueError, "exports_to_keep=0"),
        *(
            (lambda _, kind=kind: kind("best", 3), TypeError, "=3 is (?s:.)*build_raw_serving")
            for kind in (BestExporter, FinalExporter, LatestExporter)
        ),
        (lambda _: est.Scaffold(saver=3), TypeError, r"saver=3 is of type int(?s:.)*save\("),
    ],
    ids=range(10),
)
def test_wrong_arguments_are_refused_before_training(evaluated, make, error, words) -> None:
    with pytest.raises(error, match=words):
        make(evaluated)
