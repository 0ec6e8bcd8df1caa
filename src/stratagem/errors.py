"""Exception classes of this library.

::

    Exception
    ├── ValueError ──────── InvalidArgumentError   shapes that do not fit a reduction or a gather
    ├── IndexError ──────── OutOfRangeError        reading past the end of the data
    ├── LookupError ─────── NotFoundError          missing checkpoint or accelerator
    ├── OSError ─────────── DataLossError          damaged checkpoint files
    ├── TimeoutError ────── DeadlineExceededError  a wait timed out
    ├── ConnectionError ─── UnavailableError       a peer was lost
    │                       └── PSUnavailableError a parameter server was lost for good
    └── RuntimeError ──┬─── CancelledError         a scheduled function was cancelled
                       ├─── ClosureInputError      an input of a scheduled function failed
                       └─── ClosureAbortedError    a scheduled function was aborted

Each class derives from the builtin that a caller would catch. The whole message is its only
argument, so that it can be pickled and sent between processes.
"""

from __future__ import annotations

__all__ = [
    "CancelledError",
    "ClosureAbortedError",
    "ClosureInputError",
    "DataLossError",
    "DeadlineExceededError",
    "InvalidArgumentError",
    "NotFoundError",
    "OutOfRangeError",
    "PSUnavailableError",
    "UnavailableError",
]


class InvalidArgumentError(ValueError):
    """Raised for shapes that do not fit a reduction or a gather.

    Source: TF 2.21 errors_impl.py, InvalidArgumentError.
    """


class OutOfRangeError(IndexError):
    """Raised for reading past the end of the data.

    Source: TF 2.21 errors_impl.py, OutOfRangeError.
    """


class NotFoundError(LookupError):
    """Raised when a checkpoint or an accelerator does not exist.

    Source: TF 2.21 errors_impl.py, NotFoundError.
    """


class DataLossError(OSError):
    """Raised when checkpoint files do not match what was written.

    Source: TF 2.21 errors_impl.py, DataLossError.
    """


class DeadlineExceededError(TimeoutError):
    """Raised when a wait exceeds its time limit.

    Source: TF 2.21 errors_impl.py, DeadlineExceededError.
    """


class UnavailableError(ConnectionError):
    """Raised when a peer is lost.

    Source: TF 2.21 errors_impl.py, UnavailableError.
    """


class PSUnavailableError(UnavailableError):
    """Raised when a parameter server is lost and cannot be recovered.

    Source: TF 2.21 cluster_coordinator.py, PSUnavailableError.
    """


class CancelledError(RuntimeError):
    """Raised for a scheduled function that was cancelled because another one failed.

    Source: TF 2.21 errors_impl.py, CancelledError.
    """


class ClosureInputError(RuntimeError):
    """Raised for a scheduled function with a failed input.

    Source: TF 2.21 cluster_coordinator.py, ClosureInputError.
    """


class ClosureAbortedError(RuntimeError):
    """Raised for a scheduled function that was aborted.

    Source: TF 2.21 cluster_coordinator.py, ClosureAbortedError.
    """
