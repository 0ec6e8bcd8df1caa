"""Eager execution: one replica at a time up to each meeting, errors as they are, nothing left."""

from __future__ import annotations

import logging
import threading
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.execution import eager as replicas
from stratagem.execution.tracing.functionalize import _OpByOp
from stratagem.options import ReduceOp


@pytest.fixture
def strategy():
    return sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])


@pytest.mark.parametrize("aggregation", ["mean", "sum", "only_first_replica"])
def test_variable_may_be_assigned_where_it_is_created(strategy, aggregation) -> None:
    """Only the first replica comes there: the others find it."""

    def run() -> tuple[list[float], float]:
        made: list[Any] = []

        def step(x: Any) -> Any:
            if not made:
                made.append(keras.Variable(np.float32(1), aggregation=aggregation))
                made[0].assign(np.float32(5))
                made[0].assign_add(np.float32(1))
            made[0].assign_add(x)
            return made[0].value + 0

        with strategy.scope():
            results = strategy.run(step, args=(np.float32(2),))
        return [float(one) for one in strategy.local_results(results)], float(made[0].value)

    found = run()
    sg.config.run_eagerly(False)
    assert found == run()


@pytest.fixture(autouse=True)
def eagerly():
    sg.config.run_eagerly(True)
    yield
    sg.config.run_eagerly(False)
    assert not [t for t in threading.enumerate() if t.name.startswith("stratagem-replica")]


def context():
    return sg.get_replica_context()


def own_id():
    return context().replica_id_in_sync_group


def test_replicas_take_turns_in_order_up_to_each_meeting(strategy) -> None:
    """In threads of their own, and merges in the caller's."""
    order: list[tuple[str, int]] = []
    threads: list[threading.Thread] = []

    def note(place: str, number: int) -> None:
        order.append((place, number))
        threads.append(threading.current_thread())

    def step():
        note("start", own_id())
        context().all_reduce("sum", jnp.ones(()))
        note("reduced", own_id())
        context().merge_call(lambda _: note("merge", -1))
        note("merged", own_id())
        context().all_gather(jnp.ones(1), axis=0)
        note("end", own_id())

    strategy.run(step)
    ids = range(strategy.num_replicas_in_sync)
    expected = [("start", i) for i in ids] + [("reduced", i) for i in ids] + [("merge", -1)]
    assert order == expected + [("merged", i) for i in ids] + [("end", i) for i in ids]
    found = {(number, thread) for (_, number), thread in zip(order, threads, strict=True)}
    assert (-1, threading.current_thread()) in found
    assert len(found) == len(ids) + 1 == len({thread for _, thread in found})


def test_each_replica_computes_on_its_device_with_real_values(strategy) -> None:
    def step(shared):
        value = jnp.ones(2) * shared + own_id()
        assert value.devices() == {strategy.topology.devices[own_id()]}
        assert isinstance(float(value[0]), float)
        return 10.0 if value[0] > 2.5 else -10.0

    parts = strategy.local_results(strategy.run(step, args=(jnp.float32(2.0),)))
    assert [float(part) for part in parts] == [-10.0] + [10.0] * (len(parts) - 1)


def test_jit_and_control_flow_inside_run_op_by_op(strategy) -> None:
    seen = []

    def step():
        jax.jit(lambda x: seen.append(float(x)))(jnp.float32(own_id()))
        jax.lax.fori_loop(0, 2, lambda i, x: (seen.append(10.0), x)[1], 0)

    strategy.run(step)
    n = strategy.num_replicas_in_sync
    assert seen == [number for i in range(n) for number in (float(i), 10.0, 10.0)]


@pytest.mark.parametrize("failing", [0, 1])
def test_error_of_one_replica_comes_out_unchanged(strategy, failing) -> None:
    error = LookupError("only here")
    started, cleaned = [], []

    def step():
        started.append(own_id())
        try:
            context().all_reduce("sum", jnp.ones(()))
            if own_id() == failing:
                raise error
            context().all_reduce("sum", jnp.ones(()))
        finally:
            cleaned.append(own_id())

    with pytest.raises(LookupError, match="only here") as caught:
        strategy.run(step)
    assert caught.value is error
    assert started == list(range(strategy.num_replicas_in_sync))
    assert sorted(cleaned) == started
    assert not sg.has_strategy()


