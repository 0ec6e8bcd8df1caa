"""Checkpoints: saving, restoring, retention policies, and saving before preemption.

`__init__.pyi` lists the public names. Each is loaded at its first use, so that the storage process,
below this package, starts without JAX and Keras.
"""

from __future__ import annotations

import typing  # `Any` is a public name here

from stratagem import listed_names, load_name


def __getattr__(name: str) -> typing.Any:
    return load_name(__name__, __file__, name)


def __dir__() -> list[str]:
    return listed_names(__name__, __file__)
