"""Both ways to run a replica function."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import stratagem as sg


@pytest.fixture(params=["compiled", "eager"])
def execution(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test with compiled replica functions and once more op by op."""
    sg.config.run_eagerly(request.param == "eager")
    yield request.param
    sg.config.run_eagerly(False)
