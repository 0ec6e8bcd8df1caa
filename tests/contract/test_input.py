"""Distributed datasets and many steps a call, on every strategy, compiled and eager."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from tests.contract.parts import parts_of_all, seldom_eager

_X = np.random.default_rng(0).normal(size=(23, 3)).astype("float32")
_Y = np.random.default_rng(1).normal(size=(23, 1)).astype("float32")
_BATCH_SIZE = 5


def _dataset(strategy: sg.Strategy, **options: Any) -> sg.DistributedDataset:
    return strategy.distribute_dataset(
        sg.input.Dataset((_X, _Y), batch_size=_BATCH_SIZE), sg.InputOptions(**options)
    )


def _global_batches() -> list[tuple[Any, Any]]:
    rows = range(0, len(_X), _BATCH_SIZE)
    return [(_X[i : i + _BATCH_SIZE], _Y[i : i + _BATCH_SIZE]) for i in rows]


def _rows(strategy: sg.Strategy, value: Any) -> Any:
    return np.concatenate(parts_of_all(strategy, value))


def test_parts_of_all_replicas_are_the_batch(strategy: sg.Strategy) -> None:
    batches = list(_dataset(strategy))
    for (x, y), (whole_x, whole_y) in zip(batches, _global_batches(), strict=True):
        np.testing.assert_array_equal(_rows(strategy, x), whole_x)
        np.testing.assert_array_equal(strategy.gather(y, axis=0), whole_y)


@seldom_eager
@pytest.mark.usefixtures("execution")
def test_replica_function_sees_true_rows_only(strategy: sg.Strategy) -> None:
    @jax.jit
    def masked_total(x: Any, mask: Any) -> Any:
        return jnp.sum(jnp.where(mask[:, None], x, 0))

    def step(batch: Any) -> Any:
        context = sg.get_replica_context()
        counted = jnp.asarray(context.num_examples, "int32")
        return masked_total(batch[0], context.example_mask), counted

    for batch, (whole, _) in zip(_dataset(strategy), _global_batches(), strict=True):
        total, counted = strategy.run(step, args=(batch,))
        np.testing.assert_allclose(_total(strategy, total), whole.sum(), rtol=1e-5)
        assert _total(strategy, counted) == len(whole)


def _total(strategy: sg.Strategy, value: Any) -> Any:
    return sum(parts_of_all(strategy, value))


class _Regression:
    """A loop of a user's own: least squares by gradient descent."""

    def __init__(self, strategy: sg.Strategy) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.weights = sg.Variable(np.zeros((3, 1), "float32"), aggregation="sum")
            self.num_seen = sg.Variable(
                np.zeros((), "float32"), synchronization="on_read", aggregation="sum"
            )

    def step(self, batch: Any) -> Any:
        x, y = batch
        context = sg.get_replica_context()

        def loss() -> Any:
            errors = jnp.square(x @ self.weights.value - y).mean(axis=-1)
            return sg.compute_average_loss(errors)

        value, (grad,) = sg.value_and_grad(loss, [self.weights])
        self.weights.assign_sub(0.1 * grad)
        self.num_seen.assign_add(jnp.asarray(context.num_examples, "float32"))
        return value

    @staticmethod
    def by_hand() -> tuple[list[float], Any]:
        weights, losses = np.zeros((3, 1), "float32"), []
        for x, y in _global_batches():
            error = x @ weights - y
            losses.append(float(np.mean(error**2)))
            weights = weights - 0.1 * 2 * x.T @ error / len(x)
        return losses, weights


@seldom_eager
@pytest.mark.usefixtures("execution")
def test_loop_over_uneven_batches_gives_the_numbers_of_one_device(strategy: sg.Strategy) -> None:
    regression = _Regression(strategy)
    losses = [
        _total(strategy, strategy.run(regression.step, args=(batch,)))
        for batch in _dataset(strategy)
    ]
    expected, weights = _Regression.by_hand()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(regression.weights.value, weights, rtol=1e-4, atol=1e-6)
    assert float(regression.num_seen.value) == len(_X)


