"""Processes that read different data ahead of their programs and leave it early."""

from __future__ import annotations

import functools
import itertools
import re
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from stratagem.errors import InvalidArgumentError
from stratagem.group.member import Group
from stratagem.group.verdict import GroupLimits
from stratagem.input import distributed as size_exchange
from stratagem.input.batches import HostBatch, join_parts
from stratagem.input.iterator import Prefetcher
from stratagem.input.loader import Loader
from stratagem.input.sources.adapters import as_source
from tests.unit.group.process_group.members import joined, together

_LIMITS = GroupLimits(join_s=120, peer_s=120, stuck_s=600, barrier_s=120)
_ALONE: Any = types.SimpleNamespace(num_local_replicas=1, processes_of_inputs=((0,), (1,)))
_TOGETHER: Any = types.SimpleNamespace(num_local_replicas=1, processes_of_inputs=((0, 1),))
# Process 0 reads so far ahead that it waits for what process 1 never reads.
_BUFFERS = (3, 1)


@pytest.fixture
def members() -> Iterator[list[Group]]:
    groups = joined(2, _LIMITS)
    yield groups
    for group in groups:
        group.abandon()


@pytest.fixture
def prefetchers(members, monkeypatch) -> list[Prefetcher]:
    """Prefetchers of both processes, each with its own 50 batches."""
    both = []
    for index, member in enumerate(members):
        monkeypatch.setattr(size_exchange, "current_group", lambda member=member: member)
        reading = size_exchange.SynchronizedReading(
            "dataset 0 (1)", _ALONE, lambda reader: join_parts([next(reader)])
        )
        reader = as_source([np.full(1 + index, step) for step in range(50)]).open(0)
        both.append(
            Prefetcher(
                lambda reading=reading, reader=reader: reading.next(reader),
                _BUFFERS[index],
                reading.give_up,
            )
        )
    return both


def _lengths(batch: HostBatch) -> Any:
    return batch.all_lengths


def test_both_know_the_sizes_of_both(prefetchers) -> None:
    taken = together(2, lambda i: [_lengths(prefetchers[i].take()) for _ in range(5)])
    assert taken == [[(1, 2)] * 5] * 2
    together(2, lambda i: prefetchers[i].close())


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_loop_that_both_leave_early_ends_at_once(prefetchers, members, order) -> None:
    taken = together(2, lambda i: [_lengths(prefetchers[i].take()) for _ in range(2)])
    assert taken == [[(1, 2)] * 2] * 2
    for index in order:
        prefetchers[index].close()  # waits for its thread
    assert together(2, lambda i: members[i].exchange("after", i)) == [[0, 1]] * 2


def test_loop_closed_by_one_process_raises_when_the_other_needs_a_batch(
    prefetchers, monkeypatch
) -> None:
    monkeypatch.setattr("stratagem.group.member._ERROR_REPORT_S", 0.05)
    together(2, lambda i: prefetchers[i].take())
    prefetchers[1].close()

    def go_on() -> None:
        for step in itertools.count(1):
            assert prefetchers[0].take().arrays[0].tolist() == [step, step]  # padded

    with pytest.raises(RuntimeError, match=r"left the loop over dataset 0 \(1\), but worker"):
        go_on()


def test_batches_on_the_host_are_given_up_when_they_are_left() -> None:
    given_up: list[bool] = []
    reader = as_source([np.arange(2)] * 3).open(0)
    loader = Loader(
        reader,
        lambda reader: join_parts([next(reader)]),
        None,  # nothing moves
        to_device=False,
        give_up=lambda: given_up.append(True),
    )
    batches = loader.host_batches()
    next(batches)
    assert not given_up
    batches.close()
    assert given_up == [True]


@pytest.mark.parametrize("num_other", [3, 4, None])
def test_processes_of_one_replica_read_the_same(num_other, members, monkeypatch) -> None:
    readers = []
    for member, count in zip(members, (3, num_other), strict=True):
        monkeypatch.setattr(size_exchange, "current_group", lambda member=member: member)
        source = as_source([np.zeros(2)] if count is None else [np.zeros(2), np.zeros(count)])
        reading = size_exchange.SynchronizedReading(
            "dataset 0 (1)", _TOGETHER, lambda reader: join_parts([next(reader)])
        )
        readers.append(functools.partial(reading.next, source.open(0)))
    together(2, lambda i: readers[i]())
    if num_other == 3:
        assert together(2, lambda i: readers[i]().all_lengths) == [None, None]
        return
    other = "no batch" if num_other is None else "a batch of 4 examples a replica"
    for error in together(2, lambda i: readers[i]()):
        assert isinstance(error, InvalidArgumentError)
        assert re.search(f"3 examples a replica of dataset 0 .*, and .* {other}", str(error))
