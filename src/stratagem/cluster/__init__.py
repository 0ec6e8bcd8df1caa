"""Cluster specifications, task roles, and resolvers that detect them. Loads no JAX.

`__init__.pyi` lists the public names. Each is loaded at its first use.
"""

from __future__ import annotations

from typing import Any

from stratagem import load_name, public_names


def __getattr__(name: str) -> Any:
    return load_name(__name__, __file__, name)


def __dir__() -> list[str]:
    return sorted(public_names(__file__))
