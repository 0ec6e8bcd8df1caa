"""Goodput: event logs and the useful share of a run's wall time. Does not import JAX."""

from stratagem.observe.goodput.account import Account, account_for
from stratagem.observe.goodput.history import Failure
from stratagem.observe.goodput.time_spans import CAUSES, MemberChange, Span
from stratagem.observe.run_events.process_writer import close_events, current_events, progress, step
from stratagem.observe.run_events.reader import RunEvents, RunFollower, read_run
from stratagem.observe.run_events.wait_clock import StepWaits
from stratagem.observe.run_events.writer import EventWriter

__all__ = [
    "Account",
    "CAUSES",
    "EventWriter",
    "Failure",
    "MemberChange",
    "RunEvents",
    "RunFollower",
    "Span",
    "StepWaits",
    "account_for",
    "close_events",
    "current_events",
    "progress",
    "read_run",
    "step",
]
