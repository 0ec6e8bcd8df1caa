"""Image classifiers of KerasHub, at small sizes, with random weights."""

from __future__ import annotations

from typing import Any

import keras
import keras_hub
import numpy as np

from validation.third_party.programs.measuring import Measurements, Place, Program, measured

_BATCH_SIZE = 4
_NUM_CLASSES = 3
_SIZE = 16


def _images() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(8)
    images = random.uniform(-1, 1, (7, _SIZE, _SIZE, 3)).astype("float32")
    return images, random.integers(0, _NUM_CLASSES, 7).astype("int32")


def _compile(model: Any) -> None:
    model.compile(
        optimizer=keras.optimizers.SGD(1e-2, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


def resnet_classifier(place: Place) -> Measurements:
    """Batch normalization takes the statistics of the whole batch, as one device does."""
    with place.scope():
        backbone = keras_hub.models.ResNetBackbone(
            input_conv_filters=[64],
            input_conv_kernel_sizes=[3],
            stackwise_num_filters=[64],
            stackwise_num_blocks=[1],
            stackwise_num_strides=[1],
            block_type="basic_block",
            image_shape=(_SIZE, _SIZE, 3),
        )
        for layer in backbone.layers:
            if isinstance(layer, keras.layers.BatchNormalization) and place.strategy:
                layer.synchronized = True
        model = keras_hub.models.ResNetImageClassifier(
            backbone=backbone, num_classes=_NUM_CLASSES, preprocessor=None
        )
        _compile(model)
    return measured(place, model, *_images(), _BATCH_SIZE)


def vit_classifier(place: Place) -> Measurements:
    with place.scope():
        backbone = keras_hub.models.ViTBackbone(
            image_shape=(_SIZE, _SIZE, 3),
            patch_size=(8, 8),
            num_layers=1,
            num_heads=2,
            hidden_dim=8,
            mlp_dim=16,
        )
        model = keras_hub.models.ViTImageClassifier(
            backbone=backbone, num_classes=_NUM_CLASSES, preprocessor=None
        )
        _compile(model)
    return measured(place, model, *_images(), _BATCH_SIZE)


PROGRAMS: dict[str, Program] = {
    program.__name__: program for program in (resnet_classifier, vit_classifier)
}
