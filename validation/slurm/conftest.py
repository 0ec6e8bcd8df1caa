"""Tests on a Slurm cluster, of `make test-external NAME=slurm`. Elsewhere not collected."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from validation.slurm.cluster import Cluster

# Set by `python -m validation.slurm`.
_FOLDER = os.environ.get("SLURM_TESTS_FOLDER")
_OUTSIDE = os.environ.get("SLURM_TESTS_OUTSIDE", "")

if _FOLDER is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str | None:
    """Says what is missing where this folder is asked for by name."""
    if _FOLDER is not None:
        return None
    return "validation/slurm needs namespaces and Slurm: run `make test-external NAME=slurm`"


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    assert _FOLDER is not None
    made = Cluster(Path(_FOLDER), _OUTSIDE)
    yield made
    made.close()


@pytest.fixture
def new_folder(cluster: Cluster) -> Callable[[str], Path]:
    """Makes folders that all nodes share."""

    def make(name: str) -> Path:
        folder = cluster.home / name
        folder.mkdir()
        return folder

    return make
