"""Both ways to run a replica function, as in the contract suite, and a strategy."""

from __future__ import annotations

import pytest

import stratagem as sg
from tests.contract.conftest import execution

__all__ = ["execution"]


@pytest.fixture
def pair() -> sg.Strategy:
    """A new strategy with two replicas."""
    return sg.MirroredStrategy(["cpu:0", "cpu:1"])
