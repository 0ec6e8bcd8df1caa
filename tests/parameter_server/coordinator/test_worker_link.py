"""Threads of the coordinator that keep one worker busy."""

from __future__ import annotations

from typing import Any

import pytest

from stratagem.parameter_server.coordinator.worker_link import WorkerLink
from tests.parameter_server.clusters import coordinated


def test_counts_that_cannot_be_added_are_an_error_of_the_function(monkeypatch) -> None:
    def fail(link: WorkerLink, numbers: Any, counted: Any) -> None:
        raise MemoryError("counts of a metric")

    with coordinated() as coordinator:
        with monkeypatch.context() as patched:
            patched.setattr(WorkerLink, "_count", fail)
            coordinator.schedule(lambda: 1)
            with pytest.raises(MemoryError, match="counts of a metric"):
                assert coordinator.wait(30.0)
        assert coordinator.fetch(coordinator.schedule(lambda: 2)) == 2
