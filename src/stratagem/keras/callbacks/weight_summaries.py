"""TensorBoard summaries of a model: weights, embeddings, and the graph of layers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np

from stratagem.execution import summary
from stratagem.messages import explain
from stratagem.optional_libraries import load


def write_weights(model: keras.Model, epoch: int, *, with_images: bool) -> None:
    """Writes a histogram of each weight, and optionally an image, to the default writer.

    Call it on every process: they gather sharded weights together.
    """
    for layer in model.layers:
        for weight in layer.weights:
            value: Any = keras.ops.convert_to_numpy(weight)
            tag = weight.path.replace(":", "_")
            summary.histogram(f"{tag}/histogram", value, step=epoch)
            images = _as_images(value) if with_images else None
            if images is not None:
                summary.image(f"{tag}/image", images, step=epoch)


def _as_images(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """Returns a weight as images, as Keras shows it; None if it cannot be shown."""
    value = np.squeeze(value).astype(np.float32)
    if value.ndim == 1:
        return value[None, :, None, None]
    if value.ndim == 2:
        return (value.T if value.shape[0] > value.shape[1] else value)[None, :, :, None]
    if value.ndim == 3:  # every convolution kernel is an image
        if keras.config.image_data_format() == "channels_last":
            value = np.transpose(value, (2, 0, 1))
        return value[..., None]
    return value if value.ndim == 4 and value.shape[-1] in (1, 3, 4) else None


def write_conceptual_graph(model: keras.Model) -> None:
    """Writes the layers of a functional or sequential model to the default writer."""
    if not isinstance(model, keras.Sequential) and type(model).__name__ != "Functional":
        return
    messages = load(
        "tensorboard.compat.proto.summary_pb2",
        needed_by="sg.TensorBoard",
        install="stratagem[tensorboard]",
    )
    metadata = messages.SummaryMetadata()
    metadata.plugin_data.plugin_name = "graph_keras_model"
    metadata.plugin_data.content = b"1"
    summary.write("keras", model.to_json(), step=0, metadata=metadata)


def write_projector_configuration(
    model: keras.Model,
    writer: summary.SummaryWriter,
    log_dir: str,
    labels: str | Mapping[str, str] | None,
) -> None:
    """Writes the projector configuration, with the future paths of a model's embeddings.

    `labels` is the file with the labels of rows, or a mapping of layer names to files; a layer that
    is not an embedding raises a ValueError.
    """
    names = [layer.name for layer in _embeddings(model)]
    if isinstance(labels, Mapping) and (unknown := sorted(set(labels) - set(names))):
        raise ValueError(
            explain(
                f"embeddings_metadata names layers that are not embeddings: {unknown}.",
                expected=f"names of keras.layers.Embedding layers: {names}.",
                fix="look up the name with layer.name.",
            )
        )
    lines: list[str] = []
    for name in names:
        label = labels.get(name) if isinstance(labels, Mapping) else labels
        lines += ["embeddings {", f'  tensor_name: "{name}"', f'  tensor_path: "{name}.tsv"']
        lines += [f'  metadata_path: "{label}"'] if label else []
        lines.append("}")
    if writer.is_active:
        os.makedirs(log_dir, exist_ok=True)
        path = os.path.join(log_dir, "projector_config.pbtxt")
        with open(path, "w", encoding="utf-8") as file:
            file.write("\n".join([*lines, ""]))


def write_embeddings(model: keras.Model, writer: summary.SummaryWriter, log_dir: str) -> None:
    """Writes the embedding tables of a model for TensorBoard's projector.

    Call it on every process; `writer` writes on the chief only.
    """
    for layer in _embeddings(model):
        table = np.asarray(keras.ops.convert_to_numpy(layer.embeddings), np.float32)
        if writer.is_active:
            np.savetxt(os.path.join(log_dir, f"{layer.name}.tsv"), table, "%.6g", delimiter="\t")


def _embeddings(model: keras.Model) -> Iterator[Any]:
    return (layer for layer in model.layers if isinstance(layer, keras.layers.Embedding))
