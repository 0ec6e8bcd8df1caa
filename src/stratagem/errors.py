"""Errors that Stratagem raises beside Python's own.

::

    Exception
    ├── ValueError ──────── InvalidArgumentError   shapes that do not fit a reduction or a gather
    ├── IndexError ──────── OutOfRangeError        reading past the end of the data
    ├── LookupError ─────── NotFoundError          no such checkpoint, no such accelerator
    ├── OSError ─────────── DataLossError          a checkpoint whose files are damaged
    ├── TimeoutError ────── DeadlineExceededError  a wait beyond its limit
    ├── ConnectionError ─── UnavailableError       a peer was lost
    │                       └── PSUnavailableError a parameter server was lost for good
    └── RuntimeError ──┬─── CancelledError         a scheduled function was given up
                       ├─── ClosureInputError      an input of a scheduled function failed
                       └─── ClosureAbortedError    a scheduled function was aborted

Each is also the builtin that a caller would catch, and carries its whole message as its only
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
    """Raised when the files of a checkpoint are not what was written.

    Source: TF 2.21 errors_impl.py, DataLossError.
    """


class DeadlineExceededError(TimeoutError):
    """Raised when a wait passes its limit.

    Source: TF 2.21 errors_impl.py, DeadlineExceededError.
    """


class UnavailableError(ConnectionError):
    """Raised when a peer was lost.

    Source: TF 2.21 errors_impl.py, UnavailableError.
    """


class PSUnavailableError(UnavailableError):
    """Raised when a parameter server was lost and cannot be recovered.

    Source: TF 2.21 cluster_coordinator.py, PSUnavailableError.
    """


class CancelledError(RuntimeError):
    """Raised for a scheduled function that was given up because another one failed.

    Source: TF 2.21 errors_impl.py, CancelledError.
    """


class ClosureInputError(RuntimeError):
    """Raised for a scheduled function of which an input failed.

    Source: TF 2.21 cluster_coordinator.py, ClosureInputError.
    """


class ClosureAbortedError(RuntimeError):
    """Raised for a scheduled function that was aborted.

    Source: TF 2.21 cluster_coordinator.py, ClosureAbortedError.
    """
