"""Syntax trees of the whole repository, hidden from the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def trees_are_hidden() -> Iterator[None]:
    """They stay, and are millions of objects: each full collection after them takes seconds."""
    yield
    gc.collect()
    gc.freeze()
