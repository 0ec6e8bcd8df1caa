"""Every metric and loss of Keras, for ranks 1 to 4 and a part with padding, as on one device."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import jax
import keras
import numpy as np
import pytest

from stratagem.keras.numerics.step_mode import StepMode, step_mode
from tests.marks import slow
from tests.parity.comparison import differences, mirrored

_NUM_ROWS = 7  # parts of 4 and 3 rows, the second padded
_NUM_CLASSES = 3

# What a metric needs besides a name.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "BinaryIoU": {"target_class_ids": [0, 1]},
    "IoU": {"num_classes": _NUM_CLASSES, "target_class_ids": [0, 2]},
    "MeanIoU": {"num_classes": _NUM_CLASSES},
    "OneHotIoU": {"num_classes": _NUM_CLASSES, "target_class_ids": [0, 2]},
    "OneHotMeanIoU": {"num_classes": _NUM_CLASSES},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
}
_BASES = {"Metric", "MeanMetricWrapper", "Loss"}
_MEANS_OF_VALUES = {"Mean", "Sum"}
_LABELS = {"SparseCategoricalAccuracy", "SparseCategoricalCrossentropy"}
_LABELS |= {"SparseTopKCategoricalAccuracy"}
_CLASS_IDS = {"IoU", "MeanIoU"}


def _classes(module: Any, base: type) -> list[str]:
    found = inspect.getmembers(module, lambda one: inspect.isclass(one) and issubclass(one, base))
    return sorted({one.__name__ for _, one in found} - _BASES)


def _rows(rank: int) -> dict[str, np.ndarray]:
    """Targets in {0, 1}, probabilities, labels and one number of a class for each row."""
    random = np.random.RandomState(rank)
    shape = (_NUM_ROWS, 4, 2, _NUM_CLASSES)[: rank - 1] + (_NUM_CLASSES,) * (rank > 1)
    shape = shape or (_NUM_ROWS,)
    logits = random.standard_normal(shape)
    odds = np.exp(logits) / (np.exp(logits).sum(-1, keepdims=True) if rank > 1 else 2.0)
    labels = random.randint(0, _NUM_CLASSES, shape[:-1] if rank > 1 else shape)
    one_hot = np.eye(_NUM_CLASSES)[labels] if rank > 1 else labels % 2
    probabilities = odds if rank > 1 else odds / (odds.max() + 0.5)
    return {
        "y_true": one_hot.astype("float32"),
        "y_pred": probabilities.astype("float32"),
        "labels": labels.astype("int32"),
        "ids": random.randint(0, _NUM_CLASSES, shape).astype("int32"),
        "other_ids": random.randint(0, _NUM_CLASSES, shape).astype("int32"),
    }


def _arguments_of(name: str, rows: dict[str, Any]) -> tuple[Any, ...]:
    if name in _MEANS_OF_VALUES:
        return (rows["y_pred"],)
    if name in _CLASS_IDS:
        return rows["ids"], rows["other_ids"]
    return rows["labels" if name in _LABELS else "y_true"], rows["y_pred"]


def _made(name: str) -> Any:
    return getattr(keras.metrics, name)(**_ARGUMENTS.get(name, {}))


def _plain_results(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Results on one device of the metrics that take arguments of this rank at all."""
    results = {}
    for name in _classes(keras.metrics, keras.metrics.Metric):
        try:
            metric = _made(name)
            metric.update_state(*_arguments_of(name, rows))
            results[name] = np.asarray(metric.result())
        except (ValueError, TypeError, IndexError):
            continue  # Keras refuses this rank
    return results


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")  # in Keras's own code
@pytest.mark.parametrize(
    ("rank", "mode"),
    [  # In `fit` and in a loop; a metric of rank 1 is one number a batch, of no loop.
        (1, StepMode.SHARE),
        *itertools.product((2, 3, 4), (StepMode.SHARE, StepMode.OWN)),
    ],
)
def test_metric_of_a_padded_part(rank: int, mode: StepMode) -> None:
    rows = _rows(rank)
    expected = _plain_results(rows)
    assert len(expected) > 25, sorted(expected)
    strategy = mirrored(2)
    with strategy.scope():
        metrics = {name: _made(name) for name in expected}

    def step(batch: dict[str, Any]) -> None:
        with step_mode(mode):
            for name, metric in metrics.items():
                metric.update_state(*_arguments_of(name, batch))

    (batch,) = strategy.distribute_dataset([rows])
    strategy.run(step, args=(batch,))
    measured = {name: np.asarray(metric.result()) for name, metric in metrics.items()}
    assert differences(measured, expected) == []


@pytest.mark.parametrize("rank", [3, slow(1), slow(2), slow(4)])
def test_loss_of_a_padded_part(rank: int) -> None:
    rows = _rows(rank)
    losses, expected = {}, {}
    for name in _classes(keras.losses, keras.losses.Loss):
        loss = getattr(keras.losses, name)()
        try:
            expected[name] = np.asarray(loss(*_arguments_of(name, rows)))
            losses[name] = loss
        except (ValueError, TypeError, IndexError, AssertionError):
            continue  # Keras refuses this rank
    assert len(losses) > 12, sorted(losses)

    def step(batch: dict[str, Any]) -> dict[str, Any]:
        with step_mode(StepMode.SHARE):
            return {name: loss(*_arguments_of(name, batch)) for name, loss in losses.items()}

    strategy = mirrored(2)
    (batch,) = strategy.distribute_dataset([rows])
    shares = strategy.run(step, args=(batch,))
    total = strategy.reduce("SUM", shares, axis=None)
    assert differences(jax.tree.map(np.asarray, total), expected) == []
