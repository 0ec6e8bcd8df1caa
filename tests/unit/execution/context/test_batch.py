"""ReplicaBatch: true rows of one replica and of all, and their mask."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from stratagem.devices.collectives.islands import Islands
from stratagem.execution.context.replica import ReplicaBatch

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


def test_batch_of_an_island_has_its_replicas_rows() -> None:
    batch, islands = ReplicaBatch(size=3, lengths=(3, 3, 2, 0)), Islands(4, 2)
    assert batch.of_island(islands, 1) == ReplicaBatch(size=3, lengths=(2, 0))
    full = ReplicaBatch(size=3)
    assert full.of_island(islands, 1) is full
    even = ReplicaBatch(size=3, lengths=(3, 1, 3, 1))
    found = jax.eval_shape(lambda i: even.of_island(islands, i).num_examples(1), np.int32(1))
    assert found.shape == ()  # known in the trace, which islands share


def test_batch_of_a_traced_island_has_choices() -> None:
    batch, islands = ReplicaBatch(size=3, lengths=(3, 3, 0, 0, 2, 0)), Islands(6, 2)

    @jax.jit
    def facts(island_id, replica_id):
        own = batch.of_island(islands, island_id)
        assert own.is_padded
        assert own.has_examples
        assert [one.lengths for one in own.alternatives()] == [(3, 3), (0, 0), (2, 0)]
        assert [one.has_examples for one in own.alternatives()] == [True, False, True]
        whole = own.global_num_examples(2)
        return own.choice, own.num_examples(replica_id), whole, own.mask(replica_id)

    choice, own, whole, mask = facts(np.int32(2), np.int32(0))
    assert (int(choice), int(own), int(whole)) == (2, 2, 2)
    np.testing.assert_array_equal(mask, [True, True, False])
    assert int(facts(np.int32(1), np.int32(1))[2]) == 0