def test_catching_errors_in_the_function_does_not_keep_abandoned_replicas(strategy) -> None:
    went_on = []

    def step():
        try:
            if own_id() == 1:
                raise KeyboardInterrupt
            context().all_reduce("sum", jnp.ones(()))
        except Exception:  # noqa: BLE001 - what a user might write
            went_on.append(own_id())

    with pytest.raises(KeyboardInterrupt):
        strategy.run(step)
    assert not went_on


def _reduce():
    return context().all_reduce("sum", jnp.ones(()))


@pytest.mark.parametrize(
    ("of_first", "of_others"),
    [
        (lambda: None, _reduce),
        (_reduce, lambda: None),
        (_reduce, lambda: context().all_reduce("mean", jnp.ones(()))),
        (_reduce, lambda: context().all_gather(jnp.ones(1), axis=0)),
        (lambda: context().merge_call(lambda _: None), _reduce),
    ],
    ids=["others_reduce", "first_reduces", "sum_and_mean", "reduce_and_gather", "merge_and_reduce"],
)
def test_replicas_at_different_points_are_reported(strategy, of_first, of_others) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)Replicas made different calls.*same order"):
        strategy.run(lambda: of_first() if own_id() == 0 else of_others())


def test_parts_that_differ_in_more_than_rows_are_taken(strategy) -> None:
    """A compiled program cannot take them, and says to debug with eager execution."""
    value = strategy.distribute_values_from_function(
        lambda c: jnp.ones((2,) * (c.replica_id_in_sync_group + 1))
    )
    ranks = strategy.run(lambda x: x.ndim, args=(value,))
    n = strategy.num_replicas_in_sync
    assert [int(rank) for rank in strategy.local_results(ranks)] == list(range(1, n + 1))
    sg.config.run_eagerly(False)
    with pytest.raises(ValueError, match=r"run_eagerly\(True\)"):
        strategy.run(lambda x: x.ndim, args=(value,))


def test_assignment_on_one_replica_only_without_aggregation_is_refused(strategy) -> None:
    with strategy.scope():
        drifting = sg.Variable(1.0)

    def step():
        if own_id() == 1:
            drifting.assign(5.0)

    with pytest.raises(ValueError, match="whose aggregation is NONE"):
        strategy.run(step)


@pytest.mark.slow
def test_replicas_may_hold_different_numbers_of_rows_of_a_table() -> None:
    def step():
        count = 1 + context().replica_id_in_sync_group % 2
        return context().all_reduce(
            "SUM", sg.IndexedSlices(jnp.ones((count, 2)), jnp.arange(count))
        )

    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    reduced = sg.select_replica(2, strategy.run(step))
    assert reduced.indices.tolist() == [0, 1]
    assert reduced.values.tolist() == [[3.0, 3.0], [1.0, 1.0]]


def test_replicas_that_span_processes_are_refused(strategy, monkeypatch) -> None:
    monkeypatch.setattr(replicas, "replicas_span_processes", lambda topology: True)
    with pytest.raises(NotImplementedError, match="op by op on replicas that span several"):
        strategy.run(own_id)


class _Compiled(logging.Handler):
    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += record.getMessage().startswith("Compiling ")


@pytest.fixture
def compiled():
    """Counts the programs that XLA compiles, or finds in the cache of a folder."""
    logger, handler = logging.getLogger("jax"), _Compiled()
    logger.addHandler(handler)
    with jax.log_compiles():
        yield handler
    logger.removeHandler(handler)


@pytest.fixture
def has_traced_reads(monkeypatch) -> None:
    monkeypatch.setattr(_OpByOp, "has_traced_reads", False)  # and afterward as before


@pytest.mark.usefixtures("has_traced_reads")
def test_second_step_compiles_nothing(compiled) -> None:
    """A key of `jax.jit` for each step once compiled every operation of every step again."""
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
    counts: list[int] = []
    noted = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: counts.append(compiled.count)
    )
    x, y = np.ones((12, 4), "float32"), np.ones((12, 1), "float32")
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[noted])
    assert counts[0] > 0
    assert counts[4:] == counts[4:5] * 2  # of the second epoch: the first builds, and ends, too


