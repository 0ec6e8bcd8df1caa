"""Training with evaluation: specs, roles of a cluster, exporters, early stopping."""

from stratagem.estimator.tasks.checkpoint_evaluation import (
    CheckpointEvaluation,
    CheckpointEvaluator,
    EvaluationListener,
)
from stratagem.estimator.tasks.early_stopping import (
    EarlyStoppingHook,
    make_early_stopping_hook,
    stop_if_higher_hook,
    stop_if_lower_hook,
    stop_if_no_decrease_hook,
    stop_if_no_increase_hook,
)
from stratagem.estimator.tasks.evaluator_task import EvaluatorLoop, Notice, run_evaluator
from stratagem.estimator.tasks.exporters import (
    BestExporter,
    Exporter,
    FinalExporter,
    LatestExporter,
)
from stratagem.estimator.tasks.standalone_client import remote_cluster_of, run_remotely
from stratagem.estimator.tasks.train_and_evaluate import train_and_evaluate
from stratagem.estimator.tasks.train_spec import EvalSpec, TrainSpec

__all__ = [
    "BestExporter",
    "CheckpointEvaluation",
    "CheckpointEvaluator",
    "EarlyStoppingHook",
    "EvalSpec",
    "EvaluationListener",
    "EvaluatorLoop",
    "Exporter",
    "FinalExporter",
    "LatestExporter",
    "Notice",
    "TrainSpec",
    "make_early_stopping_hook",
    "remote_cluster_of",
    "run_evaluator",
    "run_remotely",
    "stop_if_higher_hook",
    "stop_if_lower_hook",
    "stop_if_no_decrease_hook",
    "stop_if_no_increase_hook",
    "train_and_evaluate",
]
