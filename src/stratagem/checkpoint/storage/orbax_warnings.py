"""Collection of Orbax's log warnings, which often name the cause of an error that Orbax raises."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Generator

# Orbax logs to `absl`; asyncio logs task errors that were not retrieved.
_LOGGERS = ("absl", "asyncio")


@dataclasses.dataclass
class OrbaxWarnings(logging.Filter):
    """Collects the errors of warnings, each once and in order, instead of printing them."""

    causes: list[str] = dataclasses.field(default_factory=list[str])

    def filter(self, record: logging.LogRecord) -> bool:
        """Collects warnings; passes other records on."""
        if record.levelno < logging.WARNING:
            return True
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            text = f"{type(error).__name__}: {(str(error) or repr(error)).splitlines()[0]}"
            if text not in self.causes:
                self.causes.append(text)
        return False


@contextlib.contextmanager
def collect_warnings(collected: OrbaxWarnings) -> Generator[None]:
    """Collects the warnings that Orbax logs."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addFilter(collected)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(collected)
