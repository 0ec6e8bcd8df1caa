"""Objects of Keras whose private names may be used."""

from __future__ import annotations

from typing import Any


def as_open(owner: object) -> Any:
    """Returns an object of Keras as one whose private names may be used."""
    return owner
