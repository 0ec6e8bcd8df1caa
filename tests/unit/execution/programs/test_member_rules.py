"""Collectives of a step, by operations of a group of members that are threads of this process."""

from __future__ import annotations

import dataclasses
import itertools
import socket
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import stratagem as sg
from stratagem.devices.collectives.elastic_rounds import RoundOperation
from stratagem.devices.mesh import REPLICA_AXIS
from stratagem.execution.jaxprs import retrace
from stratagem.execution.programs import elastic_program as module
from stratagem.execution.programs.elastic_program import (
    Update,
    components_of_all,
    held_components,
    hold_components,
    merged_components,
    own_outputs,
    reason_to_wait,
    update_apart,
)
from stratagem.execution.programs.member_rules import member_rules
from stratagem.execution.tracing.arguments import flatten_arguments
from stratagem.execution.tracing.functionalize import Trace
from stratagem.execution.tracing.tracer import trace_replica_function
from stratagem.group.elastic.peer_connections import PeerConnections
from tests.unit.group.process_group.members import together

_COUNT = 2
_UFUNCS = {
    RoundOperation.SUM: np.add,
    RoundOperation.MAX: np.maximum,
    RoundOperation.MIN: np.minimum,
}


class _EagerRounds:
    """Operations that run at once, instead of within a program."""

    def __init__(self, peers: PeerConnections) -> None:
        self._peers = peers

    def combine(self, operation: RoundOperation, array: Any) -> jax.Array:
        own = np.asarray(array)
        result = np.empty(own.size, own.dtype)
        self._peers.reduce(own.ravel(), result, _UFUNCS[operation])
        return jnp.asarray(result.reshape(own.shape))

    def gather(self, array: Any, num_members: int) -> jax.Array:
        own = np.asarray(array)
        result = np.empty((num_members, *own.shape), own.dtype)
        self._peers.gather_into(own.ravel(), result.reshape(-1))
        return jnp.asarray(result)

    def all_to_all(self, array: Any) -> jax.Array:
        own = np.ascontiguousarray(array)
        result = np.empty_like(own)
        self._peers.all_to_all(own.ravel(), result.reshape(-1))
        return jnp.asarray(result)


def _by_members(step: Callable[[Any], Any], values: np.ndarray) -> list[Any]:
    """Returns the result of each member, from one trace of the step."""
    traced = jax.make_jaxpr(step, axis_env=[(REPLICA_AXIS, _COUNT)])(values[0])
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(_COUNT)]
    for one, other in itertools.combinations(range(_COUNT), 2):
        sockets[one][other], sockets[other][one] = socket.socketpair()

    def run(rank: int) -> Any:
        peers = PeerConnections(0, range(_COUNT), rank, sockets[rank], lambda waited_s: None)
        rounds: Any = _EagerRounds(peers)
        rules = member_rules(rounds, jnp.int32(rank), _COUNT)
        try:
            return [np.asarray(one) for one in retrace(traced, [values[rank]], rules=rules)]
        finally:
            peers.close()

    return together(_COUNT, run)


def _by_jax(step: Callable[[Any], Any], values: np.ndarray) -> list[Any]:
    mesh = Mesh(np.array(jax.devices("cpu")[:_COUNT]), (REPLICA_AXIS,))
    spec = PartitionSpec(REPLICA_AXIS)

    def body(part: Any) -> list[Any]:
        return [one[None] for one in jax.tree.leaves(step(part[0]))]

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    return [[np.asarray(one[rank]) for one in run(values)] for rank in range(_COUNT)]


_STEPS = {
    "psum": lambda x: jax.lax.psum(x * 2, REPLICA_AXIS),
    "psum of two": lambda x: jax.lax.psum((x, x.sum()), REPLICA_AXIS),
    "pmean": lambda x: jax.lax.pmean(x, REPLICA_AXIS),
    "pmax": lambda x: jax.lax.pmax(x, REPLICA_AXIS),
    "pmin": lambda x: jax.lax.pmin(-x, REPLICA_AXIS),
    "index": lambda x: x + jax.lax.axis_index(REPLICA_AXIS).astype(x.dtype),
    "index in a loop": lambda x: jax.lax.fori_loop(
        0, 3, lambda i, y: y + (i * jax.lax.axis_index(REPLICA_AXIS)).astype(y.dtype), x
    ),
    "all_gather": lambda x: jax.lax.all_gather(x, REPLICA_AXIS, axis=1),
    "all_gather, tiled": lambda x: jax.lax.all_gather(x, REPLICA_AXIS, axis=1, tiled=True),
    "psum_scatter": lambda x: jax.lax.psum_scatter(
        x, REPLICA_AXIS, scatter_dimension=1, tiled=True
    ),
    "all_to_all": lambda x: jax.lax.all_to_all(x, REPLICA_AXIS, split_axis=1, concat_axis=0),
    "all_to_all, tiled": lambda x: jax.lax.all_to_all(
        x, REPLICA_AXIS, split_axis=0, concat_axis=1, tiled=True
    ),
    "ppermute": lambda x: jax.lax.ppermute(x, REPLICA_AXIS, [(0, 1)]),
    "in a function": lambda x: jax.jit(lambda y: jax.lax.psum(y, REPLICA_AXIS))(x),
    "gradient": jax.grad(lambda x: (jax.lax.psum(x, REPLICA_AXIS) ** 2).sum()),
}