_INNER = {
    "jit": lambda inner: jax.jit(inner),
    "checkpoint": lambda inner: jax.checkpoint(inner),
    "vmap": lambda inner: lambda x: jax.vmap(inner)(jnp.full(1, x))[0],
    "scan": lambda inner: lambda x: jax.lax.scan(lambda c, _: (inner(c), None), x, None, 1)[0],
    "cond": lambda inner: lambda x: jax.lax.cond(x > 0, inner, lambda x: x, x),
    "while": lambda inner: lambda x: jax.lax.fori_loop(0, 1, lambda _, c: inner(c), x),
    "grad": lambda inner: lambda x: jax.grad(lambda y: inner(y) * y / 2)(x),
}


@pytest.mark.usefixtures("has_traced_reads")
@pytest.mark.parametrize("kind", _INNER)
def test_inner_function_sees_the_variable_and_the_rows_of_its_own_step(kind) -> None:
    """JAX finds what it traced by the function, which is the same in each step."""
    num_replicas = 2
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        variable = sg.Variable(1.0, aggregation=sg.VariableAggregation.MEAN)
    inner = _INNER[kind](lambda x: x * variable.value * own_id())

    def step():
        results = []
        for _ in range(2):
            results.append(inner(jnp.asarray(3.0)))
            variable.assign_add(1.0)
        return results

    for before in (1.0, 3.0):
        first, second = map(strategy.local_results, strategy.run(step))
        for replica_id in range(num_replicas):
            assert float(first[replica_id]) == 3.0 * before * replica_id
            assert float(second[replica_id]) == 3.0 * (before + 1.0) * replica_id
    assert _OpByOp.has_traced_reads == (kind == "checkpoint")


@pytest.mark.usefixtures("has_traced_reads")
def test_gradient_through_an_inner_function_that_was_traced_before() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        variable = sg.Variable(2.0, aggregation=sg.VariableAggregation.MEAN)
    inner = jax.checkpoint(lambda x: x * variable.value**2)

    def step():
        before = inner(jnp.asarray(3.0))
        value, (gradient,) = sg.value_and_grad(lambda: inner(jnp.asarray(3.0)), [variable])
        variable.assign_add(1.0)
        return before, value, gradient

    for at in (2.0, 3.0):
        for results in zip(*map(strategy.local_results, strategy.run(step)), strict=True):
            assert [*map(float, results)] == [3.0 * at**2, 3.0 * at**2, 6.0 * at]


# Collectives of groups of replicas.

GROUPS = ((0, 2), (1, 3))
VALUES = np.array([[1.0], [2.0], [3.0], [5.0]], "float32")


def _gradient_of_gather(group, value):
    weights = jnp.array([1.0, 10.0])
    return jax.grad(lambda x: jnp.sum(weights * group.all_gather(x, 0, None)))(value)


_ALONE = ((0,), (1,), (2,), (3,))


@pytest.mark.parametrize(
    ("groups", "function", "expected"),
    [
        (GROUPS, lambda group, x: group.all_reduce(ReduceOp.SUM, x), [[4.0], [7.0], [4.0], [7.0]]),
        (GROUPS, lambda group, x: group.all_reduce(ReduceOp.MEAN, x), [[2.0], [3.5], [2.0], [3.5]]),
        (GROUPS, lambda group, x: group.all_gather(x, 0, None), [[1, 3], [2, 5], [1, 3], [2, 5]]),
        (GROUPS, _gradient_of_gather, [[2.0], [2.0], [20.0], [20.0]]),
        (
            GROUPS,
            lambda group, x: group.all_to_all(jnp.stack([x, 10 * x]))[:, 0],
            [[1, 3], [2, 5], [10, 30], [20, 50]],
        ),
        (_ALONE, lambda group, x: group.all_reduce(ReduceOp.SUM, x) * group.num_replicas, VALUES),
    ],
    ids=["sum", "mean", "gather", "gradient of a gather", "exchange", "alone"],
)
def test_collectives_are_those_of_the_group(groups, function, expected) -> None:
    def step(value):
        return function(sg.get_replica_context().communicator.among(groups), value)

    strategy = sg.MirroredStrategy([f"cpu:{index}" for index in range(4)])
    found = strategy.run(step, args=(sg.PerReplica(stacked=VALUES),))
    np.testing.assert_array_equal(np.stack(strategy.local_results(found)), expected)
