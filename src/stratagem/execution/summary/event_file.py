"""TensorBoard event files, encoded by the package `tensorboard`."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from typing import Any, Protocol

from stratagem.optional_libraries import load

_numbers = itertools.count()


class ProtocolBuffer(Protocol):
    """A protocol buffer, of TensorBoard's or another library's classes."""

    def SerializeToString(self) -> bytes: ...  # noqa: D102, N802 - theirs


def tensorboard(module: str) -> Any:
    """Returns a module of the package `tensorboard`; raises ImportError if it is not installed."""
    return load(f"tensorboard.{module}", needed_by="sg.summary", install="stratagem[tensorboard]")


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
        name = (
            f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}."
            f"{os.getpid()}.{next(_numbers)}{suffix}"
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