@pytest.mark.parametrize("name", _STEPS)
def test_members_compute_what_devices_do(name) -> None:
    values = np.random.default_rng(0).normal(size=(_COUNT, 4, 2)).astype(np.float32)
    found, expected = _by_members(_STEPS[name], values), _by_jax(_STEPS[name], values)
    for mine, theirs in zip(found, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


def _in_loop(x: Any) -> Any:
    return jax.lax.fori_loop(0, 2, lambda i, y: jax.lax.psum(y, REPLICA_AXIS), x)


def _in_groups(x: Any) -> Any:
    return jax.lax.psum(x, REPLICA_AXIS, axis_index_groups=[[0], [1]])


@pytest.mark.parametrize(
    ("step", "words"),
    [(_in_loop, "calls psum in a branch or a loop"), (_in_groups, "over groups of replicas")],
)
def test_what_has_no_order_is_refused(step, words) -> None:
    for error in _by_members(step, np.ones((_COUNT, 2), np.float32)):
        assert isinstance(error, NotImplementedError)
        assert words in str(error)


def test_another_axis_is_refused() -> None:
    def step(x: Any) -> Any:
        return jax.lax.psum(x, (REPLICA_AXIS, "other"))

    traced = jax.make_jaxpr(step, axis_env=[(REPLICA_AXIS, 2), ("other", 1)])(np.float32(1))
    rounds: Any = None
    with pytest.raises(NotImplementedError, match="the axis 'replica' alone"):
        retrace(traced, [np.float32(1)], rules=member_rules(rounds, jnp.int32(0), 2))


# Steps that may leave replicas out, and the reasons of others.


class _Variables:
    """A strategy of two devices, and variables of all kinds."""

    def __init__(self) -> None:
        self.strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        with self.strategy.scope():
            self.weight = sg.Variable(np.ones((3, 1), np.float32))
            self.statistic = sg.Variable(0.0, trainable=False)
            self.count = sg.Variable(
                0.0, trainable=False, synchronization="on_read", aggregation="sum"
            )

    def trace(self, fn: Callable[[Any], Any]) -> Trace:
        parts = np.arange(24, dtype=np.float32).reshape(2, 4, 3)
        value = self.strategy.distribute_values_from_function(
            lambda context: parts[context.replica_id_in_sync_group]
        )
        arguments = flatten_arguments((value,), {}, num_replicas=2)
        return trace_replica_function(self.strategy, fn, arguments)


@pytest.fixture
def variables() -> _Variables:
    return _Variables()


def _train(variables: _Variables, x: Any) -> Any:
    def loss() -> Any:
        return jnp.sum(jnp.square(x @ variables.weight.value)) / 8

    value, (gradient,) = sg.value_and_grad(loss, [variables.weight])
    context = sg.get_replica_context()
    variables.weight.assign_sub(0.1 * context.all_reduce("sum", gradient))
    return value


def _train_and_count(variables: _Variables, x: Any) -> Any:
    variables.count.assign_add(jnp.sum(x))
    return _train(variables, x), sg.get_replica_context().all_reduce("sum", jnp.sum(x))


def test_a_training_step_may_leave_replicas_out(variables) -> None:
    trace = variables.trace(lambda x: _train_and_count(variables, x))
    assert reason_to_wait(trace) is None
    written = [one is variables.count for one in trace.written]
    # A replica's count and loss are its own; the sum is not.
    assert own_outputs(trace) == [*written, True, False]
    assert any(written)


def _evaluate(variables: _Variables, x: Any) -> Any:
    variables.count.assign_add(jnp.sum(x @ variables.weight.value))


def _predict_with_dropout(variables: _Variables, x: Any) -> Any:
    variables.statistic.assign(variables.statistic + 1.0)
    return x @ variables.weight.value


def _train_apart(variables: _Variables, x: Any) -> Any:
    del x
    variables.weight.assign(variables.weight * 0.5)


def _gather(variables: _Variables, x: Any) -> Any:
    return _train(variables, x), sg.get_replica_context().all_gather(x, axis=0)


def _read_counts(variables: _Variables, x: Any) -> Any:
    variables.count.assign_add(jnp.sum(x))
    return _train(variables, x), sg.get_replica_context().all_reduce("sum", variables.count.value)


def _print(variables: _Variables, x: Any) -> Any:
    jax.debug.print("{}", x[0, 0])
    return _train(variables, x)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (_evaluate, "trains no variable"),
        (_predict_with_dropout, "trains no variable"),
        (_train_apart, "sums nothing over replicas"),
        (_gather, "exchange rows"),
        (_read_counts, "what each replica has counted"),
        (_print, "functions of the host"),
    ],
)
def test_other_steps_wait_for_all(variables, step, words) -> None:
    assert words in str(reason_to_wait(variables.trace(lambda x: step(variables, x))))


