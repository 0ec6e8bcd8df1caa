"""What a replica knows of itself and its island, `sg.all_gather`, and the strategy of a program."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import jax
import jax.numpy as jnp
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


def test_set_strategy_holds_for_every_thread_until_it_is_reset() -> None:
    first, second = (sg.MirroredStrategy(devices) for devices in (["cpu:0", "cpu:1"], ["cpu:2"]))

    def place() -> tuple[Any, ...]:
        replica = sg.get_replica_context()
        return sg.get_strategy(), sg.has_strategy(), sg.in_cross_replica_context(), replica

    default = sg.get_strategy()
    sg.set_strategy(first)
    try:
        assert place() == (first, True, True, None)
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            assert threads.submit(place).result() == (first, True, True, None)
        sg.set_strategy(second)
        with second.scope():
            assert sg.get_strategy() is second
        words = (
            r"inside the scope of MirroredStrategy\(cpu:2(?s:.)*call sg.set_strategy\(None\) bef"
        )
        with pytest.raises(RuntimeError, match=words), first.scope():
            pass
        sg.set_strategy(default)
        assert not sg.has_strategy()
        assert sg.get_replica_context() is not None
        sg.set_strategy(first)
    finally:
        sg.set_strategy(None)
    assert sg.get_strategy() is default


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
    assert [list(map(int, one)) for one in found] == [
        [0, 11, 100, 311],
        [0, 0, 400, 400],
    ]


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


# `sg.all_gather`, inside and outside of replicas.


def test_all_rows_on_each_replica_and_the_gradient_of_its_own() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    (rows,) = strategy.distribute_dataset([np.asarray([1.0, 2.0, 6.0], "float32")])

    def step(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        scale = jnp.asarray([1.0, 10.0, 100.0])
        return jax.value_and_grad(lambda rows: jnp.sum(sg.all_gather(rows) * scale))(rows)

    np.testing.assert_array_equal(sg.all_gather(np.ones((2, 3)), axis=1), np.ones((2, 3)))
    values, gradients = strategy.run(step, args=(rows,))
    assert [float(value) for value in strategy.local_results(values)] == [621.0, 621.0]
    np.testing.assert_array_equal(strategy.gather(gradients, axis=0), [2.0, 20.0, 200.0])


def test_cross_replica_context_is_refused() -> None:
    with (
        sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope(),
        pytest.raises(RuntimeError, match=r"cross-replica.*\n.*\nFix: use strategy.gather"),
    ):
        sg.all_gather(np.ones(2))
