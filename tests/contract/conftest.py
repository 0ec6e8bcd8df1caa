"""Every test here runs on every row of `rows.py`, and what runs replica functions in both ways."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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


# The one row that runs on other versions, by the fixture that gives it.
_ON_OTHER_VERSIONS = {
    "strategy": "mirrored_2",
    "distributing": "mirrored_2",
    "copyable": "mirrored_2",
    "sole": "default",
}


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks rows as slow that are not `quick`, and leaves one to the compatibility tests."""
    for item in items:
        if not isinstance(item, pytest.Function) or item.path.parent != Path(__file__).parent:
            continue
        params = item.callspec.params if hasattr(item, "callspec") else {}
        execution = params.get("execution", "compiled")
        for fixture in _ON_OTHER_VERSIONS.keys() & params.keys():
            row = ROWS.get(params[fixture])  # None where no row has what the fixture asks for
            if row is not None and execution not in row.quick:
                item.add_marker(pytest.mark.slow)
            if (params[fixture], execution) != (_ON_OTHER_VERSIONS[fixture], "compiled"):
                kept = [mark for mark in item.own_markers if mark.name != "compatibility"]
                item.own_markers[:] = kept
