"""Limits of what is fetched from near and far workers."""

from __future__ import annotations

import threading
import time
from typing import Any
from unittest import mock

import numpy as np
import pytest

import stratagem as sg
from stratagem.input.service.client import FreeFetching, _Workers
from tests.unit.input.service.servers import LIMIT_S, input_servers


class Workers:
    """Workers of which some are on other machines."""

    def keep(self, addresses: Any) -> None:
        pass

    def is_far(self, name: str) -> bool:
        return name.startswith("far")


@pytest.mark.parametrize(
    ("live", "parts"),
    [
        (("near", "far"), {"near": 1.0, "far": 0.5}),
        (("far", "farther"), {"far": 1.0, "farther": 1.0}),
        (("near",), {"near": 1.0}),
    ],
)
def test_workers_of_other_machines_leave_room_for_near_ones(live, parts) -> None:
    fetching = FreeFetching(mock.Mock(wanted=mock.Mock(most_ahead=None)))
    fetching._workers = Workers()
    stop = threading.Event()
    for name in live:
        fetching._threads[name] = threading.Thread(target=stop.wait)
        fetching._threads[name].start()
    assert {name: fetching._part_of(name) for name in live} == parts
    stop.set()
    for thread in fetching._threads.values():
        thread.join()
    # The near ones have no more batches.
    assert all(fetching._part_of(name) == 1.0 for name in live)


def test_batches_of_far_workers_are_not_left_behind(monkeypatch) -> None:
    with input_servers(2) as servers:
        monkeypatch.setattr(_Workers, "is_far", lambda self, name: name == min(self._connections))
        dataset = sg.input.Dataset(np.arange(300), batch_size=1)
        batches = list(servers.distribute(dataset, exactly_once=True))
        assert sorted(batch.item() for batch in batches) == list(range(300))


def test_end_of_a_job_comes_while_another_consumer_takes_nothing() -> None:
    """Processes in lockstep wait for each other, also for what one of them has fetched ahead."""
    with input_servers(1) as servers:
        dataset = sg.input.Dataset(np.arange(3), batch_size=1)
        options = {"job_name": "few batches", "max_outstanding_requests": 2}
        first, second = (
            servers.distribute(dataset, exactly_once=True, **options).as_source().open(0)
            for _ in range(2)
        )
        taken = [next(first).item()]
        deadline_s = time.monotonic() + LIMIT_S
        while len(first._consumer._queue) < 2:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert list(second) == []
        taken += [batch.item() for batch in first]
        assert sorted(taken) == [0, 1, 2]
