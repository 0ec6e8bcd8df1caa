"""SummaryWriter: where summaries go."""

from __future__ import annotations

import atexit
import contextlib
import os
import time
import weakref
from collections.abc import Generator
from typing import Any, NoReturn

import jax

from stratagem.group import current_group
from stratagem.messages import explain
from stratagem.summary import settings
from stratagem.summary.event_file import EventFile, tensorboard
from stratagem.summary.pending import write_pending

__all__ = ["SummaryWriter", "create_file_writer", "create_noop_writer"]

_DEFAULT_FLUSH_MILLIS = 120_000

_open: weakref.WeakSet[SummaryWriter] = weakref.WeakSet()


class SummaryWriter:
    """Writes summaries to a folder, on the chief only. Made by `sg.summary.create_file_writer`.

    Args:
        logdir: the folder; None writes nothing.
        max_queue: how many summaries may wait in memory.
        flush_millis: for how many milliseconds they may.
        filename_suffix: end of the file's name.

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
        """Whether the chief writes; else nobody does."""
        return self._logdir is not None

    @property
    def is_active(self) -> bool:
        """Whether this process writes."""
        group = current_group()
        return self.has_folder and (group is None or group.process_id == 0)

    @contextlib.contextmanager
    def as_default(self, step: Any = None) -> Generator[SummaryWriter]:
        """Makes this the default writer for the length of a `with` block. Call anywhere.

        Args:
            step: the default step within the block; None leaves it as it is. See
                `sg.summary.experimental.set_step`.

        Raises:
            RuntimeError: the writer is closed.

        Example::

            with writer.as_default(step=optimizer.iterations):
                strategy.run(train_step, args=(batch,))

        Source: TF 2.21 summary_ops_v2.py, SummaryWriter.as_default.
        """
        with settings.setting(**self._changes(step)):
            yield self
            write_pending(waits=False)  # steps under way are not waited for
            self._flush_file()

    def set_as_default(self, step: Any = None) -> None:
        """Makes this the default writer of this thread until another one is. Call anywhere.

        Args:
            step: as of `as_default`.

        Raises:
            RuntimeError: the writer is closed.

        Source: TF 2.21 summary_ops_v2.py, SummaryWriter.set_as_default.
        """
        settings.change(**self._changes(step))

    def _changes(self, step: Any) -> dict[str, Any]:
        self._require_open()
        checked = settings.checked_step(step)
        return {"writer": self} if step is None else {"writer": self, "step": checked}

    def init(self) -> None:
        """Makes the file now, and not with the first summary.

        Raises:
            RuntimeError: the writer is closed.
        """
        self._require_open()
        if self._file is None and self._logdir is not None and self.is_active:
            self._file = EventFile(self._logdir, *self._options)

    def add(self, value: Any, step: int, wall_time_s: float | None = None) -> None:
        """Writes a summary; for code of this library.

        Args:
            value: a `Summary.Value`.
            step: which it belongs to.
            wall_time_s: when, in seconds since 1970; None for now.
        """
        self.init()
        if self._file is not None:
            self._file.add(value, step, time.time() if wall_time_s is None else wall_time_s)

    def flush_pending(self) -> None:
        """Waits for all summaries of steps that were called, and writes them to their files."""
        if settings.has_callbacks():
            jax.effects_barrier()
        write_pending(waits=True)

    def flush(self) -> None:
        """Waits for the summaries of all steps that were called, and gives them to the system.

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
                    expected="a writer that is open.",
                    fix="close it after the last summary, or make another one.",
                )
            )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            explain(
                f"The SummaryWriter of {self._logdir!r} was to be sent to another process.",
                expected="a writer to stay in the process that made it.",
                fix="return values from what runs there and write them here, or make a writer of "
                "its own there.",
            )
        )

    def __repr__(self) -> str:
        return f"SummaryWriter({self._logdir!r})"


def create_file_writer(
    logdir: Any, max_queue: int = 10, flush_millis: int | None = None, filename_suffix: str = ""
) -> SummaryWriter:
    """Makes a writer of summaries for TensorBoard. Call anywhere; needs `stratagem[tensorboard]`.

    With several processes all make it, and only the chief writes.

    Args:
        logdir: the folder; its file is made with the first summary.
        max_queue: how many summaries may wait in memory before they are written to the file.
        flush_millis: after how many milliseconds a summary takes all before it to the file; None
            for two minutes.
        filename_suffix: end of the file's name.

    Returns:
        The writer.

    Raises:
        ValueError: a negative number, or no folder.
        ImportError: the package `tensorboard` is not installed.

    Example::

        writer = sg.summary.create_file_writer("logs")
        with writer.as_default():
            sg.summary.scalar("loss", 0.5, step=1)

    Source: TF 2.21 summary_ops_v2.py, create_file_writer_v2.
    """
    if not logdir:
        raise ValueError(
            explain(
                f"create_file_writer received logdir={logdir!r}.",
                expected="a folder.",
                fix="name one, or use sg.summary.create_noop_writer().",
            )
        )
    flush_millis = _DEFAULT_FLUSH_MILLIS if flush_millis is None else flush_millis
    for name, value in (("max_queue", max_queue), ("flush_millis", flush_millis)):
        if not isinstance(value, int) or value < 0:
            raise ValueError(
                explain(
                    f"create_file_writer received {name}={value!r}.",
                    expected="an integer of 0 or more.",
                    fix="leave it out for the default.",
                )
            )
    writer = SummaryWriter(os.fspath(logdir), max_queue, flush_millis, filename_suffix)
    if writer.is_active:
        tensorboard("compat.proto.event_pb2")  # told here, and not at the first summary
    return writer


def create_noop_writer() -> SummaryWriter:
    """Makes a writer that writes nothing, for code that wants one. Call anywhere.

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
