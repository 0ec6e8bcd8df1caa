"""ReplicaBatch: true rows of one replica and of all, and their mask."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from stratagem.context import ReplicaBatch

PADDED = ReplicaBatch(size=3, lengths=(3, 1, 0))


def test_step_without_a_batch_has_no_counts() -> None:
    batch = ReplicaBatch()
    assert not batch.is_padded
    assert batch.num_examples(0) is None
    assert batch.global_num_examples(4) is None
    assert batch.mask(0) is None


@pytest.mark.parametrize("replica_id", [0, 2])
def test_all_rows_of_a_full_batch_are_true(replica_id) -> None:
    batch = ReplicaBatch(size=3)
    assert not batch.is_padded
    assert batch.num_examples(replica_id) == 3
    assert batch.global_num_examples(4) == 12
    np.testing.assert_array_equal(batch.mask(replica_id), [True] * 3)


@pytest.mark.parametrize(
    ("replica_id", "mask"), [(0, [True] * 3), (1, [True, False, False]), (2, [False] * 3)]
)
def test_true_rows_of_a_padded_batch_are_those_of_the_replica(replica_id, mask) -> None:
    assert PADDED.is_padded
    assert PADDED.num_examples(replica_id) == sum(mask)
    assert PADDED.global_num_examples(3) == 4
    np.testing.assert_array_equal(PADDED.mask(replica_id), mask)


def test_replica_id_may_be_traced() -> None:
    facts = jax.jit(lambda i: (PADDED.num_examples(i), PADDED.mask(i)))
    number, mask = facts(np.int32(1))
    assert number.dtype == np.int32
    assert int(number) == 1
    np.testing.assert_array_equal(mask, [True, False, False])


def test_batch_of_no_rows_has_an_empty_mask() -> None:
    assert ReplicaBatch(size=0).mask(0).shape == (0,)


def test_batches_are_compared_by_value_because_a_program_is_kept_for_each() -> None:
    assert ReplicaBatch(size=3, lengths=(3, 1, 0)) == PADDED
    assert len({PADDED, ReplicaBatch(size=3, lengths=(3, 0, 1)), ReplicaBatch(size=3)}) == 3
