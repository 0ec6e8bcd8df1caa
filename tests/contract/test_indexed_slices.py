"""Rows by index: reduced over replicas, applied to variables, with the numbers of the contract."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from tests.contract.parts import replica_ids, split
from tests.contract.rows import ROWS

# What the contract states: {4: [1, 1]} and {4: [2, 0], 7: [3, 3]}. A compiled program has as many
# rows on every replica, so that the first has one more that is zero.
PARTS = (
    ([[1.0, 1.0], [0.0, 0.0]], [4, 4]),
    ([[2.0, 0.0], [3.0, 3.0]], [4, 7]),
)
SUM = {4: [3.0, 1.0], 7: [3.0, 3.0]}


@pytest.fixture(
    params=[
        pytest.param(
            (name, way),
            id=f"{name}-{way}",
            marks=() if way in row.quick else pytest.mark.slow,
        )
        for name, row in ROWS.items()
        for way in ("compiled", "eager")
        # Eight replicas run op by op take ten times as long as two, for the same code.
        if row.num_replicas > 1 and (way == "compiled" or row.num_replicas == 2)
    ]
)
def either_way(request: pytest.FixtureRequest) -> Iterator[sg.Strategy]:
    """Each strategy that has several replicas, compiled; those that have two, eager as well."""
    name, way = request.param
    sg.config.run_eagerly(way == "eager")
    with ROWS[name].made() as strategy:
        yield strategy
    sg.config.run_eagerly(False)


def rows(strategy: sg.Strategy) -> sg.IndexedSlices:
    """The two parts for the first two replicas; what the others hold is zero."""
    zero = ([[0.0, 0.0], [0.0, 0.0]], [0, 0])
    parts = split(
        strategy,
        lambda i: [
            jnp.array(one, dtype)
            for one, dtype in zip(PARTS[i] if i < 2 else zero, ("float32", "int32"), strict=True)
        ],
    )
    return sg.IndexedSlices(*parts, dense_shape=(9, 2))


def whole(table: dict[int, list[float]], divisor: float = 1.0) -> np.ndarray:
    result = np.zeros((9, 2))
    for index, row in table.items():
        result[index] = np.array(row) / divisor
    return result


def assert_rows(slices: sg.IndexedSlices, expected: np.ndarray) -> None:
    assert isinstance(slices, sg.IndexedSlices)
    indices = np.asarray(slices.indices)
    true = indices < 9
    assert len(set(indices[true].tolist())) == true.sum(), "each index once"
    np.testing.assert_allclose(slices.to_dense(), expected, rtol=1e-6)


@pytest.mark.slow
def test_rows_are_reduced_by_index(either_way) -> None:
    n = either_way.num_replicas_in_sync
    value = rows(either_way)
    assert_rows(either_way.reduce("SUM", value, axis=None), whole(SUM))
    assert_rows(either_way.reduce("MEAN", value, axis=None), whole(SUM, n))

    def step(slices):
        context = sg.get_replica_context()
        mean = context.merge_call(
            lambda strategy, part: strategy.extended.reduce_to("MEAN", part, strategy),
            args=(slices,),
        )
        return context.all_reduce("SUM", slices), mean

    reduced, mean = either_way.run(step, args=(value,))
    for replica in (0, len(replica_ids(either_way)) - 1):
        assert_rows(sg.select_replica(replica, reduced), whole(SUM))
        assert_rows(sg.select_replica(replica, mean), whole(SUM, n))


def test_one_replica_adds_up_its_own_rows(sole, execution) -> None:
    slices = sg.IndexedSlices(jnp.array([[1.0, 1.0], [2.0, 0.0]]), jnp.array([4, 4]), (9, 2))
    expected = whole({4: [3.0, 1.0]})
    assert_rows(sole.reduce("SUM", slices, axis=None), expected)
    assert_rows(
        sole.run(lambda s: sg.get_replica_context().all_reduce("MEAN", s), (slices,)), expected
    )


def test_what_has_no_meaning_for_rows_is_refused(distributing) -> None:
    value = rows(distributing)
    with pytest.raises(NotImplementedError, match="received IndexedSlices"):
        distributing.gather(value, axis=0)
    with pytest.raises(NotImplementedError, match=r"axis=\(0,\) received IndexedSlices"):
        distributing.reduce("SUM", value, axis=0)
    with pytest.raises(NotImplementedError, match="all_gather received IndexedSlices"):
        distributing.run(lambda s: sg.get_replica_context().all_gather(s, axis=0), (value,))
    plain = sg.IndexedSlices(jnp.ones(1), jnp.zeros(1, int), (2,))
    with pytest.raises(ValueError, match="received a plain value IndexedSlices"):
        distributing.reduce("SUM", plain, axis=None)
    assert distributing.reduce("MEAN", plain, axis=None).values.tolist() == [1.0]


METHODS = {
    "scatter_add": lambda old, new: old + new,
    "scatter_sub": lambda old, new: old - new,
    "scatter_mul": lambda old, new: old * new,
    "scatter_div": lambda old, new: old / new,
    "scatter_min": min,
    "scatter_max": max,
    "scatter_update": lambda _, new: new,
}
SETTING = ("scatter_min", "scatter_max", "scatter_update")


def variable(strategy: sg.Strategy, **annotations: str) -> sg.Variable:
    with strategy.scope():
        return sg.Variable(np.full(3, 12.0, "float32"), trainable=False, **annotations)


def slices_of(value: float) -> sg.IndexedSlices:
    return sg.IndexedSlices(jnp.asarray(value)[None], jnp.array([1]))


@pytest.mark.parametrize(
    "aggregation",
    [
        pytest.param("sum", marks=pytest.mark.slow),
        pytest.param("mean", marks=pytest.mark.slow),
        "only_first_replica",
    ],
)
def test_rows_of_replicas_are_aggregated_then_applied(either_way, aggregation) -> None:
    n = either_way.num_replicas_in_sync
    is_sum = aggregation != "only_first_replica"
    methods = [method for method in METHODS if not (is_sum and method in SETTING)]
    variables = {method: variable(either_way, aggregation=aggregation) for method in methods}

    def step():
        replica_id = sg.get_replica_context().replica_id_in_sync_group
        for method, v in variables.items():
            getattr(v, method)(slices_of(jnp.asarray(replica_id + 1, "float32")))

    either_way.run(step)
    total = n * (n + 1) / 2
    delta = {"sum": total, "mean": total / n, "only_first_replica": 1.0}[aggregation]
    for method, v in variables.items():
        expected = [12.0, METHODS[method](12.0, delta), 12.0]
        np.testing.assert_allclose(v.value, expected, rtol=1e-6, err_msg=method)


@pytest.mark.parametrize("method", SETTING)
def test_minima_maxima_and_new_values_of_replicas_have_no_sum(distributing, method) -> None:
    v = variable(distributing, aggregation="mean")
    with pytest.raises(NotImplementedError, match=f"{method} was called in a replica function"):
        distributing.run(lambda: getattr(v, method)(slices_of(1.0)))


@pytest.mark.slow
def test_rows_are_applied_as_they_are_outside_the_replicas(distributing) -> None:
    direct = {method: variable(distributing) for method in METHODS}
    updated = {method: variable(distributing) for method in METHODS}

    def update(strategy):
        for method, v in updated.items():
            strategy.extended.update(
                v,
                lambda one, slices, method=method: getattr(one, method)(slices),
                args=(slices_of(5.0),),
            )

    distributing.run(lambda: sg.get_replica_context().merge_call(update))
    for method, v in direct.items():
        expected = [12.0, METHODS[method](12.0, 5.0), 12.0]
        np.testing.assert_allclose(getattr(v, method)(slices_of(5.0)), expected, err_msg=method)
        np.testing.assert_allclose(updated[method].value, expected, err_msg=method)


def test_the_same_rows_need_no_aggregation_and_others_do(either_way) -> None:
    v = variable(either_way)
    either_way.run(lambda: v.scatter_max(slices_of(20.0)))
    assert v.value.tolist() == [12.0, 20.0, 12.0]

    def step():
        replica_id = sg.get_replica_context().replica_id_in_sync_group
        v.scatter_add(slices_of(jnp.asarray(replica_id, "float32")))

    with pytest.raises(ValueError, match="aggregation"):
        either_way.run(step)


def test_distributed_rows_are_aggregated_outside_the_replicas(distributing) -> None:
    with distributing.scope():
        summed, plain = (
            sg.Variable(np.zeros((9, 2), "float32"), aggregation=one) for one in ("sum", "none")
        )
    value = rows(distributing)
    np.testing.assert_allclose(summed.scatter_add(value), whole(SUM))
    with pytest.raises(TypeError, match="received rows that differ between replicas"):
        plain.scatter_add(value)
    reduced = distributing.extended.reduce_to("SUM", value, plain)
    np.testing.assert_allclose(plain.scatter_add(reduced), whole(SUM))


def test_scatter_of_what_has_no_rows_is_refused(distributing) -> None:
    own = variable(distributing, synchronization="on_read", aggregation="sum")
    with pytest.raises(NotImplementedError, match="an ON_READ variable"):
        distributing.run(lambda: own.scatter_add(slices_of(1.0)))
    with pytest.raises(TypeError, match="received a value of type Array"):
        variable(distributing).scatter_add(jnp.ones(3))