_COLUMNS = {
    "strings": [f"name {index}" for index in range(7)],
    "bytes": [b"%d" % index for index in range(7)],
    "objects": np.array([f"name {index}" for index in range(7)], object),
    "dates": np.arange(7).astype("datetime64[D]"),
}


def _beside() -> list[dict[str, Any]]:
    """Batches of 5 and 2 rows with columns that no program takes; one has equal rows."""
    columns = {name: np.asarray(column) for name, column in _COLUMNS.items()}
    columns["equal"] = np.repeat("a", 7)
    return [
        {"x": _X[rows], **{name: column[rows] for name, column in columns.items()}}
        for rows in (slice(5), slice(5, 7))
    ]


@seldom_eager
def test_columns_that_no_program_takes_are_passed_by(strategy: sg.Strategy, execution) -> None:
    batches = _beside()
    sums = [np.sum(batch["x"], dtype="float64") for batch in batches]

    def total(batch: Any) -> Any:
        mask = sg.get_replica_context().example_mask
        return jnp.sum(jnp.where(mask[:, None], batch["x"], jnp.float32(0)))

    dataset = strategy.distribute_dataset(batches)
    for batch, whole, expected in zip(dataset, batches, sums, strict=True):
        result = strategy.reduce("SUM", strategy.run(total, args=(batch,)), axis=None)
        np.testing.assert_allclose(float(result), expected, rtol=1e-5)
        for name in ("strings", "bytes"):  # others are not sent to other processes
            np.testing.assert_array_equal(_rows(strategy, batch[name]), whole[name])
    results = strategy.run_steps(total, iter(dataset), 2, reduce="sum")
    np.testing.assert_allclose(results, sums, rtol=1e-5)


_USES = {
    "jnp": lambda name: jnp.asarray(name),
    "numpy": lambda name: np.asarray(name),
    "keras": lambda name: keras.ops.convert_to_tensor(name),
    "compared": lambda name: name == "a",
    "indexed": lambda name: name[0],
    "iterated": lambda name: [*name],
    "counted": lambda name: len(name),
    "shape": lambda name: name.shape,
    "condition": lambda name: bool(name),
    "formatted": lambda name: f"{name}",
    "returned": lambda name: {"a": name},
}


@pytest.mark.parametrize("use", _USES)
@pytest.mark.parametrize("many", [False, True])
def test_column_that_no_program_takes_is_refused_where_it_is_used(
    distributing: sg.Strategy, use: str, many: bool
) -> None:
    iterator = iter(distributing.distribute_dataset(_beside()))

    def step(batch: Any) -> Any:
        return _USES[use](batch["strings"])

    def call() -> None:
        if many:
            distributing.run_steps(step, iterator, 1)
        else:
            distributing.run(step, args=(next(iterator),))

    with pytest.raises((TypeError, AttributeError), match=r"(?s)take no strings.*outside.*SG904"):
        call()


def test_programs_are_shared_by_batches_of_other_strings(distributing: sg.Strategy) -> None:
    first, traces = _beside()[0], list[Any]()

    def count(batch: Any) -> None:
        traces.append(batch["x"].shape)

    for batch in distributing.distribute_dataset(
        [first, first | {"strings": first["strings"][::-1]}]
    ):
        distributing.run(count, args=(batch,))
    assert len(traces) == 1


@seldom_eager
@pytest.mark.usefixtures("execution")
@pytest.mark.parametrize(
    ("group", "reduce", "buffer_size"),
    [pytest.param(1, "sum", 1, marks=pytest.mark.slow), (2, None, 0), (20, "sum", 2)],
)
def test_many_steps_a_call_are_as_many_calls(
    strategy: sg.Strategy, reduce: str | None, group: int, buffer_size: int
) -> None:
    regression = _Regression(strategy)
    iterator = iter(_dataset(strategy, per_replica_buffer_size=buffer_size))
    losses: list[float] = []
    while True:
        try:
            results = strategy.run_steps(regression.step, iterator, group, reduce=reduce)
        except StopIteration:
            break
        losses += np.atleast_1d(_total(strategy, results)).tolist()
    expected, weights = _Regression.by_hand()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(regression.weights.value, weights, rtol=1e-4, atol=1e-6)


