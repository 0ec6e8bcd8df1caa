"""What is measured, and what workers are asked."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.parameter_server.cases import CASES, OURS, SCALING, by_cluster
from benchmarks.workers.parameter_server_work import (
    NUM_BATCHES,
    ClusterOptions,
    answer_work,
    id_batches,
    require_equal,
)


def test_names_are_unique_and_each_cluster_is_started_once() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    groups = by_cluster(CASES)
    clusters = [group[0].cluster for group in groups]
    assert len(set(clusters)) == len(clusters)
    assert [case for group in groups for case in group] == list(CASES)


def test_work_that_was_asked_for_is_measured() -> None:
    assert {case.kind for case in CASES} >= {*OURS, "mlp", "closures", "sleeps"}
    assert [case.cluster.num_workers for case in SCALING] == [1, 4]
    counts = {case.num_ids for case in CASES if case.unit == "rows/s"}
    assert counts == {1_000, 10_000, 100_000}
    optimizers = {case.cluster.optimizer for case in CASES if case.kind == "push_rows"}
    assert optimizers == {"sgd", "adagrad"}


def test_a_call_counts_its_rows() -> None:
    mlp, rows = CASES[0], CASES[-1]
    assert (mlp.count, rows.count) == (1, 100_000)
    assert rows.question(3) == {"kind": "push_rows", "num_ids": 100_000, "amount": 3}


def test_ids_are_the_same_for_all_sides_and_differ_from_call_to_call() -> None:
    options = ClusterOptions()
    ids = id_batches(1_000, options)
    np.testing.assert_array_equal(ids, id_batches(1_000, options))
    assert ids.shape == (NUM_BATCHES, 1_000)
    assert 0 <= ids.min() < ids.max() < options.table_rows
    assert len(np.unique(ids)) > 0.99 * ids.size
    last = options.table_rows - 1
    assert np.float32(last) == last  # what the last row holds


def test_popular_ids_follow_the_law_of_zipf() -> None:
    num_rows = 1_000
    ids = id_batches(2_000, ClusterOptions(table_rows=num_rows, is_zipf=True))
    counts = np.sort(np.bincount(ids.reshape(-1), minlength=num_rows))[::-1]
    expected = ids.size / np.arange(1, num_rows + 1) / np.sum(1 / np.arange(1, num_rows + 1))
    np.testing.assert_allclose(counts[:10], expected[:10], rtol=0.1)
    assert np.argmax(np.bincount(ids.reshape(-1))) != 0  # popular rows are anywhere


def test_speed_is_of_elapsed_time_or_of_a_server_core() -> None:
    told = {"seconds": 2.0, "rows_per_server_s": 7.0}
    by_time = next(case for case in CASES if case.num_ids == 1_000 and case.speed is None)
    by_core = next(case for case in CASES if case.speed is not None)
    assert by_time.speed_of(4, told) == 2_000
    assert by_core.speed_of(4, told) == 7


def test_work_is_timed_and_tells_its_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    def work(question: dict) -> dict[str, float]:
        nonlocal now_s
        now_s += 0.5 * question["amount"]
        return {"loss": 2.0}

    monkeypatch.setattr("time.perf_counter", lambda: now_s)
    told = answer_work({"mlp": work})({"kind": "mlp", "amount": 3})
    assert told == {"loss": 2.0, "seconds": 1.5}


def test_wrong_numbers_are_refused() -> None:
    require_equal("the row", np.ones(3), np.ones(3, np.float32))
    with pytest.raises(RuntimeError, match=r"the row: 2\.0 came, and 1\.0 is right"):
        require_equal("the row", np.float32(2.0), np.float32(1.0))
