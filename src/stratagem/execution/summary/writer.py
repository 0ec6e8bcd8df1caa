"""`SummaryWriter`, and the functions that create one."""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import io
import itertools
import os
import platform
import threading
import time
import types
import weakref
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import jax
import numpy as np

from stratagem.environment import load
from stratagem.errors import check_number, explain, invalid
from stratagem.execution.summary import collector
from stratagem.execution.summary.collector import (
    Settings,
    Summary,
    current_settings,
    host_condition,
    host_step,
)
from stratagem.group.current import current_group
from stratagem.variables.distributed import PerReplica

# TensorBoard event files, encoded by the package `tensorboard`.

_numbers = itertools.count()


class ProtocolBuffer(Protocol):
    """A protocol buffer, of TensorBoard's or another library's classes."""

    def SerializeToString(self) -> bytes: ...  # noqa: D102, N802 - theirs


def tensorboard(module: str) -> Any:
    """Returns a module of the package `tensorboard`; raises ImportError if it is not installed."""
    return load(f"tensorboard.{module}", needed_by="sg.summary", install="stratagem[observe]")


class EventFile:
    """A new event file in a folder, which is created if missing."""

    # TensorBoard's own EventFileWriter would load TensorFlow where that is installed.
    def __init__(self, logdir: str, max_queue: int, flush_millis: int, suffix: str) -> None:
        files = tensorboard("compat.tensorflow_stub.io.gfile")
        records = tensorboard("summary.writer.record_writer")
        self._event = tensorboard("compat.proto.event_pb2").Event
        self._max_queue, self._flush_s = max_queue, flush_millis / 1000
        self._lock = threading.Lock()
        self._num_waiting, self._flushed_at = 0, time.monotonic()
        files.makedirs(logdir)
        # TensorBoard reads files in the order of their names. Without zeros, 10 comes before 9.
        name = (
            f"events.out.tfevents.{int(time.time()):010d}.{platform.node()}."
            f"{os.getpid()}.{next(_numbers):06d}{suffix}"
        )
        path = os.path.join(logdir, name)
        # GFile writes each event separately, as object stores require.
        is_remote = "://" in logdir
        self._records = records.RecordWriter(
            files.GFile(path, "wb") if is_remote else open(path, "wb")  # noqa: SIM115
        )
        self._write(self._event(wall_time=time.time(), file_version="brain.Event:2"))
        self.flush()

    def add(self, value: object, step: int, wall_time_s: float) -> None:
        """Writes one `Summary.Value`; `wall_time_s` is in seconds since the epoch."""
        event = self._event(wall_time=wall_time_s, step=step)
        event.summary.value.append(value)
        with self._lock:
            self._write(event)
            is_late = time.monotonic() - self._flushed_at >= self._flush_s
        if is_late or self._num_waiting > self._max_queue:
            self.flush()

    def _write(self, event: ProtocolBuffer) -> None:
        self._records.write(event.SerializeToString())
        self._num_waiting += 1

    def flush(self) -> None:
        """Flushes buffered events to the operating system."""
        with self._lock:
            self._records.flush()
            self._num_waiting, self._flushed_at = 0, time.monotonic()

    def close(self) -> None:
        """Flushes and closes the file."""
        with self._lock:
            self._records.close()


# Deferred writing of summaries: a step's summaries are written when their values are ready.
#
# Nothing waits for a step, unless too many are in flight or a writer is flushed.

# Maximum number of steps in flight with unwritten summaries.
_MAX_PENDING = 32

Values = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Recording:
    """Host settings at the time of a step's call.

    `step` is None if no summary needs it. Summaries with a condition ignore `holds`. `wall_time_s`
    is in seconds since the epoch.
    """

    writer: SummaryWriter | None
    step: int | None
    holds: bool
    wall_time_s: float

    def keep(
        self, summaries: Sequence[Summary], values: Sequence[Values], num_steps: int | None
    ) -> None:
        """Enqueues the summaries of one call.

        Values are arrays, or `PerReplica` of which replica 0 counts. Their first axis has size
        `num_steps`, or there is no such axis if it is None.
        """
        if any(one.writer_of(self.writer) is not None for one in summaries):
            with _lock:
                _pending.append((self, summaries, values, num_steps))
        write_pending(waits=False)


_lock = threading.RLock()
_pending: collections.deque[tuple[Recording, Sequence[Summary], Sequence[Values], int | None]] = (
    collections.deque()
)


def begin_recording(
    summaries: Sequence[Summary], settings: Settings | None = None
) -> Recording | None:
    """Returns the settings of a step about to be called; None if it records no summary.

    `settings` default to this thread's. Raises ValueError if a summary that would be written has no
    step.
    """
    settings = settings or current_settings()
    writer = settings.writer.value
    written = [one for one in summaries if one.writer_of(writer, is_anywhere=True) is not None]
    holds = any(not one.has_condition for one in written) and host_condition(settings)
    written = [one for one in written if one.has_condition or holds]
    if not written:
        return None
    step = None
    if stepless := [one for one in written if one.needs_step]:
        step = host_step(settings)
        if step is None:
            raise missing_step_error(stepless[0].tag)
    return Recording(writer, step, holds, time.time())


