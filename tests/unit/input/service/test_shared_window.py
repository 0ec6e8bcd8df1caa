"""Windows that trainers share: against a simple replay, and with servers."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stratagem as sg
from stratagem.group.transport.wire import Message
from stratagem.input.service.job import NumberRanges
from stratagem.input.service.job_requests import HeldSplit, PackedBatch, SharedWindow
from tests.unit.input.service.servers import input_servers

_MOST_BYTES, _MOST_AHEAD = 100, 5
_SILENCE_MS = 30_000  # Nothing is killed here, and the machine may be busy.


def _batch(number: int, num_bytes: int, split: int = 0) -> PackedBatch:
    held = HeldSplit(split, 0, NumberRanges(), False)
    return PackedBatch(held, number, Message("batch", {}, [np.zeros(num_bytes, np.uint8)]))


class _Replay:
    """The rules of a window, with lists of all batches that were ever read."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.first = 0
        self.places: dict[str, int] = {}
        self.front = 0

    def has_room(self) -> bool:
        ahead = self.sizes[self.front :]
        return not ahead or (len(ahead) < _MOST_AHEAD and sum(ahead) < _MOST_BYTES / 2)

    def add(self, size: int) -> None:
        self.sizes.append(size)
        while sum(self.sizes[self.first :]) > _MOST_BYTES and self.first < self.front:
            self.first += 1

    def next(self, trainer: str) -> int | None:
        place = max(self.places.get(trainer, 0), self.first)
        self.places[trainer] = place
        if place == len(self.sizes):
            return None
        self.places[trainer] += 1
        self.front = max(self.front, place + 1)
        return place


@given(st.lists(st.one_of(st.integers(0, 120), st.sampled_from("abc")), max_size=80))
def test_window_follows_the_rules(events) -> None:
    """Numbers are sizes of batches that are read, letters are trainers that ask."""
    window, replay = SharedWindow(_MOST_BYTES, _MOST_AHEAD), _Replay()
    for event in events:
        assert window.has_room == replay.has_room()
        if isinstance(event, str):
            found = window.next(event)
            assert (None if found is None else found.index) == replay.next(event)
        elif replay.has_room():
            window.add(_batch(len(replay.sizes), event))
            replay.add(event)
            # No larger than allowed, unless the batches ahead of all trainers alone are.
            assert window.num_bytes <= max(_MOST_BYTES, sum(replay.sizes[replay.front :]))
        assert window.num_bytes == sum(replay.sizes[replay.first :])


def test_batches_of_a_lost_split_are_not_handed_out() -> None:
    window = SharedWindow(_MOST_BYTES, 100)
    batches = [_batch(number, 1, split=number % 2) for number in range(8)]
    held = [batches[0].held, batches[1].held]
    for batch in batches:
        window.add(PackedBatch(held[batch.index % 2], batch.index, batch.message))
    assert [window.next("a").index for _ in range(3)] == [0, 1, 2]  # type: ignore[union-attr]
    window.remove(held[1])
    assert window.num_bytes == 4
    assert [window.next("a").index for _ in range(2)] == [4, 6]  # type: ignore[union-attr]
    assert window.next("a") is None
    assert window.has_room
    assert [window.next("b").index for _ in range(4)] == [0, 2, 4, 6]  # type: ignore[union-attr]


_reads: list[int] = []


def _endless() -> Any:
    for number in itertools.count():
        _reads.append(number)
        yield np.full(1000, number, np.int32)


def _trainer(servers: Any, name: str, dataset: Any = None) -> Any:
    if dataset is None:
        dataset = sg.input.Dataset.from_generator(_endless).repeat()
    cache = sg.input.service.CrossTrainerCache(name)
    return iter(servers.distribute(dataset, job_name="sweep", cross_trainer_cache=cache))


def _numbers(batches: Any, count: int) -> list[int]:
    return [int(batch[0]) for batch in itertools.islice(batches, count)]


