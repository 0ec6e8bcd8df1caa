"""Loading of optional libraries, with an error that names the pip extra."""

from __future__ import annotations

import importlib
from typing import Any

from stratagem.messages import explain


def load(module: str, *, needed_by: str, install: str) -> Any:
    """Imports a module; raises ImportError with `needed_by` and the command to `install` it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            explain(
                f"{needed_by} needs {module}, which cannot be imported: {error}",
                expected="the library to be installed on this machine.",
                fix=f"pip install {install}",
            )
        ) from error
