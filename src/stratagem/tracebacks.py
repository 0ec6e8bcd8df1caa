"""Traceback filtering: frames of this library are hidden, so that user code stands out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

from stratagem import config

_P = ParamSpec("_P")
_R = TypeVar("_R")
_FOLDER = str(Path(__file__).parent)
_NOTE = (
    "Frames of stratagem are hidden. sg.config.filter_tracebacks(False) or "
    "STRATAGEM_FILTER_TRACEBACKS=0 shows them."
)


def filters_traceback(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorates a public function so that its errors' tracebacks hide this library's frames."""

    @functools.wraps(fn)
    def filtered(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        # Only a bare re-raise, as in `with`, does not add this frame to the traceback again.
        with _TracebackFilter():
            return fn(*args, **kwargs)

    return filtered


class _TracebackFilter:
    """Removes this library's frames from the traceback of a passing error."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if error is None or not config.filters_tracebacks():
            return
        entries: list[TracebackType] = []
        entry = error.__traceback__
        while entry is not None:
            entries.append(entry)
            entry = entry.tb_next
        if _is_ours(entries[-1]) and _NOTE not in getattr(error, "__notes__", ()):
            error.add_note(_NOTE)
        shown: TracebackType | None = None
        for entry in reversed(entries):
            if not _is_ours(entry):
                shown = TracebackType(shown, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
        error.__traceback__ = shown


def _is_ours(entry: TracebackType) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith(_FOLDER)
