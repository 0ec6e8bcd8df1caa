"""ReplicaScope: reads and writes of variables as inputs and outputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax

import stratagem as sg
from stratagem.execution.tracing.functionalize import ReplicaScope, current_scope


@pytest.fixture
def variable():
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        return sg.Variable(1.0, name="weight")


def test_reads_come_from_the_reader_and_are_noted(variable) -> None:
    other = keras.Variable(5.0)
    scope = ReplicaScope(lambda v: jnp.float32(7.0) if v is variable else None)
    with scope:
        assert float(variable.value) == 7.0
        assert float(variable + 1.0) == 8.0
        assert float(other.value) == 5.0
    assert float(variable.value) == 1.0
    assert scope.read_ids == {id(variable), id(other)}
    assert not scope.writes


def test_writes_stay_in_the_scope_and_later_reads_see_them(variable) -> None:
    scope = ReplicaScope(lambda _: jnp.float32(7.0))
    with scope:
        variable.assign(jnp.float32(2.0))
        variable.assign_add(jnp.float32(0.5))
        assert float(variable.value) == 2.5
    assert float(variable.value) == 1.0
    assert list(scope.writes.values()) == [variable]
    assert float(scope.written_value(variable)) == 2.5


def test_value_that_is_set_is_read_but_is_no_write(variable) -> None:
    scope = ReplicaScope(lambda _: None)
    scope.set_value(variable, jnp.float32(9.0))
    with scope:
        assert float(variable.value) == 9.0
    assert not scope.writes
    assert id(variable) in scope.read_ids


def test_forgetting_makes_reads_go_to_the_reader_again(variable) -> None:
    scope = ReplicaScope(lambda _: jnp.float32(7.0))
    with scope:
        variable.assign(jnp.float32(2.0))
        scope.mark_unproven(variable)
        scope.forget()
        assert float(variable.value) == 7.0
    assert not scope.writes
    assert not scope.unproven


def test_a_new_write_is_no_longer_unproven(variable) -> None:
    with ReplicaScope(lambda _: jnp.float32(7.0)) as scope:
        scope.add_update((variable, jnp.float32(1.0)))
        scope.mark_unproven(variable)
        assert list(scope.unproven.values()) == [variable]
        scope.add_update((variable, jnp.float32(2.0)))
        assert not scope.unproven


def test_write_to_a_variable_of_no_strategy_is_still_to_be_proven() -> None:
    plain = keras.Variable(1.0)
    scope = ReplicaScope(lambda _: None)
    with scope:
        plain.assign(2.0)
    assert list(scope.unproven.values()) == [plain]
    assert float(plain.value) == 1.0


def test_innermost_scope_is_the_current_one_until_it_ends(variable) -> None:
    assert current_scope() is None
    outer, inner = (ReplicaScope(lambda _, v=value: jnp.float32(v)) for value in (1.0, 2.0))
    with outer:
        assert current_scope() is outer
        with inner:
            assert current_scope() is inner
            assert float(variable.value) == 2.0
        assert current_scope() is outer
        assert float(variable.value) == 1.0
    assert current_scope() is None


def test_scope_ends_with_an_exception_that_leaves_it(variable) -> None:
    with pytest.raises(LookupError, match="inside"), ReplicaScope(lambda _: None):
        raise LookupError("inside")
    assert current_scope() is None
    variable.assign(2.0)
    assert float(variable.value) == 2.0


def test_plain_stateless_scope_of_keras_inside_goes_before(variable) -> None:
    """A user's own stateless call, of a model say, within a replica function."""
    with ReplicaScope(lambda _: jnp.float32(7.0)) as outer:
        with keras.StatelessScope([(variable, jnp.float32(3.0))]) as inner:
            assert float(variable.value) == 3.0
            variable.assign(jnp.float32(4.0))
        assert float(inner.get_current_value(variable)) == 4.0
        assert float(variable.value) == 7.0
    assert not outer.writes


def test_written_value_has_the_dtype_of_the_variable() -> None:
    half = keras.Variable(1.0, dtype="bfloat16")
    with ReplicaScope(lambda _: None) as scope:
        scope.add_update((half, jnp.float32(2.0)))
    assert scope.written_value(half).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "inner",
    [
        lambda fn, x: jax.jit(fn)(x),
        lambda fn, x: lax.cond(x > 0, fn, lambda y: y, x),
        lambda fn, x: lax.scan(lambda carry, _: (fn(carry), None), x, None, length=2)[0],
        lambda fn, x: lax.fori_loop(0, 2, lambda _, carry: fn(carry), x),
        lambda fn, x: jax.grad(fn)(x),
        lambda fn, x: jax.checkpoint(fn)(x),
    ],
    ids=["jit", "cond", "scan", "fori", "grad", "checkpoint"],
)
def test_assignment_in_an_inner_function_is_reported(variable, inner) -> None:
    """Its value ends with that function."""

    def assign(y):
        variable.assign(y)
        return y * 2.0

    def outer(x):
        with ReplicaScope(lambda _: jnp.float32(7.0)) as scope:
            inner(assign, x)
        return scope.written_value(variable)

    words = r"(?s)weight' was assigned inside .*lax\.cond.*return the value"
    with pytest.raises(ValueError, match=words):
        jax.make_jaxpr(outer)(np.float32(1.0))


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_jit_in_a_step_sees_the_rows_and_the_replica_of_its_own_step(num_replicas) -> None:
    """JAX caches it by shapes, which a short last batch shares with full ones."""
    strategy = sg.MirroredStrategy([f"cpu:{index}" for index in range(num_replicas)])
    mean = jax.jit(lambda x: sg.compute_average_loss(x))
    dataset = strategy.distribute_dataset([np.arange(4.0), np.arange(4.0, 7.0)])
    means = [strategy.run(lambda x: mean(x), args=(batch,)) for batch in dataset]
    assert [float(strategy.reduce("SUM", one, axis=None)) for one in means] == [1.5, 5.0]

    own_id = jax.jit(lambda x: x + sg.get_replica_context().replica_id_in_sync_group)
    for offset in range(2):
        ids = strategy.run(lambda offset=offset: own_id(0) + offset)
        expected = [index + offset for index in range(num_replicas)]
        assert [int(one) for one in strategy.local_results(ids)] == expected


def test_jit_in_a_step_reads_the_present_value_of_a_variable(variable) -> None:
    double = jax.jit(lambda x: 2.0 * x * variable.value)

    def step():
        before = double(1.0)
        _, (gradient,) = sg.value_and_grad(lambda: double(1.0) ** 2, [variable])
        variable.assign_add(gradient)
        return before, gradient, double(1.0), lax.cond(before > 0, double, lambda x: x, 1.0)

    strategy = variable.distribute_strategy
    for before in (1.0, 9.0):
        results = [float(strategy.local_results(one)[1]) for one in strategy.run(step)]
        after = before + 8.0 * before
        assert results == [2.0 * before, 8.0 * before, 2.0 * after, 2.0 * after]
