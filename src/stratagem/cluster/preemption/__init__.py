"""Preemption notices: sources in this process, and what to do after one. Loads no JAX.

`__init__.pyi` lists the public names. Each is loaded at its first use.
"""

from __future__ import annotations

from typing import Any

from stratagem import listed_names, load_name


def __getattr__(name: str) -> Any:
    return load_name(__name__, __file__, name)


def __dir__() -> list[str]:
    return listed_names(__name__, __file__)