def test_a_variable_without_a_strategy_does_not_hinder(variables) -> None:
    foreign = keras.Variable(0.0, trainable=False)

    def step(x: Any) -> Any:
        foreign.assign(foreign + 1.0)
        return _train(variables, x)

    trace = variables.trace(step)
    assert reason_to_wait(trace) is None
    assert own_outputs(trace) == [False, False, True]


# What a carry may be, and what is refused.


@dataclasses.dataclass
class _Pair:
    total: Any
    last: Any


def _iterator(strategy: sg.Strategy) -> Any:
    return iter(strategy.distribute_dataset([(np.ones(4, "float32"), np.ones(4, "float32"))] * 4))


_WRONG = {
    "no_pair": (lambda carry, x, y: carry, 0.0, TypeError, "Expected a pair(?s:.)*return carry"),
    "structure": (
        lambda carry, x, y: ((carry, carry), None),
        0.0,
        ValueError,
        "received a carry of structure(?s:.)*the same keys",
    ),
    "shape": (
        lambda carry, x, y: ({"a": jnp.zeros(2)}, None),
        {"a": 0.0},
        ValueError,
        r"received carry\['a'\] of shape \(\)(?s:.)*returned shape \(2,\)",
    ),
    "dtype": (
        lambda carry, x, y: (jnp.float32(carry), None),
        0,
        ValueError,
        "dtype int32, but returned shape(?s:.)*cast the returned",
    ),
    "object": (
        lambda carry, x, y: (carry, None),
        {"a": "text"},
        TypeError,
        r"received carry\['a'\]='text' of type str(?s:.)*close over",
    ),
}


@pytest.mark.parametrize("name", _WRONG)
def test_wrong_carry_is_refused(execution, name) -> None:
    step, carry, error, message = _WRONG[name]
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with pytest.raises(error, match=message):
        strategy.run_steps(step, _iterator(strategy), 2, carry=carry)


def test_carry_whose_parts_differ_in_shape_is_refused() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    parts = sg.regroup([jnp.ones(1), jnp.ones(2)])
    with pytest.raises(ValueError, match=r"parts of shapes \[\(1,\), (?s:.)*pad the parts"):
        strategy.run_steps(lambda carry, x, y: (carry, None), _iterator(strategy), 2, carry=parts)


@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
def test_random_keys_are_carried(devices) -> None:
    def step(key: Any, x: Any, y: Any) -> Any:
        key, own = jax.random.split(key)
        return key, jax.random.uniform(own)

    strategy = sg.MirroredStrategy(devices)
    last, draws = strategy.run_steps(step, _iterator(strategy), 3, carry=jax.random.key(1))
    key, expected = jax.random.key(1), []
    for _ in range(3):
        key, own = jax.random.split(key)
        expected.append(float(jax.random.uniform(own)))
    for part, end in zip(strategy.local_results(draws), strategy.local_results(last), strict=True):
        np.testing.assert_allclose(part, expected)
        assert jax.random.key_data(end).tolist() == jax.random.key_data(key).tolist()


def test_dataclass_and_variable_in_a_carry() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        count = sg.Variable(1.0, aggregation="mean")

    def step(carry: _Pair, x: Any, y: Any) -> Any:
        count.assign_add(1.0)
        return _Pair(carry.total + carry.last, count), carry.last

    last, seen = strategy.run_steps(step, _iterator(strategy), 3, carry=_Pair(0.0, count))
    np.testing.assert_allclose(seen.components[1], [1.0, 2.0, 3.0])
    assert [float(part) for part in last.total.components] == [6.0, 6.0]
    assert [float(part) for part in last.last.components] == [4.0, 4.0]


# Updates of variables apart from the rest of a step; the sine stands for what members combine.


def _step(variables: list[Any], rows: jax.Array, rate: jax.Array) -> Any:
    """Returns new weights, a count and a component; then a result, and a sum of all."""
    weights, count, component = variables
    total = jnp.sin(rows.sum() * weights)
    moved = weights - rate * total / (1 + count)
    return [moved, count + 1, component + rows.sum()], [rows * 2, moved.sum()]