def missing_step_error(tag: str) -> ValueError:
    """Returns the error for a summary without a step."""
    return invalid(
        f"Summary {tag!r} has no step.",
        expected="a step in the call, or a default one.",
        fix="pass step=..., or call sg.summary.set_step(...) or "
        "writer.as_default(step=...), with a variable such as optimizer.iterations in loops.",
    )


def write_pending(*, waits: bool) -> None:
    """Writes summaries whose values are ready, in call order; with `waits`, all of them."""
    with _lock:
        while _pending and (waits or len(_pending) > _MAX_PENDING or _is_ready(_pending[0][2])):
            recording, summaries, values, num_steps = _pending.popleft()
            local = [
                {name: _replica_0_value(array) for name, array in one.items()} for one in values
            ]
            for index in range(num_steps or 1):
                for summary, arrays in zip(summaries, local, strict=True):
                    if num_steps is not None:
                        arrays = {name: array[index] for name, array in arrays.items()}
                    write_values(summary, arrays, recording)


def _is_ready(values: Sequence[Values]) -> bool:
    arrays = [array for one in values for array in one.values()]
    stacked = [one.stacked if isinstance(one, PerReplica) else one for one in arrays]
    return all(one.is_ready() for one in stacked if hasattr(one, "is_ready"))


def _replica_0_value(array: Any) -> np.ndarray[Any, Any]:
    array = array.components[0] if isinstance(array, PerReplica) else array
    if hasattr(array, "addressable_data"):
        array = array.addressable_data(0)
    return np.asarray(array)


def write_values(summary: Summary, arrays: Values, recording: Recording) -> bool:
    """Writes one summary with its host values if it is recorded, and returns whether it was."""
    writer = summary.writer_of(recording.writer)
    is_recorded = arrays["is_recorded"] if summary.has_condition else recording.holds
    if writer is None or not is_recorded:
        return False
    step = arrays.get("step", recording.step if summary.step is None else summary.step)
    if step is None:
        raise missing_step_error(summary.tag)
    writer.add(summary.encode(arrays.get("data")), int(step), recording.wall_time_s)
    return True


_DEFAULT_FLUSH_MILLIS = 120_000

_open: weakref.WeakSet[SummaryWriter] = weakref.WeakSet()


