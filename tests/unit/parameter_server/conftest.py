"""Clusters for the tests of one file: of threads, and of Ray on this machine."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import pytest

with contextlib.suppress(ImportError):  # tests without Ray run where it is missing
    import ray  # noqa: F401 - sets a variable of its own, once, before any test

from stratagem.launch.remote.ray_cluster import RayCluster
from stratagem.parameter_server.coordinator.cluster_coordinator import ClusterCoordinator
from tests.unit.parameter_server import shared_with_workers
from tests.unit.parameter_server.clusters import coordinated

# What Ray or we set for this process when it is connected.
_VARIABLES = (
    "RAY_ADDRESS",
    "RAY_AUTH_MODE",
    "RAY_COLOR_PREFIX",
    "RAY_DEDUP_LOGS",
    "RAY_FLUSH_DRIVER_LOGS",
    "RAY_SCHEDULER_EVENTS",
    "RAY_USAGE_STATS_ENABLED",
)


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    """Starts Ray once; no file in the home folder is read or written for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
        for name in _VARIABLES:
            patch.setenv(name, "")  # so that what is set meanwhile is gone again at the end
            patch.delenv(name)
        with warnings.catch_warnings():
            # Ray forks, and runs a line of Python before exec. JAX warns of that when it runs.
            warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")
            cluster = RayCluster(num_processes=2)
            cluster.wait()
        with cluster:
            yield cluster


@pytest.fixture(scope="module")
def coordinator() -> Iterator[ClusterCoordinator]:
    """Of three workers, which are threads."""
    with coordinated(num_workers=3) as made:
        yield made


@pytest.fixture
def nothing_shared() -> None:
    """Forgets what other tests have shared with workers."""
    shared_with_workers.forget()
