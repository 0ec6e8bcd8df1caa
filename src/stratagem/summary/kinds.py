"""The kinds of summaries: scalars, histograms, images, texts, and tensors with metadata."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from stratagem.messages import explain
from stratagem.summary.callbacks import stage
from stratagem.summary.collector import current_collector, infers_shapes, is_tracing
from stratagem.summary.encoding import (
    histogram_buckets,
    image_value,
    pixels,
    tensor_value,
)
from stratagem.summary.pending import begin_recording, write_values
from stratagem.summary.settings import checked_step, current_settings
from stratagem.summary.summary import Summary, SummaryCall

__all__ = ["histogram", "image", "scalar", "text", "write"]

_DEFAULT_BUCKETS = 30


def scalar(name: str, data: Any, step: Any = None, description: str | None = None) -> Any:
    """Writes a number. Call anywhere, in a replica function and in a layer too.

    In replica context replica 0 writes, with several processes the chief.

    Args:
        name: its tag in TensorBoard.
        data: a real number, or an array or variable without axes.
        step: an integer, traced or not; None for the default one.
        description: of it, in Markdown.

    Returns:
        Whether it was written; in a compiled step a traced boolean, whether it is asked for.

    Raises:
        ValueError: an array with axes, or no step is known while there is a writer.
        TypeError: no number.

    Example:
        >>> sg.summary.scalar("loss", 0.5, step=1)  # there is no default writer
        False

    Source: TF 2.21; tensorboard plugins/scalar/summary_v2.py, scalar.
    """
    array = _real(data, name)
    if array.shape != ():
        raise ValueError(
            explain(
                f"Summary {name!r} received data of shape {tuple(array.shape)}.",
                expected="one number.",
                fix="reduce it, or write a histogram.",
            )
        )

    def encode(number: Any) -> Any:
        return tensor_value(name, np.asarray(number).astype(np.float32), "scalar", description)

    return _record(SummaryCall(name, encode, array, step))


def histogram(
    name: str,
    data: Any,
    step: Any = None,
    buckets: int | None = None,
    description: str | None = None,
) -> Any:
    """Writes how the elements of an array are distributed. Call anywhere, as `scalar`.

    Elements that are not finite are left out. In a compiled step counts are computed on the device,
    in float32, and only where they are recorded.

    Args:
        name: its tag in TensorBoard.
        data: an array or variable of numbers, of any shape.
        step: as of `scalar`.
        buckets: how many of equal width, from the least to the largest element; None for 30.
        description: of it, in Markdown.

    Returns:
        As of `scalar`.

    Raises:
        ValueError: fewer than one bucket, or no step is known while there is a writer.
        TypeError: no numbers.

    Example:
        >>> sg.summary.histogram("weights", [1.0, 2.0, 2.5], step=1)
        False

    Source: TF 2.21; tensorboard plugins/histogram/summary_v2.py, histogram.
    """
    num_buckets = _DEFAULT_BUCKETS if buckets is None else buckets
    if num_buckets < 1:
        raise ValueError(
            explain(
                f"Summary {name!r} received buckets={buckets}.",
                expected="1 or more.",
                fix="leave it out for 30.",
            )
        )

    def reduce(array: Any) -> Any:
        return histogram_buckets(array.astype(jnp.float32), num_buckets, jnp)

    def encode(counted: Any) -> Any:
        return tensor_value(name, counted.astype(np.float64), "histogram", description)

    def encode_on_host(array: Any) -> Any:
        counted = histogram_buckets(np.asarray(array).astype(np.float64), num_buckets, np)
        return tensor_value(name, counted, "histogram", description)

    call = SummaryCall(name, encode, _real(data, name), step, reduce)
    return _record(call, encode_on_host)


def image(
    name: str, data: Any, step: Any = None, max_outputs: int = 3, description: str | None = None
) -> Any:
    """Writes images. Call anywhere, as `scalar`.

    Args:
        name: its tag in TensorBoard.
        data: array of shape (k, height, width, channels): floats from 0 to 1, or uint8 from 0 to
            255; what is beyond is clipped. Wider integers are scaled down by their range. Channels
            are 1 (grey), 2 (grey and alpha), 3 (RGB) or 4 (RGBA).
        step: as of `scalar`.
        max_outputs: how many are written at most, from the first on.
        description: of it, in Markdown.

    Returns:
        As of `scalar`.

    Raises:
        ValueError: another shape, a negative `max_outputs`, or no step is known while there is a
            writer.
        TypeError: no numbers.

    Example:
        >>> sg.summary.image("digit", np.zeros((1, 8, 8, 1)), step=1)
        False

    Source: TF 2.21; tensorboard plugins/image/summary_v2.py, image.
    """
    array = _real(data, name)
    if len(array.shape) != 4 or array.shape[-1] not in (1, 2, 3, 4):
        raise ValueError(
            explain(
                f"Summary {name!r} received images of shape {tuple(array.shape)}.",
                expected="(k, height, width, channels) with 1 to 4 channels.",
                fix="add axes, as in data[None, :, :, None] for one grey image.",
            )
        )
    if max_outputs < 0:
        raise ValueError(
            explain(
                f"Summary {name!r} received max_outputs={max_outputs}.",
                expected="0 or more.",
                fix="leave it out for 3.",
            )
        )

    def reduce(array: Any) -> Any:
        return pixels(array[:max_outputs], jnp)

    def encode(images: Any) -> Any:
        return image_value(name, images, description)

    def encode_on_host(array: Any) -> Any:
        return image_value(name, pixels(np.asarray(array)[:max_outputs], np), description)

    return _record(SummaryCall(name, encode, array, step, reduce), encode_on_host)


def text(name: str, data: Any, step: Any = None, description: str | None = None) -> Any:
    """Writes text. Call anywhere, as `scalar`.

    Args:
        name: its tag in TensorBoard.
        data: a string in Markdown, or nested lists of them, which make a table.
        step: as of `scalar`.
        description: of it, in Markdown.

    Returns:
        As of `scalar`.

    Raises:
        TypeError: no strings.
        ValueError: no step is known while there is a writer.

    Example:
        >>> sg.summary.text("remark", "learning rate halved", step=1)
        False

    Source: TF 2.21; tensorboard plugins/text/summary_v2.py, text.
    """
    strings = np.asarray(data)
    if strings.dtype.kind not in "US":
        raise TypeError(
            explain(
                f"Summary {name!r} received text of type {type(data).__name__}, with elements of "
                f"{strings.dtype}.",
                expected="a string, or nested lists of strings.",
                fix="make it a string with str(...); traced values have none.",
            )
        )
    encoded = np.char.encode(strings, "utf-8") if strings.dtype.kind == "U" else strings
    as_objects = encoded.astype(object)

    def encode(_: None) -> Any:
        return tensor_value(name, as_objects, "text", description)

    return _record(SummaryCall(name, encode, None, step))


def write(tag: str, tensor: Any, step: Any = None, metadata: Any = None) -> Any:
    """Writes an array for any of TensorBoard's plugins. Call anywhere, as `scalar`.

    Args:
        tag: its name in TensorBoard.
        tensor: array of numbers; on the host strings, too.
        step: as of `scalar`.
        metadata: a `SummaryMetadata`, or the bytes of one, that names the plugin.

    Returns:
        As of `scalar`.

    Raises:
        ValueError: no step is known while there is a writer.

    Example:
        >>> sg.summary.write("table", np.eye(2), step=1)
        False

    Source: TF 2.21 summary_ops_v2.py, write.
    """
    array = _array(tensor)
    if isinstance(array, np.ndarray) and array.dtype.kind in "USO":
        strings = np.char.encode(array.astype(str), "utf-8").astype(object)
        call = SummaryCall(tag, lambda _: tensor_value(tag, strings, metadata=metadata), None, step)
        return _record(call)

    def encode(array: Any) -> Any:
        return tensor_value(tag, np.asarray(array), metadata=metadata)

    return _record(SummaryCall(tag, encode, array, step))


def _array(data: Any) -> Any:
    data = getattr(data, "value", data)  # of a variable
    return data if isinstance(data, jax.Array | np.ndarray) else np.asarray(data)


def _real(data: Any, name: str) -> Any:
    array = _array(data)
    dtype = array.dtype
    if not (jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_) or jnp.issubdtype(
        dtype, jnp.complexfloating
    ):
        raise TypeError(
            explain(
                f"Summary {name!r} received data of type {type(data).__name__} and dtype {dtype}.",
                expected="real numbers.",
                fix="convert it; sg.summary.text writes strings.",
            )
        )
    return array


def _record(call: SummaryCall, encode_on_host: Callable[[Any], Any] | None = None) -> Any:
    """Writes a summary here, or has it written by the step that is being traced.

    Args:
        call: what was called.
        encode_on_host: makes a `Summary.Value` of the data itself; None where `encode` does.
    """
    step = checked_step(call.step)
    if infers_shapes():
        return False
    collector = current_collector()
    if collector is not None and collector.is_at_its_own_level:
        return collector.add(call)
    if isinstance(call.data, Tracer) or is_tracing():
        return stage(call)
    settings = current_settings()
    if settings.writer.value is None:
        return False
    number = None if step is None else int(np.asarray(getattr(step, "value", step)))
    summary = Summary(call.tag, encode_on_host or call.encode, step=number)
    recording = begin_recording([summary])
    if recording is None:
        return False
    return write_values(summary, {} if call.data is None else {"data": call.data}, recording)
