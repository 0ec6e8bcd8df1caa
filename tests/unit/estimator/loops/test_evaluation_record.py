"""Evaluation records in a folder."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from stratagem.estimator.loops.evaluation_record import (
    FILE_NAME,
    read_eval_metrics,
    write_eval_metrics,
)


def test_what_was_written_is_read_in_the_order_of_steps(tmp_path) -> None:
    folder = tmp_path / "model" / "eval"
    write_eval_metrics(folder, {"loss": np.float32(0.5), "global_step": np.int32(20)})
    write_eval_metrics(folder, {"loss": jnp.float32(1.5), "auc": 0.25, "global_step": 10})
    write_eval_metrics(folder, {"loss": 0.125, "global_step": 20})
    assert read_eval_metrics(folder) == {
        10: {"loss": 1.5, "auc": 0.25, "global_step": 10},
        20: {"loss": 0.125, "global_step": 20},
    }
    assert list(read_eval_metrics(folder)) == [10, 20]


def test_what_is_no_scalar_is_left_out_and_nan_is_kept(tmp_path) -> None:
    write_eval_metrics(tmp_path, {"m": np.eye(2), "loss": float("nan"), "global_step": 1})
    metrics = read_eval_metrics(tmp_path)[1]
    assert sorted(metrics) == ["global_step", "loss"]
    assert math.isnan(metrics["loss"])


def test_line_that_was_cut_short_is_passed_over(tmp_path) -> None:
    write_eval_metrics(tmp_path, {"loss": 1.0, "global_step": 1})
    with open(tmp_path / FILE_NAME, "a") as file:
        file.write('{"loss": 0.')
    assert list(read_eval_metrics(tmp_path)) == [1]


def test_folder_without_record_has_none(tmp_path) -> None:
    assert read_eval_metrics(tmp_path / "none") == {}
