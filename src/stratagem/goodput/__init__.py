"""What a run tells about itself, and where its time went.

Nothing here loads JAX or Keras.
"""

from stratagem.goodput.account import CAUSES, Account, Span, account_for
from stratagem.goodput.current import close_events, current_events, step
from stratagem.goodput.failures import Failure
from stratagem.goodput.reading import RunEvents, read_run
from stratagem.goodput.writer import EventWriter

__all__ = [
    "Account",
    "CAUSES",
    "EventWriter",
    "Failure",
    "RunEvents",
    "Span",
    "account_for",
    "close_events",
    "current_events",
    "read_run",
    "step",
]