def test_trainers_get_all_batches_and_the_data_are_read_once() -> None:
    _reads.clear()
    found: dict[str, list[int]] = {}
    with input_servers(1, worker_timeout_ms=_SILENCE_MS) as servers:
        trainers = {name: _trainer(servers, name) for name in ("slow", "fast")}

        def train(name: str) -> None:
            found[name] = _numbers(trainers[name], 300)

        threads = [threading.Thread(target=train, args=(name,)) for name in trainers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for batches in trainers.values():
            batches.close()
    assert found["slow"] == found["fast"] == [*range(300)]
    assert len(set(_reads)) == len(_reads) <= 350


def test_late_trainer_begins_at_the_oldest_batch_of_a_full_window() -> None:
    with input_servers(0, worker_timeout_ms=_SILENCE_MS) as servers:
        servers.workers.append(servers.add_worker(cross_trainer_cache_bytes=40_000))
        early = _trainer(servers, "early")
        assert _numbers(early, 100) == [*range(100)]
        late = _trainer(servers, "late")
        found = _numbers(late, 20)
        # The window has ten batches of 4 KB, of which at most half are ahead of the first trainer.
        assert 90 <= found[0] <= 110
        assert found == [*range(found[0], found[0] + 20)]
        assert len(_reads) < 2000
        # The other one was not stopped meanwhile, and may have missed some.
        rest = _numbers(early, 20)
        assert rest == sorted(set(rest))
        assert rest[0] >= 100
        # A position names no batch of a window, and stays small.
        assert len(str(late.state())) < 1000
        early.close()
        late.close()


def test_consumers_of_one_trainer_divide_its_batches() -> None:
    with input_servers(1, worker_timeout_ms=_SILENCE_MS) as servers:
        one, other, alone = (_trainer(servers, name) for name in ("a", "a", "b"))
        assert _numbers(alone, 60) == [*range(60)]
        found = [_numbers(one, 1)[0], _numbers(other, 1)[0]]
        for _ in range(20):
            found += [*_numbers(one, 1), *_numbers(other, 1)]
        assert len(set(found)) == len(found)
        for batches in (one, other, alone):
            batches.close()


def test_trainer_that_resumes_joins_the_others() -> None:
    with input_servers(1, worker_timeout_ms=_SILENCE_MS) as servers:
        one, other = _trainer(servers, "one"), _trainer(servers, "other")
        assert _numbers(one, 10) == _numbers(other, 10)
        state = one.state()
        one.close()
        again = _trainer(servers, "one")
        again.restore(state)
        # It had batches fetched ahead, which are not handed out again.
        assert _numbers(again, 1)[0] >= 10
        assert _numbers(other, 10) == [*range(10, 20)]
        again.close()
        other.close()


def test_options_that_do_not_fit_are_refused() -> None:
    service = sg.input.service
    cache = service.CrossTrainerCache("a")
    for options in (
        {},
        {"job_name": "j", "exactly_once": True},
        {"job_name": "j", "consumer_index": 0, "num_consumers": 2},
    ):
        with pytest.raises(ValueError, match="CrossTrainerCache was passed with job_name"):
            service.distribute("distributed_epoch", "h:1", cross_trainer_cache=cache, **options)
    with pytest.raises(ValueError, match="CrossTrainerCache received trainer_id=''"):
        service.CrossTrainerCache("")
    with input_servers(1, worker_timeout_ms=_SILENCE_MS) as servers:
        dataset = sg.input.Dataset(np.arange(4), batch_size=2)
        with pytest.raises(ValueError, match="CrossTrainerCache was passed with a dataset that"):
            _trainer(servers, "a", dataset)
        name = service.register_dataset(servers.target, dataset)
        registered = service.from_dataset_id(
            "distributed_epoch", servers.target, name, job_name="j", cross_trainer_cache=cache
        )
        with pytest.raises(ValueError, match="CrossTrainerCache was passed with a dataset that"):
            next(iter(registered))
        batches = _trainer(servers, "a", dataset.repeat())
        next(batches)
        alone = servers.distribute(dataset.repeat(), job_name="sweep")
        with pytest.raises(ValueError, match="asked for the job 'sweep' with"):
            next(iter(alone))
        batches.close()
