"""`sg.summary.scalar`, `histogram`, `image`, `text` and `write`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from stratagem.execution.summary.collector import current_collector, infers_shapes, is_tracing
from stratagem.execution.summary.encoding import (
    histogram_buckets,
    image_value,
    pixels,
    tensor_value,
)
from stratagem.execution.summary.host_callbacks import stage
from stratagem.execution.summary.recording import begin_recording, write_values
from stratagem.execution.summary.settings import checked_step, current_settings
from stratagem.execution.summary.summary import Summary, SummaryCall
from stratagem.messages import explain

if TYPE_CHECKING:
    from stratagem.execution.summary.event_file import ProtocolBuffer


_DEFAULT_BUCKETS = 30


def scalar(name: str, data: object, step: object = None, description: str | None = None) -> Any:
    """Writes a scalar summary. Call anywhere, including replica functions and layers.

    In replica context replica 0 writes; with several processes the chief writes.

    Args:
        name: its tag in TensorBoard.
        data: a real number, or a scalar array or variable.
        step: an integer, traced or not; None for the default step.
        description: description in Markdown.

    Returns:
        Whether it was written; a traced boolean in a compiled step with a traced condition.

    Raises:
        ValueError: `data` is not a scalar, or there is a writer but no step.
        TypeError: `data` is not a real number.

    Example:
        >>> sg.summary.scalar("loss", 0.5, step=1)  # there is no default writer
        False

    Source: TF 2.21; tensorboard plugins/scalar/summary_v2.py, scalar.
    """
    array = _as_real_array(data, name)
    if array.shape != ():
        raise ValueError(
            explain(
                f"Summary {name!r} received data of shape {tuple(array.shape)}.",
                expected="a scalar.",
                fix="reduce it to a scalar, or write a histogram.",
            )
        )

    def encode(number: object) -> Any:
        return tensor_value(name, np.asarray(number).astype(np.float32), "scalar", description)

    return _record(SummaryCall(name, encode, array, step))


def histogram(
    name: str,
    data: object,
    step: object = None,
    buckets: int | None = None,
    description: str | None = None,
) -> Any:
    """Writes a histogram of the elements of an array. Call anywhere, as `scalar`.

    Elements that are not finite are ignored. In a compiled step counts are computed on the device,
    in float32, and only if they are recorded.

    Args:
        name: its tag in TensorBoard.
        data: real array or variable of any shape.
        step: as for `scalar`.
        buckets: number of buckets of equal width from the smallest to the largest element; None for
            30.
        description: description in Markdown.

    Returns:
        As for `scalar`.

    Raises:
        ValueError: fewer than one bucket, or there is a writer but no step.
        TypeError: `data` is not real.

    Example:
        >>> sg.summary.histogram("weights", [1.0, 2.0, 2.5], step=1)
        False

    Source: TF 2.21; tensorboard plugins/histogram/summary_v2.py, histogram.
    """
    num_buckets = _DEFAULT_BUCKETS if buckets is None else buckets
    _check_buckets(name, num_buckets)

    def reduce(array: jax.Array) -> Any:
        return histogram_buckets(array.astype(jnp.float32), num_buckets, jnp)

    def encode(counted: np.ndarray) -> Any:
        return tensor_value(name, counted.astype(np.float64), "histogram", description)

    def encode_on_host(array: jax.Array | np.ndarray) -> Any:
        counted = histogram_buckets(np.asarray(array).astype(np.float64), num_buckets, np)
        return tensor_value(name, counted, "histogram", description)

    call = SummaryCall(name, encode, _as_real_array(data, name), step, reduce)
    return _record(call, encode_on_host)


def _check_buckets(name: str, num_buckets: int) -> None:
    if num_buckets < 1:
        raise ValueError(
            explain(
                f"Summary {name!r} received buckets={num_buckets}.",
                expected="1 or more buckets.",
                fix="omit buckets for the default of 30.",
            )
        )


def image(
    name: str,
    data: object,
    step: object = None,
    max_outputs: int = 3,
    description: str | None = None,
) -> Any:
    """Writes images. Call anywhere, as `scalar`.

    Args:
        name: its tag in TensorBoard.
        data: array of shape (k, height, width, channels): floats from 0 to 1, or uint8 from 0 to
            255; values outside are clipped. Wider integers are scaled down by their range. Channels
            are 1 (gray), 2 (gray and alpha), 3 (RGB) or 4 (RGBA).
        step: as for `scalar`.
        max_outputs: maximum number of images written, from the first.
        description: description in Markdown.

    Returns:
        As for `scalar`.

    Raises:
        ValueError: another shape, a negative `max_outputs`, or there is a writer but no step.
        TypeError: `data` is not real.

    Example:
        >>> sg.summary.image("digit", np.zeros((1, 8, 8, 1)), step=1)
        False

    Source: TF 2.21; tensorboard plugins/image/summary_v2.py, image.
    """
    array = _as_real_array(data, name)
    _check_images(name, array.shape, max_outputs)

    def reduce(array: Any) -> Any:
        return pixels(array[:max_outputs], jnp)

    def encode(images: Any) -> Any:
        return image_value(name, images, description)

    def encode_on_host(array: Any) -> Any:
        return image_value(name, pixels(np.asarray(array)[:max_outputs], np), description)

    return _record(SummaryCall(name, encode, array, step, reduce), encode_on_host)


def _check_images(name: str, shape: tuple[int, ...], max_outputs: int) -> None:
    if len(shape) != 4 or shape[-1] not in (1, 2, 3, 4):
        raise ValueError(
            explain(
                f"Summary {name!r} received images of shape {tuple(shape)}.",
                expected="(k, height, width, channels) with 1 to 4 channels.",
                fix="add axes, as in data[None, :, :, None] for one gray image.",
            )
        )
    if max_outputs < 0:
        raise ValueError(
            explain(
                f"Summary {name!r} received max_outputs={max_outputs}.",
                expected="0 or more images.",
                fix="omit max_outputs for the default of 3.",
            )
        )


def text(name: str, data: object, step: object = None, description: str | None = None) -> Any:
    """Writes text. Call anywhere, as `scalar`.

    Args:
        name: its tag in TensorBoard.
        data: a string in Markdown, or nested lists of strings, shown as a table.
        step: as for `scalar`.
        description: description in Markdown.

    Returns:
        As for `scalar`.

    Raises:
        TypeError: `data` contains something else than strings.
        ValueError: there is a writer but no step.

    Example:
        >>> sg.summary.text("remark", "learning rate halved", step=1)
        False

    Source: TF 2.21; tensorboard plugins/text/summary_v2.py, text.
    """
    strings = np.asarray(data)
    if strings.dtype.kind not in "US":
        raise TypeError(
            explain(
                f"Summary {name!r} received text of type {type(data).__name__} with dtype "
                f"{strings.dtype}.",
                expected="a string, or nested lists of strings.",
                fix="convert it with str(...), outside of traced code.",
            )
        )
    encoded = np.char.encode(strings, "utf-8") if strings.dtype.kind == "U" else strings
    as_objects = encoded.astype(object)

    def encode(_: None) -> Any:
        return tensor_value(name, as_objects, "text", description)

    return _record(SummaryCall(name, encode, None, step))


def write(
    tag: str, tensor: object, step: object = None, metadata: bytes | ProtocolBuffer | None = None
) -> Any:
    """Writes an array for any TensorBoard plugin. Call anywhere, as `scalar`.

    Args:
        tag: its tag in TensorBoard.
        tensor: numeric array; on the host also strings.
        step: as for `scalar`.
        metadata: a `SummaryMetadata`, or its serialized bytes, that names the plugin.

    Returns:
        As for `scalar`.

    Raises:
        ValueError: there is a writer but no step.

    Example:
        >>> sg.summary.write("table", np.eye(2), step=1)
        False

    Source: TF 2.21 summary_ops_v2.py, write.
    """
    array = _as_array(tensor)
    if isinstance(array, np.ndarray) and array.dtype.kind in "USO":
        strings = np.char.encode(array.astype(str), "utf-8").astype(object)
        call = SummaryCall(tag, lambda _: tensor_value(tag, strings, metadata=metadata), None, step)
        return _record(call)

    def encode(array: jax.Array | np.ndarray) -> Any:
        return tensor_value(tag, np.asarray(array), metadata=metadata)

    return _record(SummaryCall(tag, encode, array, step))


def _as_array(data: object) -> Any:
    data = getattr(data, "value", data)  # of a variable
    return data if isinstance(data, jax.Array | np.ndarray) else np.asarray(data)


def _as_real_array(data: object, name: str) -> Any:
    array = _as_array(data)
    dtype = array.dtype
    if not (jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_) or jnp.issubdtype(
        dtype, jnp.complexfloating
    ):
        raise TypeError(
            explain(
                f"Summary {name!r} received data of type {type(data).__name__} and dtype {dtype}.",
                expected="real numbers.",
                fix="convert the data, or use sg.summary.text for strings.",
            )
        )
    return array


def _record(call: SummaryCall, encode_on_host: Callable[[Any], Any] | None = None) -> Any:
    """Writes a summary now, or adds it to the step that is being traced.

    `encode_on_host` makes a `Summary.Value` from the unreduced data; None uses `call.encode`.
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
