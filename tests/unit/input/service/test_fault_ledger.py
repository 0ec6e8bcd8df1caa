"""Each part of the input service hurt in each mode, with a count of every example."""

from __future__ import annotations

import pytest

from stratagem.input.service.splits import ShardingPolicy
from tests.unit.input.service.fault_ledger import FAULTS, MODES, NUM_EXAMPLES, count_visits

_NUM_WORKERS = 2
# Examples of a batch that cannot be read, and of the rest of its file, with any worker.
_MEMORY_ERROR = "worker out of memory, MemoryError"


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != _MEMORY_ERROR])
def test_examples_are_seen_as_often_as_the_mode_promises(tmp_path, fault, mode) -> None:
    counts, error = count_visits(tmp_path, mode, fault)
    assert error is None
    if mode.policy is not ShardingPolicy.OFF:
        assert counts == {1: NUM_EXAMPLES}
        return
    # Each worker that joins reads a copy, which ends with it: the other one reads all of its own.
    assert counts.get(0, 0) == 0
    assert max(counts) <= _NUM_WORKERS + (fault == "worker killed, replaced")
    if fault in ("none", "worker slow", "dispatcher killed, back", "trainer killed, resumed"):
        assert counts == {_NUM_WORKERS: NUM_EXAMPLES}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_an_example_too_large_for_memory_is_named(tmp_path, mode) -> None:
    counts, error = count_visits(tmp_path, mode, _MEMORY_ERROR)
    assert error is not None
    assert "MemoryError" in error
    assert counts[0] > 0
