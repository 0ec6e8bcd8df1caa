"""Libraries that only some parts use, loaded when they do."""

from __future__ import annotations

import importlib
from typing import Any

from stratagem.messages import explain

__all__ = ["load"]


def load(module: str, *, needed_by: str, install: str) -> Any:
    """Returns a module of a library that an installation may lack.

    Args:
        module: its full name.
        needed_by: who asks for it.
        install: the arguments of `pip install` that bring it.

    Returns:
        The module.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            explain(
                f"{needed_by} needs {module}, which cannot be imported: {error}",
                expected="the library to be installed where this runs.",
                fix=f"pip install {install}",
            )
        ) from error
