"""Windows that trainers share: against a simple replay, and with servers."""

from __future__ import annotations

import collections
import itertools
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stratagem as sg
from stratagem.group.transport.wire import Message
from stratagem.input.service.job import EVERY_NUMBER, NumberRanges, ServiceJob
from stratagem.input.service.job_requests import HeldSplit, PackedBatch, SharedWindow
from tests.unit.input.service.servers import input_servers
from tests.unit.input.service.simulated_job import SimulatedJob

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


# The state of a job: tables of decisions, and a ledger of each batch under random kills.


def _take(job: ServiceJob, worker: str, holding: dict[int, int] | None = None, **options):
    records, split = job.next_split(worker, holding or {}, **options)
    for record in records:
        job.apply(record)
    return None if split is None else (split["split"], split["attempt"])


def _apply(job: ServiceJob, records) -> None:
    for record in records:
        job.apply(record)


def _lost_job(**options) -> ServiceJob:
    """A job of two splits whose consumer c has batch 0 of split 0, which worker a lost."""
    job = ServiceJob(2, **options)
    job.apply({"what": "join", "consumer": "c"})
    assert _take(job, "a") == (0, 0)
    _apply(job, job.lose_worker("a"))
    return job


@pytest.mark.parametrize("seed", range(30))
def test_repeatable_data_are_visited_exactly_once_whatever_is_killed(seed) -> None:
    lengths = [3, 0, 5, 1, 8, 2, 2, 4]
    simulated = SimulatedJob(seed, lengths)
    simulated.run()
    expected = {(split, index): 1 for split, n in enumerate(lengths) for index in range(n)}
    assert simulated.ledger == expected
    assert simulated.job.num_lost == 0


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("is_repeatable", [True, False])
def test_no_batch_is_visited_twice_even_if_consumers_are_lost_too(seed, is_repeatable) -> None:
    simulated = SimulatedJob(
        seed,
        [3, 0, 5, 1, 8, 2, 2, 4],
        num_consumers=4,
        consumer_kill_rate=0.005,
        is_repeatable=is_repeatable,
    )
    simulated.run()
    assert max(simulated.ledger.values()) == 1


@pytest.mark.parametrize("seed", range(10))
def test_exact_jobs_visit_again_what_a_lost_consumer_had_not_reported(seed) -> None:
    lengths = [3, 5, 8, 2]
    simulated = SimulatedJob(
        seed, lengths, num_consumers=4, consumer_kill_rate=0.01, is_exact=True, kill_rate=0.1
    )
    simulated.run()
    # What was under way to a lost consumer is lost with it; everything else came.
    assert simulated.job.num_lost == 0


def test_the_simulation_finds_a_job_that_forgets_reports() -> None:
    class Forgetful(ServiceJob):
        def report(self, consumer, split, attempt, ranges):
            return super().report(consumer, split, attempt, [])

    counts = collections.Counter()
    for seed in range(10):
        simulated = SimulatedJob(seed, [3, 5, 8, 2], kill_rate=0.1)
        simulated._make = lambda: Forgetful(4, most_losses=10**6)
        simulated.job = simulated._make()
        for line in simulated.journal:
            simulated.job.apply({"what": "join", "consumer": line.split('"')[-2]})
        simulated.run()
        counts.update(simulated.ledger.values())
    assert counts[2] > 0


def test_splits_are_given_in_order_and_finished_once_all_are_done() -> None:
    job = ServiceJob(2)
    assert [_take(job, "a"), _take(job, "b"), _take(job, "a", {0: 0})] == [(0, 0), (1, 0), None]
    _apply(job, job.done_split("a", 0, 0))
    assert job.finish(["a", "b"]) == []
    assert job.done_split("a", 1, 0) == []  # b has it
    _apply(job, job.done_split("b", 1, 0))
    _apply(job, job.finish(["a", "b"]))
    assert job.is_finished
    assert _take(job, "a") is None
    assert job.finish(["a"]) == []


def test_an_assignment_whose_answer_was_lost_is_repeated() -> None:
    job = ServiceJob(3)
    assert _take(job, "a") == (0, 0)
    assert _take(job, "a") == (0, 0)
    assert _take(job, "a", {0: 0}) == (1, 0)


def test_a_lost_split_waits_for_reports_and_goes_on_behind_them() -> None:
    job = _lost_job()
    assert job.awaited_of("c") == {0: 1}
    assert job.attempts == {0: 1}
    assert _take(job, "b") == (1, 0)
    assert job.report("c", 0, 0, []) == []  # of an earlier attempt
    assert job.report("d", 0, 1, []) == []  # by nobody
    _apply(job, job.report("c", 0, 1, [[0, 1]]))
    _, split = job.next_split("b", {1: 0})
    assert split == {"split": 0, "attempt": 1, "received": [[0, 1]]}
    assert job.holder_of(0) is None


def test_a_split_that_a_consumer_has_wholly_is_not_read_again() -> None:
    job = _lost_job()
    _apply(job, job.report("c", 0, 1, [[0, 2**53]]))
    assert 0 in job.done
    assert job.num_lost == 0


