"""Folders of arguments: an empty one is refused, wherever files are written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.launch.plan.options import LaunchOptions
from stratagem.resources import checked_folder


def _evaluator() -> Any:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(loss="mse")
    return sg.SidecarEvaluator(model, (np.ones((2, 2)), np.ones((2, 1))), "")


def test_folder_is_a_path_as_text() -> None:
    assert checked_folder("log_dir", "logs") == "logs"
    assert checked_folder("log_dir", Path("logs", "a")) == "logs/a"
    assert checked_folder("log_dir", Path()) == "."


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("directory", lambda: sg.train.CheckpointManager(sg.train.Checkpoint(), "", 1)),
        ("log_dir", lambda: sg.TensorBoard("")),
        ("checkpoint_dir", _evaluator),
        ("model_dir", lambda: sg.estimator.Estimator(lambda features: None, "")),
        ("journal_dir", lambda: sg.ParameterServerStrategy(journal_dir="")),
        pytest.param("log_dir", lambda: LaunchOptions(log_dir=""), id="log_dir of launch"),
        ("run_dir", lambda: LaunchOptions(run_dir="")),
    ],
)
def test_empty_folder_is_refused(name: str, make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=rf"{name}='' is empty\.\nExpected the path of a folder"):
        make()
