"""Summary output of hooks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratagem.estimator.hooks.session_run_hook import Session
from stratagem.execution import summary


class SummaryOutput:
    """Summary writer of a hook: an external one, the session's, or a new one for another folder."""

    def __init__(self, output_dir: str | os.PathLike[str] | None, summary_writer: object) -> None:
        self._folder = None if output_dir is None else Path(output_dir).resolve()
        self._external_writer = summary_writer
        self._writer: Any = None
        self._is_own = False

    def open(self, session: Session) -> None:
        """Chooses the writer."""
        self._writer = self._external_writer
        if self._writer is not None or self._folder is None or not session.is_chief:
            return
        if self._folder == Path(session.model_dir).resolve():
            self._writer = session.summary_writer
        else:
            self._writer, self._is_own = summary.create_file_writer(str(self._folder)), True

    def write(self, values: Mapping[str, Any], step: int) -> None:
        """Writes scalars, if there is a writer."""
        if self._writer is not None:
            with self._writer.as_default(step):
                for tag, value in values.items():
                    summary.scalar(tag, value)

    def close(self) -> None:
        """Flushes the writer, and closes it if the hook created it."""
        if self._writer is not None:
            self._writer.close() if self._is_own else self._writer.flush()
        self._writer, self._is_own = None, False
