"""A cluster for the tests of one file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stratagem.parameter_server.coordinator.cluster_coordinator import ClusterCoordinator
from stratagem.parameter_server.strategy import ParameterServerStrategy
from tests.unit.parameter_server.clusters import coordinated


@pytest.fixture(scope="module")
def coordinator() -> Iterator[ClusterCoordinator]:
    """Of two workers and two servers."""
    with coordinated(num_workers=2) as made:
        yield made


@pytest.fixture
def strategy(coordinator: ClusterCoordinator) -> ParameterServerStrategy:
    """The strategy of that cluster."""
    return coordinator.strategy
