"""`EventWriter`: writes one process's events to the run folder."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import SupportsFloat

from stratagem import environment
from stratagem.errors import explain, invalid
from stratagem.observe import events
from stratagem.observe.wait_clock import StepWaits
from stratagem.resources import Closing

# Number of earlier starts of this process's task, as the launcher sets it.


def restart_count() -> int:
    """Returns STRATAGEM_RESTART_COUNT, or 0; raises ValueError if it is not a count."""
    text = environment.lookup("STRATAGEM_RESTART_COUNT") or "0"
    if not text.isdecimal():
        raise invalid(
            f"STRATAGEM_RESTART_COUNT={text!r} is not a count.",
            expected="the number of earlier starts: 0, 1, 2, ...",
            fix="unset it (the launcher sets it), or pass attempt=.",
        )
    return int(text)


# One process's file of events: opened once, each line written at once, errors reported once.


class EventLog:
    """A new file `NAME.jsonl` in `folder`. A forked process writes nothing.

    Lines that cannot be written are lost, with one warning.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._pid = os.getpid()
        self._has_warned = False
        self._is_torn = False
        self._descriptor = self._open(folder, name)

    def write(self, line: str) -> None:
        """Writes a line, and ends a partly written one first."""
        if self._descriptor is None or os.getpid() != self._pid:
            return
        encoded = f"{line}\n".encode()
        data = b"\n" + encoded if self._is_torn else encoded
        try:
            num_written = os.write(self._descriptor, data)
        except OSError as error:
            self._is_torn = True
            self._warn(str(error))
            return
        self._is_torn = num_written < len(data)
        if self._is_torn:
            self._warn("only part of a line was written; the disk may be full.")

    def close(self) -> None:
        """Closes the file; later lines are dropped."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

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


# Aggregation of consecutive steps into one event per interval.

# Nothing was measured.
NO_WAITS = StepWaits()


@dataclasses.dataclass(slots=True)
class StepRecord:
    """Consecutive steps of one event.

    `duration_s` is the time inside the calls, `waits` the waits in it, and
    `keeping_s` the time of in-memory snapshots between them.
    """

    begin_s: float
    end_s: float
    step: int
    num_steps: int
    duration_s: float
    keeping_s: float = 0.0
    waits: StepWaits = NO_WAITS

    def event(self, time_s: float) -> events.StepEvent:
        """Returns the event of these steps, which ended at a time of `time.time`."""
        return events.StepEvent(
            time_s=time_s,
            monotonic_s=self.end_s,
            step=int(self.step),
            num_steps=int(self.num_steps),
            duration_s=float(self.duration_s),
            elapsed_s=float(self.end_s - self.begin_s),
            keeping_s=float(self.keeping_s),
            **self.waits._asdict(),
        )


class StepAggregator:
    """Aggregates steps into records that span at least `interval_s` each."""

    def __init__(self, interval_s: float, now_s: float) -> None:
        self._interval_s = interval_s
        self._line: StepRecord | None = None
        # The end of the last step or event.
        self._mark_s = now_s
        self._written_s = now_s
        self._is_first = True
        self._keeping_s = 0.0  # for the next record

    def add(
        self,
        step: int,
        num_steps: int,
        duration_s: float | None,
        now_s: float,
        waits: StepWaits = NO_WAITS,
    ) -> tuple[StepRecord, ...]:
        """Adds the steps of a call that ended at `now_s`, and returns the completed records.

        `step` is the number of the last step. `duration_s` is None for the time since the previous
        step.
        """
        keeping_s, self._keeping_s = self._keeping_s, 0.0
        if duration_s is None:
            duration_s = max(0.0, now_s - self._mark_s - keeping_s)
        line = self._line
        if line is not None:
            is_next = line.step == step - num_steps
            if is_next and now_s - duration_s - line.end_s <= self._interval_s:
                line.end_s = self._mark_s = now_s
                line.step = step
                line.num_steps += num_steps
                line.duration_s += duration_s
                line.keeping_s += keeping_s
                line.waits = line.waits.plus(waits)
                if now_s - self._written_s < self._interval_s:
                    return ()
                self._line, self._written_s = None, now_s
                return (line,)
        full = self.take()
        begin_s = now_s - duration_s
        # A gap between calls belongs to the record unless it is longer than the interval.
        if 0 <= begin_s - self._mark_s <= self._interval_s:
            begin_s = self._mark_s
        else:
            keeping_s = 0.0
        new = StepRecord(begin_s, now_s, step, num_steps, duration_s, keeping_s, waits)
        self._mark_s = now_s
        is_full = self._is_first or now_s - self._written_s >= self._interval_s
        self._is_first = False
        if is_full:
            self._written_s = now_s
        else:
            self._line = new
        lines = (full, new) if is_full else (full,)
        return tuple(one for one in lines if one is not None)

    def keep(self, duration_s: float) -> None:
        """Adds the duration of an in-memory snapshot after the latest step."""
        self._keeping_s += duration_s

    def take(self) -> StepRecord | None:
        """Removes and returns the incomplete record, or None if there is none."""
        line, self._line = self._line, None
        return line

    def interrupt(self, now_s: float, *, is_restart: bool) -> None:
        """Ends the current gap at an event that belongs to no step.

        With `is_restart`, the next step is reported at once, in a record by itself.
        """
        self._mark_s = max(self._mark_s, now_s)
        self._keeping_s = 0.0
        self._is_first = self._is_first or is_restart


class EventWriter(Closing):
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
            raise invalid(
                f"interval_s={interval_s!r} is not a valid interval.",
                expected="a number of seconds, 0 or more.",
                fix="pass 1.0, or 0 for one line per call.",
            )
        # Reentrant: a signal handler may interrupt a write.
        self._lock = threading.RLock()
        self._last_step = 0
        self._has_ended = False
        attempt = restart_count() if attempt is None else attempt
        name = f"{task_type}-{task_index}.attempt-{attempt}.pid-{os.getpid()}"
        self._log = EventLog(Path(run_dir) / "events", name)
        self._steps = StepAggregator(interval_s, time.monotonic())
        started = {name: now_s - age_s for name, now_s in _now().items()}
        self._write(
            events.StartEvent(
                **started,
                task_type=task_type,
                task_index=int(task_index),
                attempt=attempt,
                num_processes=int(num_processes),
                pid=os.getpid(),
            )
        )

    @property
    def last_step(self) -> int:
        """Number of steps completed in the run, as last reported."""
        return self._last_step

    def step(
        self,
        step: int,
        *,
        num_steps: int = 1,
        duration_s: float | None = None,
        waits: StepWaits = NO_WAITS,
    ) -> None:
        """Records that a call just finished one or more steps.

        Args:
            step: number of steps completed in the run so far, across restarts; decreases only
                when an older state is restored.
            num_steps: number of steps that the call ran.
            duration_s: duration of the call in seconds, until its result was ready; None for
                the time since the previous step.
            waits: time in it that was no work of this process, as far as it was measured.

        Raises:
            ValueError: `num_steps` is below 1 or above `step`, or the duration is negative.
        """
        if not 1 <= num_steps <= step or (
            duration_s is not None and not 0 <= duration_s < math.inf
        ):
            raise invalid(
                f"step={step!r}, num_steps={num_steps!r}, duration_s={duration_s!r} is not a "
                "valid step report.",
                expected="1 <= num_steps <= step, and a finite duration of 0 or more.",
                fix="pass the number of steps completed after the call, counted from 1.",
            )
        self._last_step = int(step)
        with self._lock:
            for line in self._steps.add(step, num_steps, duration_s, time.monotonic(), waits):
                self._write_steps(line)

    def kept(self, duration_s: float) -> None:
        """Records that an in-memory snapshot of the state just finished.

        Args:
            duration_s: seconds that training waited for it.
        """
        with self._lock:
            self._steps.keep(float(duration_s))

    def progress(
        self,
        values: Mapping[str, SupportsFloat] | None = None,
        *,
        step: int | None = None,
        total_steps: int | None = None,
        epoch: int | None = None,
        num_epochs: int | None = None,
    ) -> None:
        """Records the progress of training, and its latest loss and metrics.

        Each value is read at once: an array is waited for.

        Args:
            values: loss and metrics by name.
            step: number of steps completed; None for the one last reported.
            total_steps: number of steps after which training ends, or None if unknown.
            epoch: number of completed epochs, or None.
            num_epochs: number of epochs after which training ends, or None.
        """
        numbers = {name: float(value) for name, value in (values or {}).items()}
        event = events.ProgressEvent(
            **_now(),
            step=self._last_step if step is None else int(step),
            total_steps=total_steps,
            epoch=epoch,
            num_epochs=num_epochs,
            values={name: one if math.isfinite(one) else None for name, one in numbers.items()},
        )
        self._record_beside(event)

    def memory(
        self,
        host_bytes: int | None,
        device_bytes: int | None = None,
        device_limit_bytes: int | None = None,
    ) -> None:
        """Records the memory in use, and that the process is alive.

        Args:
            host_bytes: resident memory of the process, or None if unknown.
            device_bytes: memory in use on the fullest device, or None.
            device_limit_bytes: memory of that device, or None.
        """
        self._record_beside(
            events.MemoryEvent(
                **_now(),
                host_bytes=host_bytes,
                device_bytes=device_bytes,
                device_limit_bytes=device_limit_bytes,
            )
        )

    def save_started(self, step: int, *, is_asynchronous: bool = False) -> None:
        """Records that a checkpoint is about to be written.

        Args:
            step: number of steps completed so far.
            is_asynchronous: True if training continues meanwhile.
        """
        event = events.SaveStartedEvent(**_now(), step=int(step), is_asynchronous=is_asynchronous)
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
        event = events.SaveEndedEvent(
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
        event = events.RestoredEvent(**_now(), step=int(step), source=os.fspath(source))
        self._record(event, is_restart=True)

    def failure(
        self,
        reason: str,
        *,
        lost: str | None = None,
        silence_s: float | None = None,
        step: int | None = None,
        reported_by: str | None = None,
    ) -> None:
        """Records a failure as soon as it is detected.

        Args:
            reason: the error message.
            lost: the lost task, such as "worker 2", or None.
            silence_s: seconds since its last sign of life, or None if unknown.
            step: number of shared programs that it had begun, or None if unknown.
            reported_by: the task that got the error, or None.
        """
        event = events.FailureEvent(
            **_now(),
            reason=reason,
            lost=lost,
            silence_s=None if silence_s is None else float(silence_s),
            step=None if step is None else int(step),
            reported_by=reported_by,
        )
        self._record(event, is_restart=True)

    def restart(self, attempt: int, cause: str) -> None:
        """Records that the launcher restarts the tasks.

        Args:
            attempt: number of earlier starts.
            cause: reason for the restart.
        """
        self._record(events.RestartEvent(**_now(), attempt=int(attempt), cause=cause))

    def notice(self, reason: str) -> None:
        """Records that this machine will be taken away; safe to call in a signal handler.

        Args:
            reason: source of the notice, such as a signal name.
        """
        self._record(events.NoticeEvent(**_now(), reason=reason), interrupts=False)

    def members(self, event: events.MembersEvent) -> None:
        """Records the members of an elastic group, at the end of their first step together.

        Args:
            event: the members, with the times of the change.
        """
        # The step that ends now contains the pause, so it is written by itself.
        self._record(event, is_restart=True)

    def end(self, code: int = 0, reason: str | None = None) -> None:
        """Records that the process is about to exit. Only the first call counts.

        Args:
            code: exit code.
            reason: why it exits, or None.
        """
        if not self._has_ended:
            self._has_ended = True
            self._record(events.EndEvent(**_now(), code=int(code), reason=reason))

    def close(self) -> None:
        """Writes pending steps and closes the file; later events are dropped."""
        with self._lock:
            self._write_pending()
            self._log.close()

    def _record(
        self, event: events.Event, *, interrupts: bool = True, is_restart: bool = False
    ) -> None:
        with self._lock:
            self._write_pending()
            if interrupts:
                self._steps.interrupt(event.monotonic_s, is_restart=is_restart)
            self._write(event)

    def _record_beside(self, event: events.Event) -> None:
        """Writes an event that leaves the line of steps in progress whole.

        Takes no lock, which a fork could copy while another thread holds it. A line is one append.
        Dropped after the end, which stays the last event.
        """
        if not self._has_ended:
            self._write(event)

    def _write_pending(self) -> None:
        line = self._steps.take()
        if line is not None:
            self._write_steps(line)

    def _write_steps(self, line: StepRecord) -> None:
        self._write(line.event(time.time() - time.monotonic() + line.end_s))

    def _write(self, event: events.Event) -> None:
        self._log.write(events.encode(event))


def _now() -> dict[str, float]:
    return {"time_s": time.time(), "monotonic_s": time.monotonic()}
