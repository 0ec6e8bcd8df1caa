"""Objects that forked processes serve in the tests."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np


class Noted:
    """Tells about its process in its address, and leaves a file when it is closed.

    Args:
        folder: of the file; None for none.
    """

    def __init__(self, folder: str | None = None) -> None:
        self._folder = folder
        print("made", flush=True)
        self.address = json.dumps(
            {
                "parent": os.getppid(),
                "modules": sorted({"colorsys", "numpy"} & set(sys.modules)),
                "variable": os.environ.get("SERVED_OBJECTS"),
                "numbers": np.random.rand(2).tolist(),
            }
        )

    def close(self) -> None:
        if self._folder is None:
            raise LookupError("nowhere to leave a file")
        Path(self._folder, "closed").write_text(str(os.getpid()))


def serve(folder: str | None = None) -> Noted:
    return Noted(folder)


def serve_nothing() -> Any:
    raise LookupError("nothing to serve")


def end(code: int) -> Any:
    os._exit(code)
