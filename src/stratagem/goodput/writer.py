"""Writes the events of one process into the folder of its run."""

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
from stratagem.goodput.events import (
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
from stratagem.goodput.step_lines import StepLine, StepLines
from stratagem.messages import explain

__all__ = ["EventWriter"]


class EventWriter:
    """Writes the events of one process; several threads may use it.

    Each process and attempt has a file of its own, `events/worker-2.attempt-1.pid-1234.jsonl` in
    the run's folder. A line is written at once and whole, so that a process that is killed loses
    at most its last one. Steps are put together: one line an interval, except for the first step
    after a start, a restored state or a failure, which is written as soon as it is done.

    What cannot be written is lost with one warning, and training goes on. A process that was
    forked writes nothing.

    Args:
        run_dir: the run's folder; it is made where it does not exist.
        task_type: chief, worker, ps, evaluator, or launcher.
        task_index: its number among those of its type.
        num_processes: how many processes train together.
        attempt: how often the tasks were started before; `STRATAGEM_RESTART_COUNT` without it.
        interval_s: how long steps are put together.
        age_s: how long the process has run already.

    Raises:
        ValueError: a negative interval, or a variable that is no count.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with EventWriter(folder, "worker", 2, num_processes=4, attempt=1) as writer:
        ...         for step in range(1, 101):
        ...             writer.step(step)
        ...     path, = (Path(folder) / "events").iterdir()
        ...     path.name.startswith("worker-2.attempt-1.pid-"), '"step": 100' in path.read_text()
        (True, True)
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
                    f"interval_s={interval_s!r} is no interval.",
                    expected="a number of seconds of at least 0.",
                    fix="pass 1.0, or 0 for a line a call.",
                )
            )
        self._pid = os.getpid()
        # A signal handler may write in the middle of a write.
        self._lock = threading.RLock()
        self._has_warned = False
        self._last_step = 0
        self._is_torn = False
        self._has_ended = False
        attempt = _restart_count() if attempt is None else attempt
        name = f"{task_type}-{task_index}.attempt-{attempt}.pid-{self._pid}"
        self._descriptor = self._open(Path(run_dir) / "events", name)
        self._steps = StepLines(interval_s, time.monotonic())
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
        """How many steps of the run are done, as was told last."""
        return self._last_step

    def step(self, step: int, *, num_steps: int = 1, duration_s: float | None = None) -> None:
        """Tells that a call has done one step or several, just now.

        Args:
            step: how many steps of the run are done; it grows through restarts, and falls only
                when an older state was restored.
            num_steps: how many of them the call has done.
            duration_s: how long the call took, with the wait for its result; without it, the time
                since the step before.

        Raises:
            ValueError: no step, more steps than were done, or a negative duration.
        """
        if not 1 <= num_steps <= step or (
            duration_s is not None and not 0 <= duration_s < math.inf
        ):
            raise ValueError(
                explain(
                    f"step={step!r}, num_steps={num_steps!r} and duration_s={duration_s!r} are "
                    "not those of a call.",
                    expected="1 <= num_steps <= step, and a duration of at least 0.",
                    fix="pass how many steps are done after the call, counted from 1.",
                )
            )
        self._last_step = int(step)
        with self._lock:
            for line in self._steps.add(step, num_steps, duration_s, time.monotonic()):
                self._write_steps(line)

    def kept(self, duration_s: float) -> None:
        """Tells that the state was kept in memory after a step, just now.

        Args:
            duration_s: how long training waited for that.
        """
        with self._lock:
            self._steps.keep(float(duration_s))

    def save_started(self, step: int, *, is_asynchronous: bool = False) -> None:
        """Tells that a checkpoint is about to be written.

        Args:
            step: how many steps are done.
            is_asynchronous: training goes on while it is written.
        """
        event = SaveStartedEvent(**_now(), step=int(step), is_asynchronous=is_asynchronous)
        self._tell(event)

    def save_ended(
        self,
        step: int,
        *,
        stall_s: float,
        duration_s: float,
        is_asynchronous: bool = False,
        failed: str | None = None,
    ) -> None:
        """Tells that a checkpoint was written, or why not.

        Args:
            step: how many steps were done when it was started.
            stall_s: how long training waited for it.
            duration_s: how long it took.
            is_asynchronous: training went on while it was written.
            failed: why it was not written.
        """
        event = SaveEndedEvent(
            **_now(),
            step=int(step),
            stall_s=float(stall_s),
            duration_s=float(duration_s),
            is_asynchronous=is_asynchronous,
            failed=failed,
        )
        # A step goes on while it ends, and is not cut.
        self._tell(event, interrupts=not is_asynchronous)

    def restored(self, step: int, source: str | os.PathLike[str]) -> None:
        """Tells that the process has a saved state.

        Args:
            step: how many steps that state has seen.
            source: "memory", or a path.
        """
        self._last_step = int(step)
        event = RestoredEvent(**_now(), step=int(step), source=os.fspath(source))
        self._tell(event, is_new_life=True)

    def failure(
        self, reason: str, *, lost: str | None = None, silence_s: float | None = None
    ) -> None:
        """Tells that something failed, as soon as it is known.

        Args:
            reason: the error, in words.
            lost: who was lost, "worker 2".
            silence_s: how long after the last sign of life.
        """
        silence_s = None if silence_s is None else float(silence_s)
        event = FailureEvent(**_now(), reason=reason, lost=lost, silence_s=silence_s)
        self._tell(event, is_new_life=True)

    def restart(self, attempt: int, cause: str) -> None:
        """Tells that the tasks are started again, by whoever starts them.

        Args:
            attempt: how often they were started before.
            cause: why.
        """
        self._tell(RestartEvent(**_now(), attempt=int(attempt), cause=cause))

    def notice(self, reason: str) -> None:
        """Tells that this machine will be taken away; a signal handler may do it.

        Args:
            reason: by whom or what.
        """
        self._tell(NoticeEvent(**_now(), reason=reason), interrupts=False)

    def end(self, code: int = 0, reason: str | None = None) -> None:
        """Tells that the process is about to end. What was told first counts.

        Args:
            code: its exit code.
            reason: why.
        """
        if not self._has_ended:
            self._has_ended = True
            self._tell(EndEvent(**_now(), code=int(code), reason=reason))

    def close(self) -> None:
        """Writes the steps that are not written yet; whatever is told afterwards is lost."""
        with self._lock:
            self._write_pending()
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                os.close(descriptor)

    def _tell(self, event: Event, *, interrupts: bool = True, is_new_life: bool = False) -> None:
        with self._lock:
            self._write_pending()
            if interrupts:
                self._steps.interrupt(event.monotonic_s, is_new_life=is_new_life)
            self._write(event)

    def _write_pending(self) -> None:
        line = self._steps.take()
        if line is not None:
            self._write_steps(line)

    def _write_steps(self, line: StepLine) -> None:
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
        # The rest of a line that was not written whole stays alone.
        data = b"\n" + line if self._is_torn else line
        try:
            num_written = os.write(self._descriptor, data)
        except OSError as error:
            self._is_torn = True
            self._warn(str(error))
            return
        self._is_torn = num_written < len(data)
        if self._is_torn:
            self._warn("the disk took a part of a line.")

    def _open(self, folder: Path, name: str) -> int | None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # In a container every process may have the same number.
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
                f"Events of this run cannot be written, and are lost: {why}",
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
                f"STRATAGEM_RESTART_COUNT={text!r} is no count.",
                expected="how often the tasks were started before: 0, 1, 2.",
                fix="leave it to the launcher, or pass attempt.",
            )
        )
    return int(text)
