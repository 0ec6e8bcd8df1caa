"""Copies of this process's warnings in its events, for viewers of the run."""

from __future__ import annotations

import logging
import threading
import warnings
from typing import Any

from stratagem.observe.run_events.writer import EventWriter

MAX_WARNINGS = 100
_MAX_CHARACTERS = 1000


class WarningCapture:
    """Records warnings of Python and log records of level WARNING or above, each text once.

    Both are shown as before: no handler is added, because a handler of the root logger would turn
    off `logging.basicConfig` and the output to stderr.
    """

    def __init__(self, writer: EventWriter) -> None:
        self._writer = writer
        self._texts: set[str] = set()
        self._state = threading.local()
        self._show = warnings.showwarning
        self._make_record = logging.getLogRecordFactory()

    def start(self) -> None:
        """Begins to record."""
        warnings.showwarning = self._show_warning
        logging.setLogRecordFactory(self._record)

    def stop(self) -> None:
        """Stops recording, and restores what `start` replaced unless others replaced it since."""
        if warnings.showwarning == self._show_warning:
            warnings.showwarning = self._show
        if logging.getLogRecordFactory() == self._record:
            logging.setLogRecordFactory(self._make_record)

    def _show_warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: Any = None,
        line: str | None = None,
    ) -> None:
        self._note(str(message), category.__name__, f"{filename}:{lineno}")
        self._show(message, category, filename, lineno, file, line)

    def _record(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = self._make_record(*args, **kwargs)
        # Warnings that logging captures were recorded as warnings.
        if record.levelno >= logging.WARNING and record.name != "py.warnings":
            try:
                text = record.getMessage()
            except (TypeError, ValueError):  # logging itself reports wrong arguments
                text = str(record.msg)
            self._note(text, record.levelname, record.name)
        return record

    def _note(self, text: str, category: str, origin: str) -> None:
        text = text[:_MAX_CHARACTERS]
        is_nested = getattr(self._state, "is_noting", False)  # the writer itself may warn
        if is_nested or text in self._texts or len(self._texts) >= MAX_WARNINGS:
            return
        self._texts.add(text)
        self._state.is_noting = True
        try:
            self._writer.warning(text, category=category, origin=origin)
        finally:
            self._state.is_noting = False