def _arguments() -> list[Any]:
    return [[jnp.arange(4.0), jnp.float32(3), jnp.float32(5)], jnp.ones(6), jnp.float32(0.1)]


def _run(is_updated: list[bool]) -> tuple[Any, list[Any], Update]:
    updates: list[Update] = []

    @jax.jit
    def part(*arguments: Any) -> Any:
        results, combined, update = update_apart(_step, arguments, is_updated, "sin")
        updates.append(update)
        return results, combined

    results, combined = part(*_arguments())
    return results, combined, updates[0]


def test_the_update_and_the_rest_are_the_whole_step() -> None:
    (values, others), combined, update = _run([True, True, False])
    expected_values, expected_others = _step(*_arguments())
    assert values[:2] == [None, None]
    np.testing.assert_allclose(values[2], expected_values[2])
    for mine, wanted in zip(others, expected_others, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-6)
    new = update.run(jax.tree.leaves(tuple(_arguments())), combined)
    assert sorted(new) == [0, 1]
    for place, value in new.items():
        np.testing.assert_allclose(value, expected_values[place], rtol=1e-6)


def test_the_update_takes_nothing_from_rows_but_what_is_combined() -> None:
    _, combined, update = _run([True, True, False])
    assert [np.shape(one) for one in combined] == [(4,)]
    rows = 3  # among the flat inputs
    assert rows not in update.inputs


def test_old_values_of_updated_variables_alone_are_donated() -> None:
    _, combined, update = _run([True, False, False])
    flat = jax.tree.leaves(tuple(_arguments()))
    update.run(flat, combined)
    assert [array.is_deleted() for array in flat] == [True, False, False, False, False]


def test_all_numbers_of_members_have_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_programs", {})
    first, second = (_run([True, True, False])[2] for _ in range(2))
    assert first.program is second.program
    assert _run([True, False, False])[2].program is not first.program


def test_a_variable_that_stays_is_no_part_of_the_update() -> None:
    def step(variables: list[Any]) -> Any:
        return [variables[0], jnp.sin(variables[1])]

    results, _, update = update_apart(step, [[jnp.ones(2), jnp.ones(2)]], [True, True], "sin")
    np.testing.assert_array_equal(results[0], np.ones(2))
    np.testing.assert_allclose(results[1], np.sin(np.ones(2)), rtol=1e-6)
    assert update.places == ()


# Components of ON_READ variables that each member of an elastic group keeps of all.


class _Gathers:
    """Stands in for rounds with a peer whose values are 1 larger; counts the messages."""

    def __init__(self) -> None:
        self.dtypes: list[Any] = []

    def gather(self, own: jax.Array, count: int) -> jax.Array:
        self.dtypes.append(own.dtype)
        return jnp.stack([own + rank for rank in range(count)])


def test_components_of_all_have_one_message_for_each_dtype() -> None:
    rounds: Any = _Gathers()
    own = [
        jnp.arange(6.0).reshape(1, 2, 3),
        jnp.array([4], jnp.int32),
        jnp.array([[0.5]]),
        jnp.array([[7, 8]], jnp.int32),
    ]
    found = components_of_all(own, rounds, 3)
    assert rounds.dtypes == [jnp.float32, jnp.int32]
    for mine, everyone in zip(own, found, strict=True):
        wanted = np.concatenate([np.asarray(mine) + rank for rank in range(3)])
        np.testing.assert_array_equal(everyone, wanted)
        assert everyone.dtype == mine.dtype


def test_without_components_nothing_is_sent() -> None:
    rounds: Any = _Gathers()
    assert components_of_all([], rounds, 2) == []
    assert rounds.dtypes == []


def test_those_that_took_no_part_keep_their_components() -> None:
    before = [np.array([1.0, 2.0, 3.0]), np.array([[1], [2], [3]])]
    new = [jnp.array([10.0, 20.0, 30.0]), jnp.array([[10], [20], [30]])]
    counted, rows = merged_components(new, before, [0, 2])
    np.testing.assert_array_equal(counted, [10.0, 2.0, 30.0])
    np.testing.assert_array_equal(rows, [[10], [2], [30]])
    np.testing.assert_array_equal(before[0], [1.0, 2.0, 3.0])


def test_components_are_held_until_the_variable_has_other_values() -> None:
    class Whole:
        storage: Any = None
        gathered: Any = None

        def hold(self, storage: Any, gathered: Any) -> None:
            self.storage, self.gathered = storage, gathered

    variables = [types.SimpleNamespace(whole=Whole(), stored=object()) for _ in range(2)]
    hold_components(variables, [np.array([1, 2]), None])
    first, second = held_components(variables)
    np.testing.assert_array_equal(first, [1, 2])
    assert second is variables[1].whole.gathered is None
    variables[0].stored = object()  # assigned since
    assert held_components(variables) == [None, None]
