"""ReplicaContext, with a fake communicator."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import numpy as np
import pytest

import stratagem as sg
from stratagem import contexts as stack
from stratagem.contexts import FrameKind
from stratagem.devices.local_updates import Islands
from stratagem.execution.communicator import Communicator
from stratagem.execution.replica_context import (
    ReplicaBatch,
    ReplicaContext,
)
from stratagem.options import ReduceOp


class Recorder(Communicator):
    """Stands in for two replicas of which the other one holds ten times the value."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    @property
    def num_replicas(self) -> int:
        return 2

    def all_reduce(self, op: ReduceOp, value: Any) -> Any:
        raise NotImplementedError

    def all_gather(self, value: Any, axis: int, lengths: tuple[int, ...] | None) -> Any:
        self.calls.append((np.shape(value), axis, lengths))
        return np.concatenate([value, 10 * value], axis=axis)

    def all_to_all(self, value: Any) -> Any:
        return value

    def among(self, groups: Any) -> Communicator:
        return self

    def merge(self, strategy: Any, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return fn(strategy, *args, **kwargs)


class Strategy:
    """Stands in for a strategy: an identity, and devices."""

    extended = property(lambda self: self)
    worker_devices = ("device 0", "device 1")

    def __repr__(self) -> str:
        return "Strategy()"


STRATEGY = Strategy()


@pytest.fixture
def others() -> Recorder:
    return Recorder()


@pytest.fixture
def context(others) -> ReplicaContext:
    """Replica 1 of 2, in a step with 3 rows a replica of which it has 2."""
    return ReplicaContext(STRATEGY, 1, others, ReplicaBatch(size=3, lengths=(3, 2)))


def entered(context: ReplicaContext) -> contextlib.AbstractContextManager[None]:
    return stack.push(FrameKind.REPLICA, STRATEGY, context)


def test_context_has_its_replica(context, others) -> None:
    assert context.strategy is STRATEGY
    assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (1, 2)
    assert context.communicator is others
    assert context.devices == ("device 0", "device 1")
    assert repr(context) == "ReplicaContext(Strategy(), replica_id_in_sync_group=1)"


def test_all_gather_gathers_leaf_by_leaf_with_true_lengths(context, others) -> None:
    rows, other = np.ones((3, 3)), np.ones((2, 3))
    with entered(context):
        context.all_gather([rows, other], axis=0)
        context.all_gather({"rows": rows}, axis=-2)
        context.all_gather(rows, axis=-1, options="ignored")
        # Before the others are asked.
        with pytest.raises(ValueError, match="all_gather received a scalar"):
            context.all_gather([1.0], axis=0)
        with pytest.raises(ValueError, match="all_gather received axis=1, out of range"):
            context.all_gather(np.ones(3), axis=1)
        with pytest.raises(TypeError, match="all_gather received axis=None"):
            context.all_gather(np.ones(3), axis=None)
    assert others.calls == [
        ((3, 3), 0, (3, 2)),
        ((2, 3), 0, None),
        ((3, 3), 0, (3, 2)),
        ((3, 3), 1, None),
    ]


CALLS = {
    "merge_call": lambda context: context.merge_call(lambda _: None),
    "all_reduce": lambda context: context.all_reduce("sum", 1.0),
    "all_gather": lambda context: context.all_gather(np.ones(1), 0),
}


@pytest.mark.parametrize("method", CALLS)
def test_method_of_a_context_that_is_over_is_refused(context, method) -> None:
    call = CALLS[method]
    words = (
        rf"{method} was called outside its replica function(?s:.)*use sg.get_replica_context\(\)"
    )
    with pytest.raises(RuntimeError, match=words):
        call(context)
    with entered(ReplicaContext(STRATEGY)), pytest.raises(RuntimeError, match=words):
        call(context)


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


# ReplicaBatch: true rows of one replica and of all, and their mask.

PADDED = ReplicaBatch(size=3, lengths=(3, 1, 0))


@pytest.mark.parametrize(
    ("replica_id", "mask"), [(0, [True] * 3), (1, [True, False, False]), (2, [False] * 3)]
)
def test_true_rows_of_a_padded_batch_are_those_of_the_replica(replica_id, mask) -> None:
    assert PADDED.is_padded
    assert ReplicaBatch(size=0).mask(0).shape == (0,)
    assert PADDED.num_examples(replica_id) == sum(mask)
    assert PADDED.global_num_examples(3) == 4
    np.testing.assert_array_equal(PADDED.mask(replica_id), mask)


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
