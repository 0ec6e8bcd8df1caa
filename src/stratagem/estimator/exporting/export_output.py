"""Outputs of exported signatures: prediction, classification and regression."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from stratagem.errors import explain


class ExportOutput:
    """Base class for the outputs of one exported signature.

    Example:
        >>> class Ranking(sg.estimator.export.ExportOutput):
        ...     def __init__(self, order):
        ...         self.order = order
        ...     @property
        ...     def outputs(self):
        ...         return {"order": self.order}
        >>> sorted(Ranking([2, 0, 1]).outputs)
        ['order']

    Source: TF 2.21 export_output.py, ExportOutput.
    """

    @property
    def outputs(self) -> dict[str, Any]:
        """Output arrays by name."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class PredictOutput(ExportOutput):
    """Arbitrary outputs.

    Args:
        predictions: an array, exported as "output", or a dict of arrays.

    Example:
        >>> sorted(sg.estimator.export.PredictOutput({"classes": 1, "logits": 2}).outputs)
        ['classes', 'logits']

    Source: TF 2.21 export_output.py, PredictOutput.
    """

    predictions: Any

    @property
    def outputs(self) -> dict[str, Any]:
        """The predictions by name."""
        if isinstance(self.predictions, Mapping):
            return dict(self.predictions)
        return {"output": self.predictions}


@dataclasses.dataclass(frozen=True, eq=False)
class ClassificationOutput(ExportOutput):
    """Outputs of a classifier.

    Args:
        scores: the score of each class, shape (batch, classes).
        classes: class ids, shape (batch, ...).

    Raises:
        ValueError: if both are None.

    Example:
        >>> sorted(sg.estimator.export.ClassificationOutput(scores=np.ones((1, 2))).outputs)
        ['scores']

    Source: TF 2.21 export_output.py, ClassificationOutput.
    """

    scores: Any = None
    classes: Any = None

    def __post_init__(self) -> None:
        if self.scores is None and self.classes is None:
            raise ValueError(
                explain(
                    "ClassificationOutput received neither scores nor classes.",
                    expected="at least one of them.",
                    fix="pass scores=probabilities.",
                )
            )

    @property
    def outputs(self) -> dict[str, Any]:
        """Scores and classes, whichever are set."""
        both = {"scores": self.scores, "classes": self.classes}
        return {name: value for name, value in both.items() if value is not None}


@dataclasses.dataclass(frozen=True, eq=False)
class RegressionOutput(ExportOutput):
    """Output of a regression.

    Args:
        value: one number per example, shape (batch, ...).

    Example:
        >>> sorted(sg.estimator.export.RegressionOutput(np.ones(3)).outputs)
        ['outputs']

    Source: TF 2.21 export_output.py, RegressionOutput.
    """

    value: Any

    @property
    def outputs(self) -> dict[str, Any]:
        """The value, named "outputs"."""
        return {"outputs": self.value}