@seldom_eager
@pytest.mark.usefixtures("execution")
def test_size_of_groups_may_change_between_calls(strategy: sg.Strategy) -> None:
    iterator = iter(_dataset(strategy, per_replica_buffer_size=2))
    x, _ = next(iterator)
    totals = [_total(strategy, strategy.run(jnp.sum, args=(x,)))]
    for group in (2, 1, 4):
        results = strategy.run_steps(_sum_of_true_rows, iterator, group)
        totals += np.atleast_1d(_total(strategy, results)).tolist()
    totals[0] = _X[:_BATCH_SIZE].sum()  # whose padding was not masked
    np.testing.assert_allclose(totals, [x.sum() for x, _ in _global_batches()], rtol=1e-4)
    with pytest.raises(StopIteration):
        strategy.run_steps(_sum_of_true_rows, iterator, 1)


def _sum_of_true_rows(batch: Any) -> Any:
    mask = sg.get_replica_context().example_mask
    return jnp.sum(jnp.where(mask[:, None], batch[0], 0))


@seldom_eager
@pytest.mark.usefixtures("execution")
def test_rows_of_many_steps_are_true_rows(strategy: sg.Strategy) -> None:
    iterator = iter(_dataset(strategy))
    rows = strategy.run_steps(lambda batch: 2 * batch[0], iterator, 4)
    np.testing.assert_allclose(
        np.concatenate(parts_of_all(strategy, rows), axis=1),
        2 * _X[:20].reshape(4, _BATCH_SIZE, 3),
        rtol=1e-6,
    )


@seldom_eager
@pytest.mark.usefixtures("execution")
def test_results_of_steps_that_cannot_be_stacked_are_refused(strategy: sg.Strategy) -> None:
    iterator = iter(_dataset(strategy))
    with pytest.raises(
        sg.errors.InvalidArgumentError, match=r"arrays of different shapes(?s:.)*sums or"
    ):
        strategy.run_steps(lambda batch: batch[0], iterator, 10)


@pytest.mark.usefixtures("execution")
def test_objects_of_steps_come_back_as_they_are(strategy: sg.Strategy) -> None:
    iterator = iter(_dataset(strategy))
    assert strategy.run_steps(lambda _: ("text", None), iterator, 3) == ("text", None)
    assert strategy.run_steps(lambda _: ("text", None), iterator, 3) == ("text", None)


def test_program_of_many_steps_is_traced_once(strategy: sg.Strategy) -> None:
    num_traces = 0

    def step(batch: Any) -> Any:
        nonlocal num_traces
        num_traces += 1
        return batch[0].sum()

    for _ in range(2):
        iterator = iter(_dataset(strategy))
        strategy.run_steps(step, iterator, 2, reduce="mean")
        strategy.run_steps(step, iterator, 2, reduce="mean")
    assert num_traces == 1


def _uneven() -> list[tuple[Any, Any]]:
    return [({"labeled": _X[:few], "more": _X[few:]}, _Y[:few]) for few in (4, 4, 7)]


def test_arrays_of_a_batch_may_differ_in_their_rows_under_one_replica(sole, execution) -> None:
    def step(x: Any, y: Any) -> Any:
        assert sg.get_replica_context().num_examples == len(x["labeled"])
        return x["labeled"].sum(), x["more"].sum(), y.sum()

    dataset = sole.distribute_dataset(_uneven())
    expected = [[x["labeled"].sum(), x["more"].sum(), y.sum()] for x, y in _uneven()]
    got = [[*map(float, sole.run(step, args=batch))] for batch in dataset]
    np.testing.assert_allclose(got, expected, rtol=1e-4)
    steps = sole.run_steps(step, iter(dataset), 3)
    np.testing.assert_allclose(np.transpose(steps), expected, rtol=1e-4)


@pytest.mark.parametrize("per_replica", [False, True])
def test_replicas_cannot_share_arrays_that_differ_in_their_rows(distributing, per_replica) -> None:
    dataset = distributing.distribute_dataset(_uneven())
    if per_replica:
        dataset = distributing.distribute_datasets_from_function(lambda _: _uneven())
    with pytest.raises(ValueError, match=r"(?s)which \d replicas share.*sg.OneDeviceStrategy"):
        next(iter(dataset))
