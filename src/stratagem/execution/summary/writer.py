"""`SummaryWriter`, and the functions that create one."""

from __future__ import annotations

import atexit
import contextlib
import os
import time
import weakref
from collections.abc import Generator
from typing import Any, NoReturn

import jax

from stratagem.execution.summary import settings
from stratagem.execution.summary.event_file import EventFile, tensorboard
from stratagem.execution.summary.recording import write_pending
from stratagem.group.current import current_group
from stratagem.messages import explain

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
                `sg.summary.experimental.set_step`.

        Raises:
            RuntimeError: the writer is closed.

        Example:
            >>> with sg.summary.create_noop_writer().as_default(step=100):
            ...     sg.summary.experimental.get_step()
            100

        Source: TF 2.21 summary_ops_v2.py, SummaryWriter.as_default.
        """
        with settings.override(**self._setting_changes(step)):
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
        settings.update(**self._setting_changes(step))

    def _setting_changes(self, step: object) -> dict[str, Any]:
        self._require_open()
        checked = settings.checked_step(step)
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
        if settings.has_callbacks():
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
    """Creates a writer of TensorBoard summaries. Call anywhere; needs `stratagem[tensorboard]`.

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
        raise ValueError(
            explain(
                f"create_file_writer received logdir={logdir!r}.",
                expected="a folder.",
                fix="pass a folder, or use sg.summary.create_noop_writer().",
            )
        )
    flush_millis = _DEFAULT_FLUSH_MILLIS if flush_millis is None else flush_millis
    _check_limit("max_queue", max_queue)
    _check_limit("flush_millis", flush_millis)
    writer = SummaryWriter(os.fspath(logdir), max_queue, flush_millis, filename_suffix)
    if writer.is_active:
        tensorboard("compat.proto.event_pb2")  # fail here if missing, not at the first summary
    return writer


def _check_limit(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(
            explain(
                f"create_file_writer received {name}={value!r}.",
                expected="an integer, 0 or more.",
                fix=f"omit {name} for the default.",
            )
        )


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
