"""`EventWriter`: writes one process's events to the run folder."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
import warnings
from pathlib import Path
from types import TracebackType

from stratagem import environment
from stratagem.messages import explain
from stratagem.run_events.records import (
    EndEvent,
    Event,
    FailureEvent,
    NoticeEvent,
    RestartEvent,
    RestoredEvent,
    SaveEndedEvent,
    SaveStartedEvent,
    StartEvent,
    StepEvent,
    encode,
)
from stratagem.run_events.step_aggregator import StepAggregator, StepRecord

__all__ = ["EventWriter"]


class EventWriter:
    """Writes the events of one process; safe to use from several threads.

    Each process and attempt has its own file, `events/worker-2.attempt-1.pid-1234.jsonl` in the
    run folder. Each line is written at once, so a killed process loses at most its last line.
    Steps are aggregated to one line per interval; the first step after a start, a restore or a
    failure is written immediately.

    A write error loses the event and warns once; training continues. A forked process writes
    nothing.

    Args:
        run_dir: run folder, created if missing.
        task_type: chief, worker, ps, evaluator, or launcher.
        task_index: index among tasks of the same type.
        num_processes: number of processes that train together.
        attempt: number of earlier starts; None reads `STRATAGEM_RESTART_COUNT`.
        interval_s: interval over which steps are aggregated, in seconds.
        age_s: seconds since the process started.

    Raises:
        ValueError: the interval is negative, or `STRATAGEM_RESTART_COUNT` is not a count.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with EventWriter(folder, "worker", 2, num_processes=4, attempt=1) as writer:
        ...         for step in range(1, 101):
        ...             writer.step(step)
        ...     path, = (Path(folder) / "events").iterdir()
        ...     path.name.startswith("worker-2.attempt-1.pid-"), '"step": 100' in path.read_text()
        (True, True)

    Source: specific to Stratagem.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        task_type: str,
        task_index: int,
        *,
        num_processes: int,
        attempt: int | None = None,
        interval_s: float = 1.0,
        age_s: float = 0.0,
    ) -> None:
        if not interval_s >= 0:
            raise ValueError(
                explain(
                    f"interval_s={interval_s!r} is not a valid interval.",
                    expected="a number of seconds, 0 or more.",
                    fix="pass 1.0, or 0 for one line per call.",
                )
            )
        self._pid = os.getpid()
        # Reentrant: a signal handler may interrupt a write.
        self._lock = threading.RLock()
        self._has_warned = False
        self._last_step = 0
        self._is_torn = False
        self._has_ended = False
        attempt = _restart_count() if attempt is None else attempt
        name = f"{task_type}-{task_index}.attempt-{attempt}.pid-{self._pid}"
        self._descriptor = self._open(Path(run_dir) / "events", name)
        self._steps = StepAggregator(interval_s, time.monotonic())
        started = {name: now_s - age_s for name, now_s in _now().items()}
        self._write(
            StartEvent(
                **started,
                task_type=task_type,
                task_index=int(task_index),
                attempt=attempt,
                num_processes=int(num_processes),
                pid=self._pid,
            )
        )

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        del error_type, error, traceback
        self.close()

    @property
    def last_step(self) -> int:
        """Number of steps completed in the run, as last reported."""
        return self._last_step

    def step(self, step: int, *, num_steps: int = 1, duration_s: float | None = None) -> None:
        """Records that a call just finished one or more steps.

        Args:
            step: number of steps completed in the run so far, across restarts; decreases only
                when an older state is restored.
            num_steps: number of steps that the call ran.
            duration_s: duration of the call in seconds, until its result was ready; None for
                the time since the previous step.

        Raises:
            ValueError: `num_steps` is below 1 or above `step`, or the duration is negative.
        """
        if not 1 <= num_steps <= step or (
            duration_s is not None and not 0 <= duration_s < math.inf
        ):
            raise ValueError(
                explain(
                    f"step={step!r}, num_steps={num_steps!r}, duration_s={duration_s!r} is not a "
                    "valid step report.",
                    expected="1 <= num_steps <= step, and a finite duration of 0 or more.",
                    fix="pass the number of steps completed after the call, counted from 1.",
                )
            )
        self._last_step = int(step)
        with self._lock:
            for line in self._steps.add(step, num_steps, duration_s, time.monotonic()):
                self._write_steps(line)

    def kept(self, duration_s: float) -> None:
        """Records that an in-memory snapshot of the state just finished.

        Args:
            duration_s: seconds that training waited for it.
        """
        with self._lock:
            self._steps.keep(float(duration_s))

    def save_started(self, step: int, *, is_asynchronous: bool = False) -> None:
        """Records that a checkpoint is about to be written.

        Args:
            step: number of steps completed so far.
            is_asynchronous: True if training continues meanwhile.
        """
        event = SaveStartedEvent(**_now(), step=int(step), is_asynchronous=is_asynchronous)
        self._record(event)

    def save_ended(
        self,
        step: int,
        *,
        stall_s: float,
        duration_s: float,
        is_asynchronous: bool = False,
        failed: str | None = None,
    ) -> None:
        """Records that a checkpoint was written, or why it failed.

        Args:
            step: number of steps completed when the save started.
            stall_s: seconds that training waited for it.
            duration_s: seconds from start to end.
            is_asynchronous: True if training continued meanwhile.
            failed: the error message, or None on success.
        """
        event = SaveEndedEvent(
            **_now(),
            step=int(step),
            stall_s=float(stall_s),
            duration_s=float(duration_s),
            is_asynchronous=is_asynchronous,
            failed=failed,
        )
        # An asynchronous save ends during a step, which must stay whole.
        self._record(event, interrupts=not is_asynchronous)

    def restored(self, step: int, source: str | os.PathLike[str]) -> None:
        """Records that the process restored a saved state.

        Args:
            step: number of steps completed in that state.
            source: "memory", or a path.
        """
        self._last_step = int(step)
        event = RestoredEvent(**_now(), step=int(step), source=os.fspath(source))
        self._record(event, is_restart=True)

    def failure(
        self, reason: str, *, lost: str | None = None, silence_s: float | None = None
    ) -> None:
        """Records a failure as soon as it is detected.

        Args:
            reason: the error message.
            lost: the lost task, such as "worker 2", or None.
            silence_s: seconds since its last sign of life, or None if unknown.
        """
        silence_s = None if silence_s is None else float(silence_s)
        event = FailureEvent(**_now(), reason=reason, lost=lost, silence_s=silence_s)
        self._record(event, is_restart=True)

    def restart(self, attempt: int, cause: str) -> None:
        """Records that the launcher restarts the tasks.

        Args:
            attempt: number of earlier starts.
            cause: reason for the restart.
        """
        self._record(RestartEvent(**_now(), attempt=int(attempt), cause=cause))

    def notice(self, reason: str) -> None:
        """Records that this machine will be taken away; safe to call in a signal handler.

        Args:
            reason: source of the notice, such as a signal name.
        """
        self._record(NoticeEvent(**_now(), reason=reason), interrupts=False)

    def end(self, code: int = 0, reason: str | None = None) -> None:
        """Records that the process is about to exit. Only the first call counts.

        Args:
            code: exit code.
            reason: why it exits, or None.
        """
        if not self._has_ended:
            self._has_ended = True
            self._record(EndEvent(**_now(), code=int(code), reason=reason))

    def close(self) -> None:
        """Writes pending steps and closes the file; later events are dropped."""
        with self._lock:
            self._write_pending()
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                os.close(descriptor)

    def _record(self, event: Event, *, interrupts: bool = True, is_restart: bool = False) -> None:
        with self._lock:
            self._write_pending()
            if interrupts:
                self._steps.interrupt(event.monotonic_s, is_restart=is_restart)
            self._write(event)

    def _write_pending(self) -> None:
        line = self._steps.take()
        if line is not None:
            self._write_steps(line)

    def _write_steps(self, line: StepRecord) -> None:
        now = _now()
        self._write(
            StepEvent(
                time_s=now["time_s"] - (now["monotonic_s"] - line.end_s),
                monotonic_s=line.end_s,
                step=int(line.step),
                num_steps=int(line.num_steps),
                duration_s=float(line.duration_s),
                elapsed_s=float(line.end_s - line.begin_s),
                keeping_s=float(line.keeping_s),
            )
        )

    def _write(self, event: Event) -> None:
        if self._descriptor is None or os.getpid() != self._pid:
            return
        line = f"{encode(event)}\n".encode()
        # End a partly written line first.
        data = b"\n" + line if self._is_torn else line
        try:
            num_written = os.write(self._descriptor, data)
        except OSError as error:
            self._is_torn = True
            self._warn(str(error))
            return
        self._is_torn = num_written < len(data)
        if self._is_torn:
            self._warn("only part of a line was written; the disk may be full.")

    def _open(self, folder: Path, name: str) -> int | None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Processes in different containers may have the same PID.
            for number in itertools.count(1):
                ending = "jsonl" if number == 1 else f"{number}.jsonl"
                try:
                    return os.open(folder / f"{name}.{ending}", flags, 0o644)
                except FileExistsError:
                    continue
        except OSError as error:
            self._warn(str(error))
        return None

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                explain(
                    f"Events of this run are lost: {why}",
                    expected="a run folder with room, to which this process can write.",
                    fix="check the disk and the permissions of the run folder, STRATAGEM_RUN_DIR.",
                ),
                RuntimeWarning,
                stacklevel=2,
            )


def _now() -> dict[str, float]:
    return {"time_s": time.time(), "monotonic_s": time.monotonic()}


def _restart_count() -> int:
    text = environment.lookup("STRATAGEM_RESTART_COUNT") or "0"
    if not text.isdecimal():
        raise ValueError(
            explain(
                f"STRATAGEM_RESTART_COUNT={text!r} is not a count.",
                expected="the number of earlier starts: 0, 1, 2, ...",
                fix="unset it (the launcher sets it), or pass attempt=.",
            )
        )
    return int(text)
