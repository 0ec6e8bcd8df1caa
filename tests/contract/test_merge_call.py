"""`merge_call`: leaving replica context for one call for all replicas together."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from tests.contract.parts import assert_parts, contribution, split


def merged(fn, *args, **kwargs):
    """Call in a replica function."""
    return sg.get_replica_context().merge_call(fn, args=args, kwargs=kwargs)


@pytest.mark.compatibility
def test_reduction_goes_back_to_all_replicas(strategy, execution) -> None:
    """[2. | 5. | 8. | ...]: 7. with two replicas."""
    n = strategy.num_replicas_in_sync
    own = split(strategy, lambda i: jnp.float32(2 + 3 * i))
    result = strategy.run(
        lambda x: merged(lambda s, v: s.reduce("SUM", v, axis=None), x), args=(own,)
    )
    assert_parts(strategy, result, lambda _: 2 * n + 3 * n * (n - 1) / 2)


@pytest.mark.compatibility
def test_function_runs_once_and_sees_the_strategy_and_per_replica_arguments(
    strategy, execution
) -> None:
    calls = []

    def merge(*args, **kwargs):
        calls.append((args, kwargs))

    strategy.run(lambda: merged(merge, contribution(), [contribution(), "text"], third=None))
    (((received, first, second), kwargs),) = calls
    assert received is strategy
    assert isinstance(first, sg.PerReplica) == (strategy.num_replicas_in_sync > 1)
    assert isinstance(second[0], sg.PerReplica) == (strategy.num_replicas_in_sync > 1)
    assert (second[1], kwargs) == ("text", {"third": None})


@pytest.mark.compatibility
def test_per_replica_result_is_handed_out_by_replica(strategy, execution) -> None:
    result = strategy.run(lambda: merged(lambda _, v: {"back": v, "n": 3}, contribution()))
    assert_parts(strategy, result["back"], lambda i: i + 1)
    assert result["n"] == 3


@pytest.mark.compatibility
def test_reduce_and_gather_and_batch_reduce_to_inside(strategy, execution) -> None:
    n = strategy.num_replicas_in_sync

    def merge(s, v, w):
        one, two = s.extended.batch_reduce_to("sum", [(v, None), (w, None)])
        return {
            "mean": s.reduce("mean", v, axis=None),
            "rows": s.reduce("mean", w, axis=0),
            "gathered": s.gather(w, axis=0),
            "reduced": s.extended.reduce_to("mean", w, None),
            "one": one,
            "two": two,
        }

    def step():
        mine = contribution()
        return merged(merge, mine, jnp.stack([mine, 10 * mine]))

    got = strategy.run(step)
    ids = np.arange(1.0, n + 1)
    expected = {
        "mean": ids.mean(),
        "rows": 5.5 * ids.mean(),
        "gathered": np.stack([ids, 10 * ids], axis=1).ravel(),
        "reduced": [ids.mean(), 10 * ids.mean()],
        "one": ids.sum(),
        "two": [ids.sum(), 10 * ids.sum()],
    }
    assert got.keys() == expected.keys()
    for name, numbers in expected.items():
        assert_parts(strategy, got[name], lambda _, numbers=numbers: numbers)


@pytest.mark.compatibility
def test_update_inside_changes_every_copy_and_is_seen_afterwards(strategy, execution) -> None:
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        weight = sg.Variable(10.0)

    def merge(s, gradient):
        total = s.extended.reduce_to("sum", gradient, weight)
        s.extended.update(weight, lambda v, g: v.assign_sub(0.1 * g), args=(total,))

    def step():
        merged(merge, contribution())
        return weight.value

    expected = 10 - 0.1 * n * (n + 1) / 2
    assert_parts(strategy, strategy.run(step), lambda _: expected)
    np.testing.assert_allclose(weight.value, expected, rtol=1e-6)


@pytest.mark.compatibility
def test_variables_assigned_before_are_seen_inside(strategy, execution) -> None:
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        counter = sg.Variable(1.0, aggregation="sum")

    def step():
        counter.assign_add(contribution())
        return merged(lambda s: counter.value * 2)

    assert_parts(strategy, strategy.run(step), lambda _: 2 + n * (n + 1))


@pytest.mark.compatibility
def test_calls_follow_one_another_and_nest_in_functions(strategy, execution) -> None:
    n = strategy.num_replicas_in_sync

    def total(x):
        return merged(lambda s, v: s.extended.reduce_to("sum", v, None), x)

    result = strategy.run(lambda: total(total(contribution()) + contribution()))
    assert_parts(strategy, result, lambda _: n * n * (n + 1) / 2 + n * (n + 1) / 2)


def test_exception_inside_comes_out_unchanged(strategy, execution) -> None:
    error = LookupError("in the merge")

    def merge(_):
        raise error

    with pytest.raises(LookupError, match="in the merge") as caught:
        strategy.run(lambda: merged(merge))
    assert caught.value is error
    assert not sg.has_strategy()


def test_what_cannot_be_called_is_refused(strategy, execution) -> None:
    with pytest.raises(TypeError, match="merge_fn=3 is of type int"):
        strategy.run(lambda: sg.get_replica_context().merge_call(3))


@pytest.mark.compatibility
def test_merge_call_works_outside_every_scope() -> None:
    context = sg.get_replica_context()
    result = context.merge_call(
        lambda s, v: s.reduce("SUM", v, axis=None) + 1.0, args=(jnp.float32(2.0),)
    )
    assert float(result) == 3.0


def test_different_numbers_of_calls_are_reported_eagerly(distributing) -> None:
    def step():
        if sg.get_replica_context().replica_id_in_sync_group == 0:
            merged(lambda _: None)

    sg.config.run_eagerly(True)
    try:
        with pytest.raises(RuntimeError, match="Replicas made different calls"):
            distributing.run(step)
    finally:
        sg.config.run_eagerly(False)


@pytest.mark.compatibility
def test_run_is_refused_while_a_step_runs(strategy, execution) -> None:
    with pytest.raises(RuntimeError, match="run was called in merge_call"):
        strategy.run(lambda: merged(lambda inner: inner.run(contribution)))


@pytest.mark.compatibility
def test_calls_that_not_every_replica_makes_are_refused(distributing) -> None:
    def total(value):
        return merged(lambda strategy, part: strategy.reduce("SUM", part, axis=None), value)

    def in_a_branch():
        is_first = sg.get_replica_context().replica_id_in_sync_group == 0
        return jax.lax.cond(is_first, lambda: total(contribution()), lambda: contribution())

    def in_a_loop():
        return jax.lax.while_loop(lambda v: v[()] < 99.0, total, contribution())

    def by_agreement():
        summed = total(contribution())
        return jax.lax.cond(summed > 1.0, lambda: total(summed), lambda: summed)

    for step in (in_a_branch, in_a_loop):
        with pytest.raises(RuntimeError, match="that not every replica may take"):
            distributing.run(step)
    n = distributing.num_replicas_in_sync
    assert_parts(distributing, distributing.run(by_agreement), lambda _: n * n * (n + 1) / 2)


@pytest.mark.compatibility
def test_variables_that_replicas_write_are_seen_as_from_outside(distributing, execution) -> None:
    n = distributing.num_replicas_in_sync
    with distributing.scope():
        summed, averaged, kept = (
            sg.Variable(10.0, synchronization="on_read", aggregation=aggregation, trainable=False)
            for aggregation in ("sum", "mean", "none")
        )

    def step():
        summed.assign(contribution())
        seen = merged(lambda _: summed.value + 0.0)
        merged(lambda inner: inner.extended.update(summed, lambda v: v.assign_add(1.0)))
        merged(lambda _: averaged.assign_add(2.0))
        added = summed.value + 0.0
        merged(lambda _: summed.assign(8.0))
        return seen, added, summed.value, averaged.value

    results = distributing.run(step)
    expected = (lambda _: n * (n + 1) / 2, lambda i: i + 2.0, lambda _: 8.0 / n, lambda _: 12.0)
    for result, of_replica in zip(results, expected, strict=True):
        assert_parts(distributing, result, of_replica)
    with pytest.raises(ValueError, match="ON_READ with aggregation NONE"):
        distributing.run(lambda: merged(lambda _: kept.value + 0.0))
    with pytest.raises(ValueError, match="assign_add was called in cross-replica context"):
        distributing.run(lambda: merged(lambda _: summed.assign_add(1.0)))


@pytest.mark.compatibility
def test_variable_without_aggregation_can_be_assigned_from_outside(distributing) -> None:
    with distributing.scope():
        kept = sg.Variable(1.0, synchronization="on_read", trainable=False)
    assert float(kept.assign(3.0)) == 3.0
    kept.assign_add(1.0)
    assert_parts(distributing, distributing.run(lambda: kept.value), lambda _: 4.0)
