"""Exporters choose evaluations to export and remove old exports."""

from __future__ import annotations

import pytest

from stratagem.estimator.loops.evaluation_record import write_eval_metrics
from stratagem.estimator.tasks.train_spec import (
    BestExporter,
    Exporter,
    FinalExporter,
    LatestExporter,
)
from tests.unit.estimator.fake_estimator import FakeEstimator


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


def test_wrong_arguments_are_errors() -> None:
    with pytest.raises(ValueError, match=r"takes the arguments \['a', 'b'\]"):
        BestExporter(compare_fn=lambda a, b: True)
    with pytest.raises(ValueError, match=r"compare_fn=None takes the arguments \[\]"):
        BestExporter(compare_fn=None)
    with pytest.raises(ValueError, match="exports_to_keep=0 is out of range"):
        BestExporter(exports_to_keep=0)
    with pytest.raises(TypeError, match="serving_input_receiver_fn=3 is not callable"):
        FinalExporter("final", 3)
