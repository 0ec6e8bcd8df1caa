"""Encoding of summaries for TensorBoard's plugins: histogram buckets, pixels, and protos."""

from __future__ import annotations

import io
import types
from typing import TYPE_CHECKING, Any

import numpy as np

from stratagem.execution.summary.event_file import tensorboard
from stratagem.optional_libraries import load

if TYPE_CHECKING:
    import jax

    from stratagem.execution.summary.event_file import ProtocolBuffer


_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}


def tensor_value(
    tag: str,
    array: object,
    plugin: str | None = None,
    description: str | None = None,
    *,
    metadata: bytes | ProtocolBuffer | None = None,
) -> Any:
    """Returns a `Summary.Value` that holds a host array.

    `plugin` names the TensorBoard plugin that shows it; otherwise pass `metadata`, a
    `SummaryMetadata` or its serialized bytes.
    """
    messages = tensorboard("compat.proto.summary_pb2")
    if plugin is not None:
        plugin_metadata = tensorboard(f"plugins.{plugin}.metadata")
        metadata = plugin_metadata.create_summary_metadata(None, description)
    elif isinstance(metadata, bytes):
        metadata = messages.SummaryMetadata.FromString(metadata)
    elif metadata is not None:  # a proto of another type, such as TensorFlow's
        metadata = messages.SummaryMetadata.FromString(metadata.SerializeToString())
    tensor = tensorboard("util.tensor_util").make_tensor_proto(array)
    return messages.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)


def image_value(tag: str, images: np.ndarray, description: str | None) -> Any:
    """Returns a `Summary.Value` that holds uint8 images of shape (k, height, width, channels)."""
    pillow = load("PIL.Image", needed_by="sg.summary.image", install="stratagem[tensorboard]")
    _, height, width, num_channels = images.shape
    strings = [str(width).encode(), str(height).encode()]
    for picture in images:
        flat = picture[:, :, 0] if num_channels == 1 else picture
        file = io.BytesIO()
        mode = _MODES[num_channels]
        pillow.frombytes(mode, (width, height), np.ascontiguousarray(flat).tobytes()).save(
            file, "PNG"
        )
        strings.append(file.getvalue())
    return tensor_value(tag, np.asarray(strings, dtype=object), "image", description)


def pixels(images: jax.Array | np.ndarray, xp: types.ModuleType) -> Any:
    """Converts images to uint8, like tf.image.convert_image_dtype with saturation."""
    dtype = images.dtype
    if dtype == np.uint8:
        return images
    if dtype == np.bool_:
        return images.astype(np.uint8) * xp.asarray(255, np.uint8)
    if xp.issubdtype(dtype, xp.integer):
        scale = max((int(np.iinfo(dtype).max) + 1) // 256, 1)
        scaled = images // xp.asarray(scale, dtype)
        return xp.maximum(scaled, xp.asarray(0, dtype)).astype(np.uint8)
    scaled = images.astype(np.float32) * xp.asarray(255.5, np.float32)
    scaled = xp.nan_to_num(scaled, posinf=255.0, neginf=0.0)
    return xp.clip(scaled, 0.0, 255.0).astype(np.uint8)


def histogram_buckets(data: jax.Array | np.ndarray, num_buckets: int, xp: types.ModuleType) -> Any:
    """Counts the finite elements of a float array in buckets of equal width.

    Returns (num_buckets, 3): left edge, right edge, count. Identical elements are counted in the
    last bucket, which then has zero width; without finite elements everything is zero.
    """
    data = data.reshape(-1)
    dtype = data.dtype
    if data.size == 0:
        return xp.zeros((num_buckets, 3), dtype)
    is_finite = xp.isfinite(data)
    least = xp.min(data, where=is_finite, initial=np.inf)
    largest = xp.max(data, where=is_finite, initial=-np.inf)
    has_any = xp.any(is_finite)
    least, largest = xp.where(has_any, least, 0.0), xp.where(has_any, largest, 0.0)
    edges = xp.linspace(least, largest, num_buckets + 1).astype(dtype)
    width = (largest - least) / num_buckets
    is_flat = width == 0
    safe = xp.where(is_finite, data - least, 0.0) / xp.where(is_flat, 1.0, width)
    bucket = xp.clip(xp.floor(safe).astype(np.int32), 0, num_buckets - 1)
    bucket = xp.where(is_flat, num_buckets - 1, bucket)
    bucket = xp.where(is_finite, bucket, num_buckets)  # past the last bucket
    length = {"minlength" if xp is np else "length": num_buckets + 1}
    counts = xp.bincount(bucket, **length)[:num_buckets]
    return xp.stack([edges[:-1], edges[1:], counts.astype(dtype)], axis=1)
