"""Estimators: training, evaluation and export of a model function under any strategy.

`__init__.pyi` lists the public names. Each is loaded at its first use.
"""

from __future__ import annotations

import typing

from stratagem import listed_names, load_name


def __getattr__(name: str) -> typing.Any:
    return load_name(__name__, __file__, name)


def __dir__() -> list[str]:
    return listed_names(__name__, __file__)
