"""Tables that are measured, and their ids."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.recommenders.cases import COMPARISONS, by_options
from benchmarks.workers import table_work
from benchmarks.workers.table_work import (
    LEARNING_RATE,
    NUM_BATCHES,
    Table,
    TableOptions,
    answer_tables,
    first_rows,
    id_batches,
    keys_of,
)
from tests.run_events.test_wait_clock import ticking


def test_titles_are_unique_and_large_tables_are_measured_only_by_name() -> None:
    assert len({one.title for one in COMPARISONS}) == len(COMPARISONS)
    assert not any(one.is_large for one in by_options("", is_quick=False))
    large = by_options("100 M", is_quick=False)
    assert {one.options.num_rows for one in large} == {10**8}
    assert {one.options.num_rows for one in by_options("", is_quick=True)} == {20_000}


def test_ids_follow_the_law_that_they_state() -> None:
    num_rows = 500
    ids = id_batches(4_000, num_rows)
    assert ids.shape == (NUM_BATCHES, 4_000)
    counts = np.sort(np.bincount(ids.reshape(-1), minlength=num_rows))[::-1]
    ranks = np.arange(1, num_rows + 1)
    expected = ids.size * np.log1p(1 / ranks) / np.log(num_rows + 1)
    np.testing.assert_allclose(counts[:10], expected[:10], rtol=0.08)
    assert np.argmax(np.bincount(ids.reshape(-1))) != 0  # popular rows are anywhere


def test_each_id_has_a_key_of_its_own() -> None:
    keys = keys_of(np.arange(100_000))
    assert len(np.unique(keys)) == 100_000
    assert np.abs(keys).max() > 2**62


class _Rows:
    """A table in an array."""

    def __init__(self, options: TableOptions, error: float) -> None:
        self.rows = first_rows(0, options.num_rows, options.row_size)
        self.ids = id_batches(50, options.num_rows)
        self.error = error

    def pull(self, num_ids: int, batch: int) -> np.ndarray:
        return self.rows[self.ids[batch]]

    def step(self, num_ids: int, batch: int) -> np.ndarray:
        found = self.pull(num_ids, batch)
        np.subtract.at(self.rows, self.ids[batch], LEARNING_RATE + self.error)
        return found


@pytest.mark.parametrize("error", [0.0, 0.01])
def test_a_side_that_computes_something_else_is_refused(error: float) -> None:
    options = TableOptions(30, 4)
    rows = _Rows(options, error)
    table = Table(rows.pull, rows.step, lambda: 0.0, lambda: 0.0, 16.0)
    answer = answer_tables(table, options)
    if error:
        with pytest.raises(RuntimeError, match="rows differ from what is right by up to"):
            answer({"kind": "check", "num_ids": 50})
    else:
        assert answer({"kind": "check", "num_ids": 50}) == {}
        assert answer({"kind": "memory"}) == {"row_bytes": 16.0}


def test_calls_are_timed_with_what_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_work, "time", ticking())
    options = TableOptions(30, 4)
    rows, spent = _Rows(options, 0.0), iter([1.0, 4.0])
    sent = iter([10.0, 30.0])
    table = Table(rows.pull, rows.step, lambda: next(spent), lambda: next(sent), 16.0)
    told = answer_tables(table, options)({"kind": "pull", "num_ids": 50, "amount": 3})
    assert (told["cpu_s"], told["sent_bytes"]) == (3.0, 20.0)
    assert told["seconds"] > 0
