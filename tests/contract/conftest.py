"""Every test here runs on every row of `rows.py`, and what runs replica functions in both ways."""

from __future__ import annotations

import re
from collections.abc import Iterator

import jax
import pytest

import stratagem as sg
from tests.contract.rows import ROWS

_ABOUT_PLACES = ("test_members",)
_ENOUGH_FOR_CHIPS = ("test_members.py", "test_run.py")


@pytest.fixture(params=ROWS)
def strategy(request: pytest.FixtureRequest) -> sg.Strategy:
    """Each strategy in turn."""
    return ROWS[request.param].make()


@pytest.fixture(params=[name for name, row in ROWS.items() if row.num_replicas > 1])
def distributing(request: pytest.FixtureRequest) -> sg.Strategy:
    """Each strategy that has several replicas, for rules that one replica is exempt from."""
    return ROWS[request.param].make()


@pytest.fixture(params=[name for name, row in ROWS.items() if row.num_replicas == 1])
def sole(request: pytest.FixtureRequest) -> sg.Strategy:
    """Each strategy that has one replica."""
    return ROWS[request.param].make()


@pytest.fixture(params=[name for name, row in ROWS.items() if not row.is_cluster])
def copyable(request: pytest.FixtureRequest) -> sg.Strategy:
    """Each strategy of one process: those of a cluster cannot be copied."""
    return ROWS[request.param].make()


@pytest.fixture
def foreign() -> sg.Strategy:
    """A strategy that is none of those under test."""
    return sg.OneDeviceStrategy(jax.local_device_count() - 1)


@pytest.fixture(params=["compiled", "eager"])
def execution(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both ways to run a replica function; they give the same numbers."""
    sg.config.run_eagerly(request.param == "eager")
    yield request.param
    sg.config.run_eagerly(False)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves what is run op by op on one replica, and on eight, to the slow tests.

    Eight take ten times as long as two; one mirrored replica is as one device. Replicas of several
    devices run the program of one device each, but for where arrays lie: a few files tell that.
    Chips differ from mirrored replicas in how they are found only.
    """
    for item in items:
        parameters = (
            item.callspec.params
            if isinstance(item, pytest.Function) and hasattr(item, "callspec")
            else {}
        )
        names = {parameters.get("strategy"), parameters.get("distributing")}
        is_eager = parameters.get("execution") == "eager"
        if is_eager and names & {"mirrored_1", "mirrored_8", "central_2"}:
            item.add_marker(pytest.mark.slow)
        rows = [ROWS.get(name) for name in parameters.values() if isinstance(name, str)]
        if any(row is not None and row.is_slow for row in rows):
            item.add_marker(pytest.mark.slow)
        told = "-".join(str(one) for one in parameters.values())
        is_fast = item.path.stem in _ABOUT_PLACES and "logical_2x2" in told and "eager" not in told
        if "logical" in told and not is_fast:
            item.add_marker(pytest.mark.slow)
        is_short = item.path.name in _ENOUGH_FOR_CHIPS and parameters.get("execution") != "eager"
        if "tpu_2" in re.split(r"[\[\]-]", item.name) and not is_short:
            item.add_marker(pytest.mark.slow)
