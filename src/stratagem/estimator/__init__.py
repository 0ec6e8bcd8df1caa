"""Estimators: training, evaluation and export of a model function under any strategy.

`__init__.pyi` lists the public names. Each is loaded at its first use.
"""

from __future__ import annotations

import typing

from stratagem import load_name, public_names


def __getattr__(name: str) -> typing.Any:
    return load_name(__name__, __file__, name)


def __dir__() -> list[str]:
    return sorted(public_names(__file__))