class SummaryWriter:
    """Writes summaries to a folder, on the chief only. Created by `sg.summary.create_file_writer`.

    Args:
        logdir: the folder; None writes nothing.
        max_queue: maximum number of summaries buffered in memory.
        flush_millis: maximum time that they are buffered, in milliseconds.
        filename_suffix: suffix of the file name.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     writer = sg.summary.create_file_writer(folder)
        ...     with writer.as_default(step=1):
        ...         recorded = sg.summary.scalar("loss", 0.5)
        ...     writer.close()
        ...     [file.name.startswith("events") for file in pathlib.Path(folder).iterdir()]
        [True]

    Source: TF 2.21 summary_ops_v2.py, SummaryWriter.
    """

    def __init__(
        self,
        logdir: str | None,
        max_queue: int = 10,
        flush_millis: int = _DEFAULT_FLUSH_MILLIS,
        filename_suffix: str = "",
    ) -> None:
        self._logdir = logdir
        self._options = (max_queue, flush_millis, filename_suffix)
        self._file: EventFile | None = None
        self._is_closed = False
        _open.add(self)

    @property
    def has_folder(self) -> bool:
        """True if the chief writes; False if no process does."""
        return self._logdir is not None

    @property
    def is_active(self) -> bool:
        """True if this process writes."""
        group = current_group()
        return self.has_folder and (group is None or group.process_id == 0)

    @contextlib.contextmanager
    def as_default(self, step: object = None) -> Generator[SummaryWriter]:
        """Makes this the default writer within a `with` block. Call anywhere.

        Args:
            step: default step within the block; None leaves it unchanged. See
                `sg.summary.set_step`.

        Raises:
            RuntimeError: the writer is closed.

        Example:
            >>> with sg.summary.create_noop_writer().as_default(step=100):
            ...     sg.summary.get_step()
            100

        Source: TF 2.21 summary_ops_v2.py, SummaryWriter.as_default.
        """
        with collector.override(**self._setting_changes(step)):
            yield self
            write_pending(waits=False)  # without waiting for steps in flight
            self._flush_file()

    def set_as_default(self, step: object = None) -> None:
        """Makes this the default writer of this thread until another one is set. Call anywhere.

        Args:
            step: as for `as_default`.

        Raises:
            RuntimeError: the writer is closed.

        Source: TF 2.21 summary_ops_v2.py, SummaryWriter.set_as_default.
        """
        collector.update(**self._setting_changes(step))

    def _setting_changes(self, step: object) -> dict[str, Any]:
        self._require_open()
        checked = collector.checked_step(step)
        return {"writer": self} if step is None else {"writer": self, "step": checked}

    def init(self) -> None:
        """Creates the file now instead of with the first summary.

        Raises:
            RuntimeError: the writer is closed.
        """
        self._require_open()
        if self._file is None and self._logdir is not None and self.is_active:
            self._file = EventFile(self._logdir, *self._options)

    def add(self, value: object, step: int, wall_time_s: float | None = None) -> None:
        """Writes a summary; for use by this library.

        Args:
            value: a `Summary.Value`.
            step: its step.
            wall_time_s: seconds since the epoch; None for now.
        """
        self.init()
        if self._file is not None:
            self._file.add(value, step, time.time() if wall_time_s is None else wall_time_s)

    def flush_pending(self) -> None:
        """Waits for the summaries of all steps called so far, and writes them to their files."""
        if collector.has_callbacks():
            jax.effects_barrier()
        write_pending(waits=True)

    def flush(self) -> None:
        """Waits for the summaries of all steps called so far, and flushes them to the file system.

        Source: TF 2.21 summary_ops_v2.py, SummaryWriter.flush.
        """
        self.flush_pending()
        self._flush_file()

    def _flush_file(self) -> None:
        if self._file is not None and not self._is_closed:
            self._file.flush()

    def close(self) -> None:
        """Flushes and closes the file; a second call does nothing.

        Source: TF 2.21 summary_ops_v2.py, SummaryWriter.close.
        """
        if self._is_closed:
            return
        self.flush_pending()
        self._is_closed = True
        _open.discard(self)
        if self._file is not None:
            self._file.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise RuntimeError(
                explain(
                    f"The SummaryWriter of {self._logdir!r} was used after it was closed.",
                    expected="an open writer.",
                    fix="close it after the last summary, or create another one.",
                )
            )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            explain(
                f"The SummaryWriter of {self._logdir!r} cannot be sent to another process.",
                expected="a writer used only in the process that created it.",
                fix="return the values and write them here, or create a writer in the other "
                "process.",
            )
        )

    def __repr__(self) -> str:
        return f"SummaryWriter({self._logdir!r})"


def create_file_writer(
    logdir: str | os.PathLike[str],
    max_queue: int = 10,
    flush_millis: int | None = None,
    filename_suffix: str = "",
) -> SummaryWriter:
    """Creates a writer of TensorBoard summaries. Call anywhere; needs `stratagem[observe]`.

    With several processes, call it in all of them; only the chief writes.

    Args:
        logdir: the folder; its file is created with the first summary.
        max_queue: maximum number of summaries buffered in memory.
        flush_millis: maximum time that a summary is buffered, in milliseconds; None for two
            minutes.
        filename_suffix: suffix of the file name.

    Returns:
        The writer.

    Raises:
        ValueError: an empty `logdir`, or a negative number.
        ImportError: the package `tensorboard` is not installed.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     writer = sg.summary.create_file_writer(folder)
        ...     with writer.as_default():
        ...         sg.summary.scalar("loss", 0.5, step=1)
        ...     writer.close()
        True

    Source: TF 2.21 summary_ops_v2.py, create_file_writer_v2.
    """
    if not logdir:
        raise invalid(
            f"create_file_writer received logdir={logdir!r}.",
            expected="a folder.",
            fix="pass a folder, or use sg.summary.create_noop_writer().",
        )
    flush_millis = _DEFAULT_FLUSH_MILLIS if flush_millis is None else flush_millis
    check_number("create_file_writer", 0, max_queue=max_queue, flush_millis=flush_millis)
    writer = SummaryWriter(os.fspath(logdir), max_queue, flush_millis, filename_suffix)
    if writer.is_active:
        tensorboard("compat.proto.event_pb2")  # fail here if missing, not at the first summary
    return writer


def create_noop_writer() -> SummaryWriter:
    """Creates a writer that discards summaries. Call anywhere.

    Returns:
        The writer.

    Example:
        >>> with sg.summary.create_noop_writer().as_default():
        ...     sg.summary.scalar("loss", 0.5, step=1)
        False

    Source: TF 2.21 summary_ops_v2.py, create_noop_writer.
    """
    return SummaryWriter(None)


def _close_all() -> None:
    for writer in list(_open):
        writer.close()


atexit.register(_close_all)


# Encoding of summaries for TensorBoard's plugins: histogram buckets, pixels, and protos.

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
    pillow = load("PIL.Image", needed_by="sg.summary.image", install="stratagem[observe]")
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
