"""What is asked of an Estimator by those that train, evaluate and export it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from stratagem.estimator.settings.run_config import RunConfig
from stratagem.messages import explain

__all__ = ["EstimatorProtocol", "check_estimator"]


@runtime_checkable
class EstimatorProtocol(Protocol):
    """The part of `Estimator` that `train_and_evaluate`, exporters and early stopping use."""

    @property
    def config(self) -> RunConfig:
        """How it runs."""
        ...

    @property
    def model_dir(self) -> str:
        """The folder of checkpoints and summaries."""
        ...

    def train(self, input_fn: Any, **options: Any) -> Any:
        """Trains."""
        ...

    def evaluate(self, input_fn: Any, **options: Any) -> Mapping[str, Any]:
        """Evaluates a checkpoint."""
        ...

    def latest_checkpoint(self) -> str | None:
        """Returns the path of the latest checkpoint; None where there is none."""
        ...

    def eval_dir(self, name: str | None = None) -> str:
        """Returns the folder of an evaluation."""
        ...


def check_estimator(estimator: object) -> None:
    """Raises unless something is an Estimator.

    Args:
        estimator: what was given.

    Raises:
        TypeError: another type.
    """
    if not isinstance(estimator, EstimatorProtocol):
        raise TypeError(
            explain(
                f"estimator={estimator!r} is of type {type(estimator).__name__}.",
                expected="an Estimator.",
                fix="pass sg.estimator.Estimator(model_fn), or a pre-made one.",
            )
        )
