"""Protocol for Estimators accepted by train_and_evaluate, exporters and early stopping."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from stratagem.errors import explain
from stratagem.estimator.settings.run_config import RunConfig


@runtime_checkable
class EstimatorProtocol(Protocol):
    """Subset of `Estimator` that `train_and_evaluate`, exporters and early stopping use."""

    @property
    def config(self) -> RunConfig:
        """Run configuration."""
        ...

    @property
    def model_dir(self) -> str:
        """Folder of checkpoints and summaries."""
        ...

    def train(self, input_fn: Callable[..., Any], **options: object) -> Any:
        """Trains the model."""
        ...

    def evaluate(self, input_fn: object, **options: object) -> Mapping[str, Any]:
        """Evaluates a checkpoint and returns its metrics by name."""
        ...

    def latest_checkpoint(self) -> str | None:
        """Returns the path of the latest checkpoint, or None."""
        ...

    def eval_dir(self, name: str | None = None) -> str:
        """Returns the folder of an evaluation's summaries."""
        ...


def check_estimator(estimator: object) -> None:
    """Raises TypeError unless the object is an Estimator."""
    if not isinstance(estimator, EstimatorProtocol):
        raise TypeError(
            explain(
                f"estimator={estimator!r} is of type {type(estimator).__name__}.",
                expected="an Estimator.",
                fix="pass sg.estimator.Estimator(model_fn) or a pre-made Estimator.",
            )
        )
