"""Events of a run: starts, steps, saves, failures, written to its folder by every process."""

from stratagem.run_events.process_writer import close_events, current_events, step
from stratagem.run_events.writer import EventWriter

__all__ = ["EventWriter", "close_events", "current_events", "step"]
