"""What saving and restoring tell the events of a run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Mapping
from concurrent.futures import Future
from typing import Any

from stratagem.goodput import current_events

__all__ = [
    "step_of_run",
    "tell_restored",
    "tell_when_written",
    "telling_of_keeping",
    "telling_of_save",
]

_STEP = "step_of_run"


def step_of_run() -> dict[str, int]:
    """Returns what a checkpoint notes of the step at which it is made; nothing without events."""
    events = current_events()
    return {} if events is None else {_STEP: events.last_step}


def tell_restored(notes: Mapping[str, Any], source: str) -> None:
    """Tells that a state was restored.

    Args:
        notes: of the checkpoint.
        source: "memory", or a path.
    """
    events, step = current_events(), notes.get(_STEP)
    if events is not None and step is not None:
        events.restored(step, source)


@contextlib.contextmanager
def telling_of_keeping() -> Generator[None]:
    """Tells of a state that is kept in memory; the devices are done with the step."""
    begun_s = time.monotonic()
    try:
        yield
    finally:
        events = current_events()
        if events is not None:
            events.kept(time.monotonic() - begun_s)


@contextlib.contextmanager
def telling_of_save() -> Generator[None]:
    """Tells of a save that training waits for."""
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


def tell_when_written(writing: Future[None], begun_s: float) -> None:
    """Tells of a save behind training: that it has begun, and later how it ended.

    Args:
        writing: is done when it has ended.
        begun_s: when training stopped for it; it goes on now.
    """
    events = current_events()
    if events is None:
        return
    step, stall_s = events.last_step, time.monotonic() - begun_s
    events.save_started(step, is_asynchronous=True)

    def tell(writing: Future[None]) -> None:
        error = writing.exception()
        events.save_ended(
            step,
            stall_s=stall_s,
            duration_s=time.monotonic() - begun_s,
            is_asynchronous=True,
            failed=None if error is None else f"{type(error).__name__}: {error}",
        )

    writing.add_done_callback(tell)
