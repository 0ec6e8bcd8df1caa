"""Clusters in one process, which end with their test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stratagem.cluster.addresses import free_ports
from stratagem.group.elastic.group import ElasticGroup
from tests.unit.group.elastic.members import Cluster


@pytest.fixture
def make_cluster() -> Iterator[Callable[..., Cluster]]:
    """Returns a cluster of a number of processes, of which none has started."""
    with contextlib.ExitStack() as clusters:

        def make(count: int, **options: Any) -> Cluster:
            return clusters.enter_context(Cluster(free_ports(count), **options))

        yield make


@pytest.fixture
def members(make_cluster) -> list[ElasticGroup]:
    """Returns three members that have started."""
    return make_cluster(3).started(3)
