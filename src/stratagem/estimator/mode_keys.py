"""Modes of a model function: train, eval and infer."""

from __future__ import annotations

from typing import Final


class ModeKeys:
    """Values of the `mode` argument of a model function.

    Example:
        >>> sg.estimator.ModeKeys.PREDICT
        'infer'

    Source: tensorflow/estimator mode_keys.py, ModeKeys.
    """

    TRAIN: Final = "train"
    EVAL: Final = "eval"
    PREDICT: Final = "infer"
