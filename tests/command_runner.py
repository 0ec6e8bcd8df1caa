"""A runner of commands that is the same for all versions of click that the project allows."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

from click import testing

__all__ = ["CliRunner"]


class CliRunner(testing.CliRunner):
    """Click's runner, with all of stderr apart from stdout, which click does since 8.2.1."""

    def __init__(self, **options: Any) -> None:
        if "mix_stderr" in inspect.signature(testing.CliRunner).parameters:
            options["mix_stderr"] = False
        super().__init__(**options)

    @contextlib.contextmanager
    def isolation(self, *arguments: Any, **options: Any) -> Iterator[Any]:
        """Replaces the streams of this process within a `with` block."""
        with super().isolation(*arguments, **options) as streams:
            sys.stderr.reconfigure(write_through=True)
            yield streams
