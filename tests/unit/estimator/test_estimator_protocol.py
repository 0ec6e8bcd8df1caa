"""Objects that count as Estimators."""

from __future__ import annotations

import pytest

import stratagem as sg
from stratagem.estimator.estimator_protocol import EstimatorProtocol, check_estimator


def test_estimators_and_fakes_with_all_members_are_taken(tmp_path) -> None:
    check_estimator(sg.estimator.Estimator(lambda features, labels: None, str(tmp_path)))
    assert issubclass(sg.estimator.DNNClassifier, sg.estimator.Estimator)


@pytest.mark.parametrize("member", ["train", "evaluate", "latest_checkpoint", "eval_dir"])
def test_class_that_lacks_a_member_is_refused(member) -> None:
    names = {"config", "model_dir", "train", "evaluate", "latest_checkpoint", "eval_dir"}
    complete = type("Complete", (), dict.fromkeys(names, len))
    assert isinstance(complete(), EstimatorProtocol)
    with pytest.raises(TypeError, match="of type Partial"):
        check_estimator(type("Partial", (), dict.fromkeys(names - {member}, len))())


@pytest.mark.parametrize("other", [None, "model", sg.estimator.RunConfig()])
def test_other_objects_are_refused(other) -> None:
    with pytest.raises(TypeError, match=r"estimator=.*is of type .*\nExpected an Estimator"):
        check_estimator(other)
