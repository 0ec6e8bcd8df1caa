"""Errors of reading a batch: where they happened, for the consumers of a job."""

from __future__ import annotations

import os
import traceback
from typing import Any

from stratagem.errors import PoisonExampleError, UnavailableError
from stratagem.input.service.splits import SplitPlan, file_of_split
from stratagem.input.sources.source import Source
from stratagem.messages import explain

_OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_INSTALLED = f"{os.sep}site-packages{os.sep}"


def describe_read_error(
    error: Exception, source: Source, plan: SplitPlan, *, epoch: int, split: int, index: int
) -> dict[str, Any]:
    """Returns an error of reading a batch as JSON, with the file and the function that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if not frame.filename.startswith(_OWN_FOLDER) and _INSTALLED not in frame.filename
    ]
    place = (own or frames)[-1] if frames else None
    file = file_of_split(source, plan, split)
    return {
        "kind": "read",
        "split": split,
        "index": index,
        "epoch": epoch,
        "file": None if file is None else str(file),
        "function": place and place.name,
        "source_file": place and place.filename,
        "line": place and place.lineno,
        "type": type(error).__name__,
        "text": str(error),
        "trace": "".join(traceback.format_exception(error)),
    }


def describe_open_error(error: Exception) -> dict[str, Any]:
    """Returns an error of unpickling a dataset as JSON."""
    return {
        "kind": "open",
        "type": type(error).__name__,
        "text": str(error),
        "trace": "".join(traceback.format_exception(error)),
    }


def job_error(described: dict[str, Any]) -> Exception:
    """Returns the error of a job, for its consumers."""
    if described["kind"] == "losses":
        return UnavailableError(
            explain(
                f"The input workers that read split {described['split']} were lost "
                f"{described['count']} times in a row, before any batch of it arrived.",
                expected="workers that survive reading it.",
                fix="see the ends of their logs: a worker may be out of memory, or a function of "
                "the dataset may never return.",
            )
        )
    if described["kind"] == "journal":
        return UnavailableError(
            explain(
                f"The dispatcher cannot write its journal: {described['text']}",
                expected="a work_dir with room on its disk.",
                fix="make room, and start the dispatcher again with the same work_dir and port.",
            )
        )
    if described["kind"] == "open":
        return RuntimeError(
            explain(
                f"An input worker could not load the dataset: {described['type']}: "
                f"{described['text']}",
                expected="a worker with the same modules as the process that registered it.",
                fix=f"install the modules there. The worker's traceback:\n{described['trace']}",
            )
        )
    return PoisonExampleError(
        explain(
            f"An input worker could not read {_place(described)}",
            expected="a dataset whose functions accept all examples.",
            fix=f"correct the example or the function, or pass skip_errors. The worker's "
            f"traceback:\n{described['trace']}",
            code="SG312",
        )
    )


def skip_warning(described: dict[str, Any]) -> str:
    """Returns the warning of a batch that was skipped."""
    return explain(
        f"An input worker skipped {_place(described)}",
        expected="a dataset whose functions accept all examples.",
        fix="nothing, if this example may be missed. Else correct it or the function.",
    )


def _place(described: dict[str, Any]) -> str:
    where = f"batch {described['index']} of split {described['split']}"
    if described["file"] is not None:
        where = f"batch {described['index']} of the file {described['file']}"
    place = f"{described['function']} ({described['source_file']}, line {described['line']})"
    return (
        f"{where} in epoch {described['epoch']}: {place} raised {described['type']}: "
        f"{described['text']}"
    )
