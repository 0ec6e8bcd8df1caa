"""The program of a task that calls a client's function: it reads the call and writes the answer."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from stratagem.messages import explain
from stratagem.remote.jobs.pickling import CALL, dump, load_pickled

__all__ = ["main"]


def main(answer_path: str) -> None:
    """Calls the function of this folder.

    Args:
        answer_path: where what it returns or raises is written, with the lines of a traceback.

    Raises:
        Exception: what the function raises.
        TypeError: what it returns cannot be sent.
    """
    try:
        fn, args, kwargs = load_pickled(Path(CALL).read_bytes())
        value = fn(*args, **kwargs)
        answer = _value(fn, value)
    except Exception as error:
        _write(Path(answer_path), _error(error))
        raise
    _write(Path(answer_path), answer)


def _value(fn: Any, value: Any) -> bytes:
    try:
        return dump((value, None, ()))
    except Exception as error:
        raise TypeError(
            explain(
                f"{fn!r} has returned a {type(value).__name__} that cannot be sent to the client: "
                f"{error}",
                expected="a value that can be pickled.",
                fix="return arrays and plain Python values.",
            )
        ) from error


def _error(error: Exception) -> bytes:
    """With the exception itself only if it survives the way."""
    lines = tuple("".join(traceback.format_exception(error)).splitlines())
    with contextlib.suppress(Exception):  # an object's own reduction may raise anything
        whole = dump((None, error, lines))
        load_pickled(whole)
        return whole
    return dump((None, None, lines))


def _write(path: Path, content: bytes) -> None:
    """At once or not at all: a task can be killed at any time."""
    part = path.with_suffix(".part")
    part.write_bytes(content)
    os.replace(part, path)


if __name__ == "__main__":
    main(sys.argv[1])
