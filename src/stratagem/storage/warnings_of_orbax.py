"""What Orbax logs while it fails: the cause often stands there, and not in what it raises."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Generator

__all__ = ["Collected", "collected_warnings"]

# `absl` is Orbax's own; uvloop and asyncio tell of tasks whose errors nobody has taken.
_LOGGERS = ("absl", "asyncio")


@dataclasses.dataclass
class Collected(logging.Filter):
    """Keeps warnings instead of letting them be printed.

    Args:
        causes: the errors that they tell of, each once, in their order.
    """

    causes: list[str] = dataclasses.field(default_factory=list[str])

    def filter(self, record: logging.LogRecord) -> bool:
        """Takes a warning; what is less than one goes its way.

        Args:
            record: what is logged.
        """
        if record.levelno < logging.WARNING:
            return True
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            text = f"{type(error).__name__}: {(str(error) or repr(error)).splitlines()[0]}"
            if text not in self.causes:
                self.causes.append(text)
        return False


@contextlib.contextmanager
def collected_warnings(collected: Collected) -> Generator[None]:
    """Collects what Orbax warns of.

    Args:
        collected: takes it.
    """
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addFilter(collected)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(collected)
