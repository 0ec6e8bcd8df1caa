"""What a model function is called for."""

from __future__ import annotations

from typing import Final

__all__ = ["ModeKeys"]


class ModeKeys:
    """The values of `mode` that a model function may be called with.

    Example:
        >>> sg.estimator.ModeKeys.PREDICT
        'infer'

    Source: tensorflow/estimator mode_keys.py, ModeKeys.
    """

    TRAIN: Final = "train"
    EVAL: Final = "eval"
    PREDICT: Final = "infer"
