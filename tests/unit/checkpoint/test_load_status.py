"""Restore status: assertions on restored values, and a warning at deletion."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import keras
import numpy as np
import pytest

import stratagem as sg


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A checkpoint of two variables."""
    one, two = sg.Variable(1.0), sg.Variable(2.0)
    return sg.train.Checkpoint(one=one, two=two).save(tmp_path / "ckpt")


def test_all_is_restored(path: str) -> None:
    checkpoint = sg.train.Checkpoint(one=sg.Variable(0.0), two=sg.Variable(0.0))
    for status in (checkpoint.restore(path), checkpoint.read(path)):
        assert status.assert_consumed() is status
        assert status.assert_existing_objects_matched() is status
        assert status.assert_nontrivial_match() is status
        assert status.expect_partial() is status


def test_value_without_an_object(path: str) -> None:
    status = sg.train.Checkpoint(one=sg.Variable(0.0)).restore(path).expect_partial()
    status.assert_existing_objects_matched().assert_nontrivial_match()
    with pytest.raises(
        AssertionError, match=r"Values without an object: two/value\. Objects without values: none"
    ):
        status.assert_consumed()
    assert "waiting=1" in repr(status)


def test_object_without_a_value_keeps_its_own(path: str) -> None:
    one, new = sg.Variable(0.0), sg.Variable(7.0)
    checkpoint = sg.train.Checkpoint(one=one, two=sg.Variable(0.0), new=new)
    status = checkpoint.restore(path).expect_partial().assert_nontrivial_match()
    assert [float(one.value), float(new.value)] == [1.0, 7.0]
    with pytest.raises(AssertionError, match=r"ckpt-1 holds no values for new\.\nExpected"):
        status.assert_existing_objects_matched()
    with pytest.raises(
        AssertionError, match=r"Values without an object: none\. Objects without values: new"
    ):
        status.assert_consumed()


def test_no_object_at_all(path: str) -> None:
    status = sg.train.Checkpoint().read(path).expect_partial().assert_existing_objects_matched()
    with pytest.raises(AssertionError, match="No object matches"):
        status.assert_nontrivial_match()


def test_optimizer_that_was_not_saved_is_an_object_without_a_value(tmp_path: Path) -> None:
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    path = sg.train.Checkpoint(model=model).save(tmp_path / "ckpt")
    model.compile("adam", "mse")
    status = sg.train.Checkpoint(model=model).restore(path).expect_partial()
    with pytest.raises(AssertionError, match=r"holds no values for model\.optimizer"):
        status.assert_existing_objects_matched()


def test_metrics_of_a_model_may_be_left_over(tmp_path: Path) -> None:
    def make() -> keras.Model:
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
        return model

    model = make()
    model.train_on_batch(np.zeros((2, 2)), np.zeros((2, 1)))
    path = sg.train.Checkpoint(model=model).save(tmp_path / "ckpt")
    sg.train.Checkpoint(model=make()).restore(path).assert_consumed()


@pytest.mark.parametrize("is_expected", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_unused_values_are_warned_of_once_nothing_can_use_them(
    is_expected: bool, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "stratagem")

    def recorded() -> list[str]:
        gc.collect()
        return [message for message in caplog.messages if path in message]

    checkpoint = sg.train.Checkpoint(one=sg.Variable(0.0), new=sg.Variable(0.0))
    status = checkpoint.restore(path)
    if is_expected:
        status.expect_partial()
    del status
    assert not recorded()  # an object may still be set
    del checkpoint
    messages = recorded()
    assert len(messages) == (0 if is_expected else 1)
    for message in messages:
        assert "Values without an object: two/value." in message
        assert "Objects without values: new." in message
