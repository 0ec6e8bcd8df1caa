"""State that a function hands from step to step in run_steps, against a loop in NumPy."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

import stratagem as sg
from tests.contract.parts import assert_parts, contribution, seldom_eager

_BATCHES = [np.arange(8, dtype="float32") + step for step in range(5)] + [np.ones(3, "float32")]


def _iterator(strategy: sg.Strategy) -> Any:
    return iter(strategy.distribute_dataset([(batch, 2 * batch) for batch in _BATCHES]))


def _sum_of_true_rows(rows: Any) -> Any:
    return jnp.sum(jnp.where(sg.get_replica_context().example_mask, rows, 0))


def _step(carry: Any, x: Any, y: Any) -> Any:
    """Takes the parts of a batch, as in `run(step, args=batch)`."""
    total = carry["total"] + _sum_of_true_rows(y - x)
    return {"total": total, "count": carry["count"] + 1}, carry["count"]


def _totals(strategy: sg.Strategy, num_steps: int) -> list[list[float]]:
    """The sum of each replica's rows after each step: parts are of ceil(B / n) rows."""
    n = strategy.num_replicas_in_sync
    sums = []
    for batch in _BATCHES[:num_steps]:
        size = -(-len(batch) // n)
        sums.append([float(batch[i * size : (i + 1) * size].sum()) for i in range(n)])
    return np.cumsum(sums, axis=0).tolist()


@seldom_eager
def test_carry_goes_from_step_to_step_and_from_call_to_call(strategy, execution) -> None:
    iterator = _iterator(strategy)
    initial = {"total": jnp.float32(0), "count": 0}
    carry, counts = strategy.run_steps(_step, iterator, 2, carry=initial)
    assert_parts(strategy, counts, lambda _: [0, 1])
    assert_parts(strategy, carry["total"], lambda i: _totals(strategy, 2)[-1][i])
    kept = carry
    carry, counts = strategy.run_steps(_step, iterator, 10, carry=carry)
    assert_parts(strategy, counts, lambda _: [2, 3, 4, 5])
    assert_parts(strategy, carry["total"], lambda i: _totals(strategy, 6)[-1][i])
    assert_parts(strategy, carry["count"], lambda _: 6)
    # Each call copies what it is given.
    assert_parts(strategy, kept["total"], lambda i: _totals(strategy, 2)[-1][i])
    assert float(initial["total"]) == 0.0


def test_carry_of_each_replica_and_results_that_are_reduced(strategy, execution) -> None:
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        variable = sg.Variable(1.0, aggregation="mean")

    def step(carry: Any, batch: Any) -> Any:
        own, shared = carry
        variable.assign_add(1.0)
        return (own + contribution(), shared + variable), own

    start = strategy.distribute_values_from_function(
        lambda context: jnp.float32(10 * context.replica_id_in_sync_group)
    )
    carry, sums = strategy.run_steps(step, _iterator(strategy), 3, carry=(start, 0.0), reduce="sum")
    assert_parts(strategy, carry[0], lambda i: 10 * i + 3 * (i + 1.0))
    assert_parts(strategy, carry[1], lambda _: 2.0 + 3.0 + 4.0)
    first, per_step = 10 * n * (n - 1) / 2, n * (n + 1) / 2
    np.testing.assert_allclose(sums, [first + k * per_step for k in range(3)])
    assert_parts(strategy, start, lambda i: 10 * i)


def test_program_of_a_carry_is_traced_once(strategy) -> None:
    num_traces = 0

    def step(carry: Any, batch: Any) -> Any:
        nonlocal num_traces
        num_traces += 1
        return carry + 1, None

    iterator = _iterator(strategy)
    carry: Any = 0
    for _ in range(2):
        carry, nothing = strategy.run_steps(step, iterator, 2, carry=carry)
    assert nothing is None
    assert num_traces == 1
    assert_parts(strategy, carry, lambda _: 4)
