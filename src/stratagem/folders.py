"""`checked_folder`: the folder of an argument."""

from __future__ import annotations

import os

from stratagem.messages import explain

__all__ = ["checked_folder"]


def checked_folder(name: str, folder: str | os.PathLike[str]) -> str:
    """Returns a folder's path; raises ValueError if it is empty, as an unset variable is.

    `name` is the argument's name for the message.
    """
    path = os.fspath(folder)
    if not path:
        raise ValueError(
            explain(
                f"{name}={folder!r} is empty.",
                expected="the path of a folder.",
                fix='pass a path; "." is the current folder.',
            )
        )
    return path
