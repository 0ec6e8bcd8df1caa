"""`sg.summary.scalar`, `histogram`, `image`, `text` and `write`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from stratagem.errors import check_number, explain, invalid
from stratagem.execution.replica_context import get_replica_context
from stratagem.execution.summary.collector import (
    Summary,
    SummaryCall,
    checked_step,
    current_collector,
    current_settings,
    infers_shapes,
    is_tracing,
    latest_settings,
    note_callbacks,
    resolve,
)
from stratagem.execution.summary.writer import (
    begin_recording,
    histogram_buckets,
    image_value,
    pixels,
    tensor_value,
    write_values,
)
from stratagem.variables.distributed import PerReplica

if TYPE_CHECKING:
    from stratagem.devices.mesh import Topology
    from stratagem.execution.summary.writer import ProtocolBuffer, Recording
    from stratagem.execution.tracing.functionalize import Trace

# Host callbacks for summaries in nested traces, such as the body of a `lax.scan`.
#
# A callback uses the writer, step and condition of its time, so changing them waits for running
# programs. A program with callbacks takes longer to start, whether it records or not.


def stage(call: SummaryCall) -> Any:
    """Adds a callback for a summary to the traced program; returns whether it is recorded."""
    collector = current_collector()
    outer = current_settings() if collector is None else collector.settings
    resolved = resolve(call, outer)
    if resolved is None:
        return False
    summary, values = resolved
    flags = [values["is_recorded"]] if summary.has_condition else []
    if collector is not None and not isinstance(collector.records, bool):
        flags.append(collector.records)
    context = get_replica_context()
    if context is not None and context.num_replicas_in_sync > 1:
        flags.append(jnp.asarray(context.replica_id_in_sync_group == 0))
    if call.data is not None:
        values["data"] = jax.lax.stop_gradient(jnp.asarray(call.data))
    flag = functools.reduce(jnp.logical_and, flags) if flags else True
    return _call_back(summary, values, flag, call.reduce)


def forward_summaries(summaries: Sequence[Summary], values: Sequence[Mapping[str, Any]]) -> None:
    """Passes a function's summaries and their values to the enclosing collector, or writes them."""
    collector = current_collector()
    if collector is not None and collector.is_at_its_own_level:
        collector.extend(summaries, values)
    elif is_tracing() or any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(values)):
        flag = True if collector is None else collector.records
        for summary, one in zip(summaries, values, strict=True):
            _call_back(summary, one, flag)
    elif summaries and (recording := begin_recording(summaries)) is not None:
        recording.keep(summaries, values, None)


def _call_back(
    summary: Summary,
    values: Mapping[str, Any],
    flag: object = True,
    reduce: Callable[[Any], Any] | None = None,
) -> Any:
    """Adds a callback that writes a summary if `flag` is true, and returns `flag`."""
    note_callbacks()
    collector = current_collector()
    if collector is not None:
        collector.note_staged(summary)

    def write(values: dict[str, Any]) -> None:
        if reduce is not None:
            values = {**values, "data": reduce(values["data"])}
        jax.debug.callback(functools.partial(_write_from_host, summary), values)

    if flag is True:
        write({**values})
    else:
        jax.lax.cond(flag, write, lambda _: None, {**values})
    return flag


def _write_from_host(summary: Summary, values: dict[str, Any]) -> None:
    recording = begin_recording([summary], latest_settings())
    if recording is not None:
        write_values(summary, {name: np.asarray(one) for name, one in values.items()}, recording)


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
        raise invalid(
            f"Summary {name!r} received data of shape {tuple(array.shape)}.",
            expected="a scalar.",
            fix="reduce it to a scalar, or write a histogram.",
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
    check_number(f"Summary {name!r}", buckets=num_buckets)

    def reduce(array: jax.Array) -> Any:
        return histogram_buckets(array.astype(jnp.float32), num_buckets, jnp)

    def encode(counted: np.ndarray) -> Any:
        return tensor_value(name, counted.astype(np.float64), "histogram", description)

    def encode_on_host(array: jax.Array | np.ndarray) -> Any:
        counted = histogram_buckets(np.asarray(array).astype(np.float64), num_buckets, np)
        return tensor_value(name, counted, "histogram", description)

    call = SummaryCall(name, encode, _as_real_array(data, name), step, reduce)
    return _record(call, encode_on_host)


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
        raise invalid(
            f"Summary {name!r} received images of shape {tuple(shape)}.",
            expected="(k, height, width, channels) with 1 to 4 channels.",
            fix="add axes, as in data[None, :, :, None] for one gray image.",
        )
    check_number(f"Summary {name!r}", 0, max_outputs=max_outputs)


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


# Summaries of a compiled step: each call decides whether to record them.


class StepSummaries:
    """Decides per call whether a step records its summaries, and writes their values.

    A skipped branch still takes time, so a step with expensive summaries has a second program
    without them.
    """

    def __init__(self, trace: Trace, topology: Topology) -> None:
        assert trace.summaries is not None
        self._trace, self._summaries = trace, trace.summaries
        self._topology = topology
        self._recording: Recording | None = None
        with jax.ensure_compile_time_eval():  # it outlives a jax.jit around the first call
            self._true = topology.replicate(np.True_)

    def decide(self) -> bool:
        """Decides whether the next call records; returns True to run the program without summaries.

        Raises ValueError if a summary is to be written but the step number is unknown.
        """
        if is_tracing():
            return False
        self._recording = begin_recording(self._summaries.every)
        # Processes may decide differently, but must run the same program.
        is_plain = self._summaries.are_expensive and not self._topology.spans_processes
        return self._recording is None and is_plain

    def begin(self, constants: list[Any]) -> list[Any]:
        """Returns the program's constants, with the one that turns recording on set if needed."""
        if self._recording is None and not is_tracing():  # a user's jax.jit always records
            return constants
        place = self._trace.records
        assert place is not None
        return [*constants[:place], self._true, *constants[place + 1 :]]

    def end(self, results: list[Any], num_steps: int | None) -> list[Any]:
        """Writes the recorded summaries and returns the other results.

        `num_steps` is the number of steps in the call; None for a single step.
        """
        trace = self._trace
        first, end = trace.num_results, trace.num_outputs
        others = results[:first] + results[end:]
        outputs: list[Any] = results[first:end]
        if (outputs and isinstance(outputs[0], Tracer)) or is_tracing():
            forward_summaries(self._summaries.summaries, self._of_first(outputs))
        elif self._recording is not None:
            if self._topology.num_replicas > 1:
                outputs = [PerReplica(stacked=output) for output in outputs]
            values = jax.tree.unflatten(self._summaries.structure, outputs)
            self._recording.keep(self._summaries.summaries, values, num_steps)
        return others

    def _of_first(self, outputs: list[Any]) -> list[Any]:
        """Returns the values of replica 0."""
        if self._topology.num_replicas > 1:
            outputs = [output[0] for output in outputs]
        return jax.tree.unflatten(self._summaries.structure, outputs)
