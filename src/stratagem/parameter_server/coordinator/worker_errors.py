"""Errors of scheduled functions: serialized by workers, raised by the coordinator."""

from __future__ import annotations

import pickle
import re
import traceback

import numpy as np

from stratagem.environment import load
from stratagem.errors import ClosureInputError, OutOfRangeError, explain
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.client.variable_client import VariableOnWorkerError

_ADDRESS = re.compile(r"0x[0-9a-f]+")


class DatasetVariableError(ClosureInputError, ValueError):
    """Raised for a variable that a dataset function creates on a worker."""


class WorkerReport:
    """Traceback of an error on a worker, attached to the error as a note.

    Identical errors of several workers share one note, which lists the workers. `trace` is the text
    of the traceback.
    """

    def __init__(self, error: BaseException, worker: int, trace: str) -> None:
        self._error = error
        self._trace = trace
        self._workers = [worker]
        self._note = self._text()
        error.add_note(self._note)
        vars(error)["worker_report"] = self

    def merge(self, other: WorkerReport) -> None:
        """Adds the workers of another report to the note, if both describe the same error."""
        if self._key() != other._key():
            return
        self._workers = sorted({*self._workers, *other._workers})
        notes = self._error.__notes__
        place = notes.index(self._note)
        self._note = notes[place] = self._text()

    def _key(self) -> tuple[type, str]:
        return type(self._error), _ADDRESS.sub("0x", self._trace)

    def _text(self) -> str:
        *others, last = map(str, self._workers)
        named = f"workers {', '.join(others)} and {last}" if others else f"worker {last}"
        return f"Raised on {named}:\n{self._trace}"


def merge_reports(first: BaseException, later: BaseException) -> None:
    """Adds a later error's workers to the note of the first one, if the errors are the same."""
    reports = [vars(error).get("worker_report") for error in (first, later)]
    if isinstance(reports[0], WorkerReport) and isinstance(reports[1], WorkerReport):
        reports[0].merge(reports[1])


def failed_message(error: BaseException, *, is_input: bool = False) -> Message:
    """Returns the message that sends an error to the coordinator.

    An error that cannot be pickled, or would end the coordinator, becomes a RuntimeError with its
    text. `is_input` marks errors from creating an input of functions, such as a dataset.
    """
    trace = "".join(traceback.format_exception(error))
    if is_input:
        error = _input_error(error)
    elif isinstance(error, StopIteration | StopAsyncIteration):  # would end the caller's loop
        error = OutOfRangeError(
            explain(
                f"A scheduled function raised {type(error).__name__}: its dataset is exhausted.",
                expected="at most as many next() calls as the worker's dataset has batches.",
                fix="schedule fewer functions, repeat the dataset, or catch StopIteration in the "
                "function.",
                code="SG605",
            )
        )
    cloudpickle = load("cloudpickle", needed_by="a worker", install="stratagem[ray]")
    in_words = RuntimeError(f"{type(error).__name__}: {error}")
    try:
        pickled = cloudpickle.dumps(error if isinstance(error, Exception) else in_words)
        pickle.loads(pickled)  # noqa: S301 - made in the line before
    except Exception:  # noqa: BLE001 - its class cannot be pickled
        pickled = cloudpickle.dumps(in_words)
    return Message("failed", {"trace": trace}, [np.frombuffer(pickled, np.uint8)])


def _input_error(error: BaseException) -> ClosureInputError:
    kind = DatasetVariableError if isinstance(error, VariableOnWorkerError) else ClosureInputError
    return kind(
        explain(
            f"A worker could not create its dataset or other per-worker object: {error!r}",
            expected="a dataset function that succeeds on every worker.",
            fix="see the worker's traceback below.",
            code="SG604",
        )
    )
