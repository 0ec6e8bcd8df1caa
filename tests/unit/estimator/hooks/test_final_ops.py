"""FinalOpsHook and FeedFnHook."""

from __future__ import annotations

import pytest

from stratagem.estimator.hooks.final_ops import FeedFnHook, FinalOpsHook
from tests.unit.estimator.hooks.fake_loop import FakeSession


def test_values_are_those_of_the_last_step() -> None:
    hook = FinalOpsHook({"a": "loss", "b": ["x", "y"]})
    session = FakeSession(values=lambda name, step: f"{name} at {step}")
    session.loop([hook], 3)
    assert hook.final_ops_values == {"a": "loss at 3", "b": ["x at 3", "y at 3"]}
    assert len(session.fetched) == 1
    assert hook.tensors == {"final['a']": "loss", "final['b'][0]": "x", "final['b'][1]": "y"}


def test_nothing_is_fetched_for_none() -> None:
    hook, session = FinalOpsHook(None), FakeSession()
    session.loop([hook], 3)
    assert hook.final_ops_values is None
    assert session.fetched == []


def test_feeding_is_an_error() -> None:
    with pytest.raises(NotImplementedError, match=r"final_ops_feed_dict=.* is not supported"):
        FinalOpsHook("loss", {"x": 1})
    with pytest.raises(
        NotImplementedError, match=r"FeedFnHook.* is not supported: there are no placeholders"
    ):
        FeedFnHook(lambda: {})
