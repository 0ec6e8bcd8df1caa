"""Keeps scikit-learn and Matplotlib out of processes that only import Keras.

Keras imports both where they are installed, for wrappers and pictures. That is a third of the start
of a process, and tests start hundreds. The Makefile puts this folder on `PYTHONPATH`. A program
that imports one of them itself gets it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

_OPTIONAL = frozenset({"matplotlib", "sklearn"})


class _AbsentForKeras:
    """Finds no optional library as long as the import of Keras lasts."""

    @staticmethod
    def find_spec(
        name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> None:
        keras = sys.modules.get("keras") if name in _OPTIONAL else None
        if keras is not None and getattr(keras.__spec__, "_initializing", False):
            raise ModuleNotFoundError(f"{name} is left out while Keras is imported", name=name)


sys.meta_path.insert(0, _AbsentForKeras)