def test_what_cannot_be_read_again_is_lost_if_a_part_was_received() -> None:
    job = _lost_job(is_repeatable=False)
    _apply(job, job.report("c", 0, 1, [[0, 1]]))
    assert job.num_lost == 1
    job = _lost_job(is_repeatable=False)
    _apply(job, job.report("c", 0, 1, []))
    assert job.num_lost == 0
    assert _take(job, "b") == (0, 1)


@pytest.mark.parametrize(("is_exact", "num_lost"), [(True, 0), (False, 1)])
def test_what_a_lost_consumer_had_is_read_again_only_in_exact_jobs(is_exact, num_lost) -> None:
    job = _lost_job(is_exact=is_exact)
    job.apply({"what": "leave", "consumer": "c"})
    assert job.num_lost == num_lost
    assert _take(job, "b") == ((0, 1) if is_exact else (1, 0))


def test_a_live_worker_reports_that_it_dropped_a_split() -> None:
    job = ServiceJob(1)
    assert _take(job, "a") == (0, 0)
    assert job.lose_split("b", 0, 0) == []
    _apply(job, job.lose_split("a", 0, 0))
    assert job.awaited_of("a") == {0: 1}
    assert _take(job, "b") is None
    _apply(job, job.lose_worker("a"))  # it never will
    assert _take(job, "b") == (0, 1)
    assert job.num_lost == 0


def test_a_split_that_is_lost_again_and_again_is_an_error() -> None:
    job = ServiceJob(1, most_losses=3)
    for number in range(3):
        assert _take(job, "a") == (0, number)
        _apply(job, job.lose_worker("a"))
    assert job.error == {"kind": "losses", "split": 0, "count": 3}
    assert _take(job, "a") is None


def test_with_one_each_every_worker_has_a_split_of_its_own() -> None:
    job = ServiceJob(None, one_each=True)
    assert [_take(job, "a"), _take(job, "b"), _take(job, "a", {0: 0})] == [(0, 0), (1, 0), None]
    _apply(job, job.done_split("a", 0, 0))
    _apply(job, job.done_split("b", 1, 0))
    assert job.finish(["a", "b", "late"]) == []
    assert _take(job, "late") == (2, 0)
    _apply(job, job.lose_worker("late"))
    assert job.num_lost == 1
    assert job.finish([]) == []  # another worker may come
    assert job.finish(["a", "b"]) == [{"what": "finish"}]


def test_reserved_and_wanted_splits() -> None:
    job = ServiceJob(4)
    assert _take(job, "a", reserved={0, 1}) == (2, 0)
    assert _take(job, "a", {2: 0}, only=[1]) == (1, 0)
    assert _take(job, "a", {1: 0, 2: 0}, only=[]) is None
    assert _take(job, "b", only=[7]) is None
    assert _take(job, "b") == (0, 0)


def test_a_restored_job_gives_only_what_is_left() -> None:
    job = ServiceJob(
        3, done=NumberRanges([(0, 1)]), received={0: NumberRanges(), 1: NumberRanges([(0, 2)])}
    )
    _, split = job.next_split("a", {})
    assert split == {"split": 1, "attempt": 0, "received": [[0, 2]]}
    assert ServiceJob(1, done=NumberRanges([(0, 1)])).finish([]) == [{"what": "finish"}]
    assert ServiceJob(0).finish([]) == [{"what": "finish"}]
    assert ServiceJob(None).finish([]) == []


# Ranges of numbers against Python's sets.

_RANGES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)))


def _numbers_of_ranges(ranges: list[tuple[int, int]]) -> set[int]:
    return {number for start, stop in ranges for number in range(start, stop)}


@given(_RANGES, _RANGES)
def test_same_numbers_as_a_set(ranges, others) -> None:
    found, expected = NumberRanges(ranges), _numbers_of_ranges(ranges)
    assert list(found) == sorted(expected)
    assert len(found) == len(expected)
    assert bool(found) == bool(expected)
    assert [number for number in range(32) if number in found] == sorted(expected)
    assert found.first_missing() == min(set(range(40)) - expected)
    found.update(NumberRanges(others))
    assert list(found) == sorted(expected | _numbers_of_ranges(others))


@given(_RANGES)
def test_json_is_sorted_disjoint_and_read_again(ranges) -> None:
    found = NumberRanges(ranges)
    as_json = found.as_json()
    flat = [end for one in as_json for end in one]
    assert flat == sorted(set(flat))  # so no two ranges touch
    assert NumberRanges(as_json) == found


@given(st.permutations(range(20)))
def test_numbers_added_in_any_order_become_one_range(order) -> None:
    found = NumberRanges()
    for number in order:
        found.add(number)
    assert found.as_json() == [[0, 20]]
    assert not found.is_everything
    assert NumberRanges([EVERY_NUMBER]).is_everything


def test_text_and_hash() -> None:
    assert repr(NumberRanges([(1, 3)])) == "NumberRanges([[1, 3]])"
    with pytest.raises(TypeError, match="can change"):
        hash(NumberRanges())
