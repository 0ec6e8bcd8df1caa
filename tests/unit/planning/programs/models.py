"""Models whose training steps are compiled for machines that are not here, each with its batch.

Each function makes a compiled model in the current scope, and returns it with the shapes of a batch
of all replicas together.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import jax
import keras

__all__ = ["digits", "resnet_50"]

Made = tuple[Any, tuple[jax.ShapeDtypeStruct, ...]]

_EXAMPLE = Path(__file__).parents[4] / "examples" / "01_train_digits.py"


def _loss() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _labelled(shape: tuple[int, ...], dtype: str, labels: tuple[int, ...]) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(labels, "int32")


def digits(num_replicas: int, batch_size: int = 100) -> Made:
    """The network of examples/01_train_digits.py.

    Args:
        num_replicas: how many share the batch.
        batch_size: of each of them.
    """
    spec = importlib.util.spec_from_file_location("train_digits", _EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model = example.build_model((8, 8, 1), 0.5)
    model.compile("adam", _loss(), metrics=["accuracy"])
    rows = num_replicas * batch_size
    return model, _labelled((rows, 8, 8, 1), "float32", (rows,))


def resnet_50(num_replicas: int, batch_size: int = 64) -> Made:
    """Keras's ResNet-50 for ImageNet, with momentum.

    Args:
        num_replicas: how many share the batch.
        batch_size: of each of them.
    """
    model = keras.applications.ResNet50(
        weights=None, classifier_activation=None, input_shape=(224, 224, 3)
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), _loss(), metrics=["accuracy"])
    rows = num_replicas * batch_size
    return model, _labelled((rows, 224, 224, 3), "float32", (rows,))
