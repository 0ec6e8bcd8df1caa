"""What an exported model gives: the outputs of a signature."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from stratagem.messages import explain

__all__ = ["ClassificationOutput", "ExportOutput", "PredictOutput", "RegressionOutput"]


class ExportOutput:
    """The outputs of one signature of an exported model.

    Source: TF 2.21 export_output.py, ExportOutput.
    """

    @property
    def outputs(self) -> dict[str, Any]:
        """The arrays by the names that the signature gives them."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class PredictOutput(ExportOutput):
    """Outputs of any kind.

    Args:
        predictions: an array, which is called "output" then, or a dict of arrays.

    Example:
        >>> sorted(sg.estimator.export.PredictOutput({"classes": 1, "logits": 2}).outputs)
        ['classes', 'logits']

    Source: TF 2.21 export_output.py, PredictOutput.
    """

    predictions: Any

    @property
    def outputs(self) -> dict[str, Any]:
        """The predictions."""
        if isinstance(self.predictions, Mapping):
            return dict(self.predictions)
        return {"output": self.predictions}


@dataclasses.dataclass(frozen=True, eq=False)
class ClassificationOutput(ExportOutput):
    """Outputs of a classifier.

    Args:
        scores: of each class, shape (batch, classes).
        classes: numbers of classes, shape (batch, ...).

    Raises:
        ValueError: neither of the two.

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
                    "ClassificationOutput got neither scores nor classes.",
                    expected="at least one of them.",
                    fix="pass scores=probabilities.",
                )
            )

    @property
    def outputs(self) -> dict[str, Any]:
        """What is there of "scores" and "classes"."""
        both = {"scores": self.scores, "classes": self.classes}
        return {name: value for name, value in both.items() if value is not None}


@dataclasses.dataclass(frozen=True, eq=False)
class RegressionOutput(ExportOutput):
    """The output of a regression.

    Args:
        value: a number for each example.

    Example:
        >>> sorted(sg.estimator.export.RegressionOutput(np.ones(3)).outputs)
        ['outputs']

    Source: TF 2.21 export_output.py, RegressionOutput.
    """

    value: Any

    @property
    def outputs(self) -> dict[str, Any]:
        """The value under the name "outputs"."""
        return {"outputs": self.value}
