"""Each source reads its batches in order, epoch by epoch, and can be resumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import grain
import numpy as np
import pytest

from stratagem.input.sources.adapters import as_source, batched_source
from stratagem.input.sources.source import UNKNOWN_CARDINALITY, Source
from tests.unit.input.sources.batches import Batches, values_of


class _Resumable:
    """An iterator with the state methods of other libraries."""

    def __init__(self, names: tuple[str, str]) -> None:
        self._next = 0
        setattr(self, names[0], lambda: {"next": self._next})
        setattr(self, names[1], self._go_to)

    def _go_to(self, state: dict[str, int]) -> None:
        self._next = state["next"]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._next == 80:
            raise StopIteration
        self._next += 1
        return np.full(2, self._next)


class _LoaderWithState:
    """An iterable with its own state, like torchdata's StatefulDataLoader and Hugging Face."""

    def __init__(self) -> None:
        self._next = 0

    def __iter__(self) -> Iterator[Any]:
        while self._next < 6:
            self._next += 1
            yield np.full(2, self._next)
        self._next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


def _grain(*, shuffle: bool) -> Source:
    dataset = grain.MapDataset.source(np.arange(10))
    return as_source((dataset.shuffle(3) if shuffle else dataset).batch(3))


_OPTIONS = {"batch_size": 3, "seed": 1, "drop_remainder": False}
_RESUMABLE: dict[str, Callable[[], Source]] = {
    "arrays": lambda: batched_source((np.arange(10), np.ones(10)), shuffle=False, **_OPTIONS),
    "arrays, shuffled": lambda: batched_source(np.arange(10), shuffle=True, **_OPTIONS),
    "list": lambda: as_source([np.arange(3), np.arange(2), np.arange(1)]),
    "PyDataset": lambda: as_source(Batches()),
    "PyDataset, threads": lambda: as_source(Batches(workers=2, max_queue_size=3)),
    "grain.MapDataset": lambda: _grain(shuffle=False),
    "grain.MapDataset, shuffled": lambda: _grain(shuffle=True),
    "grain.MapDataset, batched here": lambda: batched_source(
        grain.MapDataset.source(np.arange(10)), shuffle=True, **_OPTIONS
    ),
    "grain.IterDataset": lambda: as_source(
        grain.MapDataset.source(np.arange(200)).shuffle(1).to_iter_dataset().batch(4)
    ),
    "get_state": lambda: as_source(_Resumable(("get_state", "set_state"))),
    "state_dict": lambda: as_source(_Resumable(("state_dict", "load_state_dict"))),
    "state_dict of the iterable": lambda: as_source(_LoaderWithState()),
}


@pytest.mark.parametrize("name", _RESUMABLE)
def test_reader_resumes_from_another_one(name: str) -> None:
    expected = values_of(_RESUMABLE[name]().open(2))
    assert len(expected) >= 3
    for num_read in (0, 1, len(expected) - 1, len(expected)):
        first = _RESUMABLE[name]().open(2)
        assert values_of(next(first) for _ in range(num_read)) == expected[:num_read]
        state = json.loads(json.dumps(first.state()))
        first.close()
        again = _RESUMABLE[name]().open(2)
        again.restore(state)
        assert values_of(again) == expected[num_read:]
        again.close()


@pytest.mark.parametrize(
    "name", ["arrays, shuffled", "grain.MapDataset, shuffled", "grain.MapDataset, batched here"]
)
def test_each_epoch_has_an_order_of_its_own(name: str) -> None:
    source = _RESUMABLE[name]()
    orders = [[n for batch in source.open(epoch) for n in batch.tolist()] for epoch in range(3)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    again = _RESUMABLE[name]()
    assert [n for batch in again.open(1) for n in batch.tolist()] == orders[1]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("arrays", 4),
        ("list", 3),
        ("PyDataset", 4),
        ("grain.MapDataset", 4),
        ("grain.IterDataset", UNKNOWN_CARDINALITY),
        ("state_dict", UNKNOWN_CARDINALITY),
    ],
)
def test_known_cardinality(name: str, expected: int) -> None:
    assert _RESUMABLE[name]().cardinality == expected
