"""Event logs of a run: starts, steps, saves and failures of every process."""

from stratagem.run_events.process_writer import (
    close_events,
    current_events,
    is_progress_due,
    progress,
    sample_devices,
    step,
)
from stratagem.run_events.writer import EventWriter

__all__ = [
    "EventWriter",
    "close_events",
    "current_events",
    "is_progress_due",
    "progress",
    "sample_devices",
    "step",
]
