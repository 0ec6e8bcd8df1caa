"""Keys of a cluster."""

from __future__ import annotations

import pytest

from stratagem.group.transport.endpoints import ClusterKeys


@pytest.fixture(scope="session")
def keys() -> ClusterKeys:
    return ClusterKeys.make()
