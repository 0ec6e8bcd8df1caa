"""The state of a job: tables of decisions, and a ledger of each batch under random kills."""

from __future__ import annotations

import collections

import pytest

from stratagem.input.service.job import NumberRanges, ServiceJob
from tests.unit.input.service.simulated_job import SimulatedJob


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
