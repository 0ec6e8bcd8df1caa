"""NanTensorHook fails or stops on NaN losses."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from stratagem.estimator.hooks.nan import NanLossDuringTrainingError, NanTensorHook
from tests.unit.estimator.hooks.fake_loop import FakeSession


def nan_at(bad_step: int):
    return lambda name, step: np.float32("nan" if step == bad_step else 0.5)


def test_nan_is_an_error() -> None:
    session = FakeSession(values=nan_at(3))
    with pytest.raises(NanLossDuringTrainingError, match="became NaN at global step"):
        session.loop([NanTensorHook("loss")], 10)
    assert session.global_step == 3


def test_nan_ends_training_where_it_may_not_fail(caplog) -> None:
    caplog.set_level(logging.WARNING, logger="stratagem.estimator")
    session = FakeSession(values=nan_at(3))
    assert session.loop([NanTensorHook("loss", fail_on_nan_loss=False)], 10) == 3
    assert "The loss became NaN at global step 3: stopping training." in caplog.text


def test_numbers_and_infinity_pass() -> None:
    session = FakeSession(values=lambda name, step: np.float32("inf"))
    assert session.loop([NanTensorHook("loss")], 4) == 4
    assert [fetches for _, fetches in session.fetched] == [{"loss": "loss"}] * 4


def test_error_is_a_runtime_error() -> None:
    assert issubclass(NanLossDuringTrainingError, RuntimeError)
