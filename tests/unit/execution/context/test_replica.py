"""What a replica knows of itself and of its island."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices.local_updates import Islands
from stratagem.execution.replica_context import ReplicaBatch
from stratagem.options import ReduceOp

CALLS = {
    "merge_call": lambda context: context.merge_call(lambda _: None),
    "all_reduce": lambda context: context.all_reduce("sum", 1.0),
    "all_gather": lambda context: context.all_gather(np.ones(1), 0),
}


def test_context_has_its_replica(pair) -> None:
    def step() -> Any:
        context = sg.get_replica_context()
        assert context.strategy is pair
        assert context.num_replicas_in_sync == 2
        assert context.devices == tuple(jax.devices()[:2])
        assert repr(context).startswith("ReplicaContext(MirroredStrategy(cpu:0, cpu:1), replica_id")
        return context.replica_id_in_sync_group

    assert [int(part) for part in pair.local_results(pair.run(step))] == [0, 1]


@pytest.mark.parametrize("method", CALLS)
def test_method_of_a_context_that_is_over_is_refused(pair, method) -> None:
    contexts: list[Any] = []
    pair.run(lambda: contexts.append(sg.get_replica_context()))
    call = CALLS[method]
    words = (
        rf"{method} was called outside its replica function(?s:.)*use sg.get_replica_context\(\)"
    )
    for use in (lambda: call(contexts[0]), lambda: pair.run(lambda: call(contexts[0]))):
        with pytest.raises(RuntimeError, match=words):
            use()


def test_island_is_that_of_the_replica_in_inner_traces_too() -> None:
    devices = [f"cpu:{index}" for index in range(4)]
    strategy = sg.LocalUpdateStrategy(devices=devices, replicas_per_island=2)

    def step(value):
        context = sg.get_replica_context()
        assert context.island.num_replicas_in_sync == 2
        inner = jax.jit(lambda x: x + context.island.replica_id_in_sync_group)(value)
        total = context.island.communicator.all_reduce(ReduceOp.SUM, value)
        return inner + 10 * context.island.island.replica_id_in_sync_group, total

    given = sg.PerReplica(stacked=np.array([0, 0, 100, 300], "int32"))
    found = [strategy.local_results(one) for one in strategy.run(step, args=(given,))]
    assert [list(map(int, one)) for one in found] == [[0, 11, 100, 311], [0, 0, 400, 400]]


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
