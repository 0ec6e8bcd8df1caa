"""Loops over batches, around steps, and what hooks see of them."""

from stratagem.estimator.loops.batches import (
    InputFunction,
    ModelBatches,
    features_and_labels,
    require_batch,
)
from stratagem.estimator.loops.coordinated_training import Coordinated, WorkersBatches
from stratagem.estimator.loops.evaluation_record import (
    FILE_NAME,
    read_eval_metrics,
    write_eval_metrics,
)
from stratagem.estimator.loops.host_parts import HostParts
from stratagem.estimator.loops.placed_model import PlacedModel, PlacedModels
from stratagem.estimator.loops.session import HookedLoop, ModelSession
from stratagem.estimator.loops.training import train
from stratagem.estimator.loops.training_hooks import training_hooks
from stratagem.estimator.loops.training_part import OwnProgram, TrainingPart
from stratagem.estimator.loops.training_summaries import TrainingSummaries, write_results, writer_of

__all__ = [
    "Coordinated",
    "FILE_NAME",
    "HookedLoop",
    "HostParts",
    "InputFunction",
    "ModelBatches",
    "ModelSession",
    "OwnProgram",
    "PlacedModel",
    "PlacedModels",
    "TrainingPart",
    "TrainingSummaries",
    "WorkersBatches",
    "features_and_labels",
    "read_eval_metrics",
    "require_batch",
    "train",
    "training_hooks",
    "write_eval_metrics",
    "write_results",
    "writer_of",
]
