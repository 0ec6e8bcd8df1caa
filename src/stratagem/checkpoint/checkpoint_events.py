"""Goodput events for saves and restores."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Mapping
from concurrent.futures import Future
from typing import Any

from stratagem.observe.run_events.process_writer import current_events

_STEP = "step_of_run"


def step_of_run() -> dict[str, int]:
    """Returns the step of a checkpoint, for its manifest; empty if no events are recorded."""
    events = current_events()
    return {} if events is None else {_STEP: events.last_step}


def record_restore(notes: Mapping[str, Any], source: str) -> None:
    """Records a restore event; `source` is "memory" or a path."""
    events, step = current_events(), notes.get(_STEP)
    if events is not None and step is not None:
        events.restored(step, source)


@contextlib.contextmanager
def record_memory_save() -> Generator[None]:
    """Records the duration of an in-memory backup; the devices are idle by then."""
    begun_s = time.monotonic()
    try:
        yield
    finally:
        events = current_events()
        if events is not None:
            events.kept(time.monotonic() - begun_s)


@contextlib.contextmanager
def record_save() -> Generator[None]:
    """Records a save that blocks training."""
    events = current_events()
    if events is None:
        yield
        return
    step, begun_s = events.last_step, time.monotonic()
    events.save_started(step)
    failed: str | None = None
    try:
        yield
    except Exception as error:
        failed = f"{type(error).__name__}: {error}"
        raise
    finally:
        duration_s = time.monotonic() - begun_s
        events.save_ended(step, stall_s=duration_s, duration_s=duration_s, failed=failed)


def record_async_save(writing: Future[None], begun_s: float) -> None:
    """Records the start of an asynchronous save, and its end when `writing` is done.

    Training stopped at the monotonic time `begun_s` and resumes now.
    """
    events = current_events()
    if events is None:
        return
    step, stall_s = events.last_step, time.monotonic() - begun_s
    events.save_started(step, is_asynchronous=True)

    def record_end(writing: Future[None]) -> None:
        error = writing.exception()
        events.save_ended(
            step,
            stall_s=stall_s,
            duration_s=time.monotonic() - begun_s,
            is_asynchronous=True,
            failed=None if error is None else f"{type(error).__name__}: {error}",
        )

    writing.add_done_callback(record_end)
