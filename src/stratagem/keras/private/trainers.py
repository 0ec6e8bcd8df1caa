"""Private names of Keras's models in training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keras.src.backend import compute_output_spec

from stratagem.keras.private.access import as_open

if TYPE_CHECKING:
    import keras


def build_for(model: keras.Model, batch: object) -> None:
    """Creates the variables of a training step: of layers, the optimizer and metrics.

    `batch` needs only the shape and dtype of each array.
    """
    as_open(model)._symbolic_build(data_batch=batch)


def has_unbuilt_metrics(model: keras.Model) -> bool:
    """Returns True if metrics or losses given to `compile` have no variables yet."""
    compiled = as_open(model)._compile_metrics, as_open(model)._compile_loss
    return any(one is not None and not one.built for one in compiled)


def build_metrics(model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> None:
    """Creates the variables of metrics and losses from specs of a batch and its outputs."""
    weights = {"sample_weight": sample_weight}
    if (metrics := as_open(model)._compile_metrics) is not None and not metrics.built:
        compute_output_spec(model.compute_metrics, x, y, y_pred, **weights)
    if (loss := as_open(model)._compile_loss) is not None and not loss.built:
        compute_output_spec(as_open(model)._compute_loss, x, y, y_pred, **weights, training=False)


def takes_training(model: keras.Model) -> bool:
    """Returns True if the model's `call` takes `training`."""
    return bool(as_open(model)._call_has_training_arg)


def total_loss(
    model: keras.Model,
    x: object,
    y: object,
    y_pred: object,
    sample_weight: object,
    *,
    training: bool,
) -> Any:
    """Returns `model.compute_loss(...)`, including overrides without `training`."""
    return as_open(model)._compute_loss(x, y, y_pred, sample_weight, training=training)


def loss_tracker(model: keras.Model) -> Any:
    """Returns the metric that `fit` reports as the loss."""
    return as_open(model)._loss_tracker


def output_loss_trackers(model: keras.Model) -> list[Any]:
    """Returns the metrics that report the loss of each output."""
    compiled = as_open(model)._compile_loss
    return [] if compiled is None else list(compiled.metrics)


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """Returns the arguments of `compile`, as the original objects."""
    return dict(as_open(model)._compile_config.config)


def named_metrics(model: keras.Model) -> dict[str, Any]:
    """Returns a model's metrics except losses, by the names that `fit` reports."""
    compiled = as_open(model)._compile_metrics
    losses = [loss_tracker(model), *output_loss_trackers(model)]
    named = {} if compiled is None else dict(zip(compiled.result(), compiled.metrics, strict=True))
    for metric in model.metrics:
        if metric is not compiled and not any(metric is loss for loss in losses):
            named[metric.name] = metric
    return named


def set_initial_epoch(model: Any, epoch: int | None) -> None:
    """Sets the first epoch of the active `fit`; None restores its `initial_epoch`."""
    as_open(model)._initial_epoch = epoch


def calls_in_thread(callbacks: keras.callbacks.CallbackList) -> bool:
    """Returns True if batch callbacks run in another thread, concurrently with `fit`."""
    return as_open(callbacks)._async_train
