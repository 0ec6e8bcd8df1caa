"""Sizes into which a worker cuts the stream of its own files."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.input.batches import batch_sizes_for_worker


# Global batch, workers, replicas a worker, and what each worker cuts.
@pytest.mark.parametrize(
    ("global_batch_size", "num_replicas", "expected"),
    [
        (7, 2, [[2, 2, 2, 1], [2, 1, 2, 2]]),
        (10, 3, [[2, 2, 2, 2, 1, 1], [2, 1, 1, 2, 2, 2]]),
        (8, 2, [[2, 2, 2, 2], [2, 2, 2, 2]]),
    ],
)
def test_sizes_are_those_of_the_table(
    global_batch_size: int, num_replicas: int, expected: list[list[int]]
) -> None:
    for worker, sizes in enumerate(expected):
        assert batch_sizes_for_worker(global_batch_size, 2, num_replicas, worker) == sizes


@settings(deadline=None)
@given(st.integers(1, 100), st.integers(1, 6), st.integers(1, 4))
def test_each_step_uses_one_global_batch(
    global_batch_size: int, num_workers: int, num_replicas: int
) -> None:
    cuts = [
        batch_sizes_for_worker(global_batch_size, num_workers, num_replicas, worker)
        for worker in range(num_workers)
    ]
    assert all(sum(sizes) == global_batch_size for sizes in cuts)
    assert max(map(max, cuts)) - min(map(min, cuts)) <= 1
    for step in range(num_workers):
        rows = slice(step * num_replicas, (step + 1) * num_replicas)
        assert sum(sum(sizes[rows]) for sizes in cuts) == global_batch_size


@pytest.mark.parametrize("name", ["global_batch_size", "num_workers", "num_replicas_per_worker"])
def test_sizes_must_be_positive(name: str) -> None:
    sizes = {"global_batch_size": 4, "num_workers": 2, "num_replicas_per_worker": 1, name: 0}
    with pytest.raises(ValueError, match=rf"{name}=0 is out of range.\nExpected 1 or more."):
        batch_sizes_for_worker(**sizes, worker_index=0)


@pytest.mark.parametrize("index", [-1, 2])
def test_worker_must_exist(index: int) -> None:
    with pytest.raises(ValueError, match=rf"worker_index={index} is out of range for 2 workers"):
        batch_sizes_for_worker(4, 2, 1, index)
