"""Every test here runs on every row of `rows.py`, and what runs replica functions in both ways."""

from __future__ import annotations

import re
from collections.abc import Iterator

import jax
import pytest

import stratagem as sg
from tests.contract.rows import ROWS


@pytest.fixture(params=ROWS)
def strategy(request: pytest.FixtureRequest) -> Iterator[sg.Strategy]:
    """Each strategy in turn."""
    with ROWS[request.param].made() as strategy:
        yield strategy


@pytest.fixture(params=[name for name, row in ROWS.items() if row.num_replicas > 1])
def distributing(request: pytest.FixtureRequest) -> Iterator[sg.Strategy]:
    """Each strategy that has several replicas, for rules that one replica is exempt from."""
    with ROWS[request.param].made() as strategy:
        yield strategy


@pytest.fixture(params=[name for name, row in ROWS.items() if row.num_replicas == 1])
def sole(request: pytest.FixtureRequest) -> Iterator[sg.Strategy]:
    """Each strategy that has one replica."""
    with ROWS[request.param].made() as strategy:
        yield strategy


@pytest.fixture(params=[name for name, row in ROWS.items() if not row.is_cluster])
def copyable(request: pytest.FixtureRequest) -> sg.Strategy:
    """Each strategy of one process: those of a cluster cannot be copied."""
    return ROWS[request.param].make()


@pytest.fixture
def foreign() -> sg.Strategy:
    """A strategy that is none of those under test."""
    return sg.OneDeviceStrategy(jax.local_devices(backend="cpu")[-1])


@pytest.fixture(params=["compiled", "eager"])
def execution(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both ways to run a replica function; they give the same numbers."""
    sg.config.run_eagerly(request.param == "eager")
    yield request.param
    sg.config.run_eagerly(False)


# Many steps of a call are single steps in a loop when they run op by op; other tests run those.
_SLOW_WHEN_EAGER = {
    "test_many_steps_a_call_are_as_many_calls",
    "test_rows_of_many_steps_are_true_rows",
}


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves to the slow tests what tells of a row only what is told of another one already."""
    for item in items:
        words = re.split(r"[\[\]-]", item.name)
        if "eager" in words and words[0] in _SLOW_WHEN_EAGER:
            item.add_marker(pytest.mark.slow)
        for row in (ROWS[word] for word in words if word in ROWS):
            is_told = row.told_by is None or item.path.stem in row.told_by
            runs_eagerly = row.told_by is None and row.runs_eagerly
            if not is_told or ("eager" in words and not runs_eagerly):
                item.add_marker(pytest.mark.slow)
