"""What a step needs from outside: unused parts left out, and lookups that are told apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from stratagem.devices.mesh import REPLICA_AXIS
from stratagem.execution.embeddings.lookups import as_row_numbers
from stratagem.execution.tracing.remote_state import Lookup, without_unused
from tests.parity.comparison import mirrored

_seen: list[float] = []


def _note(value: Any) -> None:
    _seen.append(float(np.asarray(value)))


def reduced(
    function: Callable[..., Any], *args: Any, kept: Any = None, **options: Any
) -> tuple[ClosedJaxpr, list[bool]]:
    closed = jax.make_jaxpr(function)(*args)
    is_kept = kept or [False] * len(closed.jaxpr.invars)
    jaxpr, stays = without_unused(closed.jaxpr, is_kept, **options)
    return ClosedJaxpr(jaxpr, closed.consts), stays


def names_of(closed: ClosedJaxpr) -> list[str]:
    return [eqn.primitive.name for eqn in closed.jaxpr.eqns]


def test_what_no_result_depends_on_is_left_out() -> None:
    def function(a: Any, b: Any, c: Any) -> Any:
        unused = jnp.sin(b) * c
        assert unused.shape == ()
        return jnp.cos(a) * 2.0

    closed, stays = reduced(function, 1.0, 2.0, 3.0)
    assert stays == [True, False, False]
    assert names_of(closed) == ["cos", "mul"]
    np.testing.assert_allclose(jaxpr_as_fun(closed)(0.5), [2 * np.cos(0.5)], rtol=1e-6)


def test_inputs_that_are_kept_stay_in_their_places() -> None:
    closed, stays = reduced(lambda a, b, c: a - c, 5.0, 7.0, 3.0, kept=[False, True, False])
    assert stays == [True, True, True]
    np.testing.assert_allclose(jaxpr_as_fun(closed)(5.0, 7.0, 3.0), [2.0])
    closed, stays = reduced(lambda a, b, c: b * 1.0, 5.0, 7.0, 3.0, kept=[True, False, False])
    assert stays == [True, True, False]
    np.testing.assert_allclose(jaxpr_as_fun(closed)(5.0, 7.0), [7.0])


def test_results_that_are_inputs_or_numbers_need_nothing() -> None:
    closed, stays = reduced(lambda a, b: (b, 3.0, b), 1.0, 2.0)
    assert stays == [False, True]
    assert names_of(closed) == []
    assert [float(one) for one in jaxpr_as_fun(closed)(2.0)] == [2.0, 3.0, 2.0]


def test_constants_are_kept() -> None:
    table = np.arange(4.0, dtype="float32")
    closed, stays = reduced(lambda a, b: jnp.asarray(table)[a], 2, 1.0)
    assert stays == [True, False]
    assert float(jaxpr_as_fun(closed)(jnp.asarray(2))[0]) == 2.0


def test_all_results_of_what_is_needed_in_part_are_computed() -> None:
    def function(a: Any, b: Any) -> Any:
        (first, _), _ = jax.lax.scan(lambda c, _: ((c[0] + 1.0, c[1] * b), None), (a, b), length=3)
        return first

    closed, stays = reduced(function, 1.0, 2.0)
    assert stays == [True, True]
    np.testing.assert_allclose(jaxpr_as_fun(closed)(1.0, 2.0), [4.0])


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("kind", ["io_callback", "debug"])
def test_what_is_done_besides_stays_where_it_is_to(kind, keeps) -> None:
    def function(a: Any, b: Any) -> Any:
        if kind == "debug":
            jax.debug.callback(_note, b)
        else:
            io_callback(_note, None, b)
        return a + 1.0

    closed, stays = reduced(function, 1.0, 2.0, keeps_effects=keeps)
    assert stays == [True, keeps]
    _seen.clear()
    args = [value for value, stay in zip((1.0, 2.0), stays, strict=True) if stay]
    results = jax.jit(jaxpr_as_fun(closed))(*map(jnp.asarray, args))
    np.testing.assert_allclose(results, [2.0])
    jax.effects_barrier()
    assert _seen == ([2.0] if keeps else [])


def test_callback_whose_result_is_needed_stays() -> None:
    def function(a: Any) -> Any:
        return io_callback(lambda a: np.float32(a) * 3, jnp.zeros(()), a)

    closed, stays = reduced(function, 2.0, keeps_effects=False)
    assert stays == [True]
    np.testing.assert_allclose(jax.jit(jaxpr_as_fun(closed))(jnp.asarray(2.0)), [6.0])


def test_naming_a_mesh_axis_is_no_reason_to_stay() -> None:
    mesh = mirrored(2).topology.mesh

    def step(a: Any, b: Any) -> Any:
        jax.lax.psum(b, REPLICA_AXIS)
        return a * 2.0

    split = jax.sharding.PartitionSpec(REPLICA_AXIS)
    closed = jax.make_jaxpr(
        jax.shard_map(step, mesh=mesh, in_specs=(split, split), out_specs=split, check_vma=False)
    )(np.ones(2, "float32"), np.ones(2, "float32"))
    (eqn,) = [one for one in closed.jaxpr.eqns if one.primitive.name == "shard_map"]
    jaxpr, stays = without_unused(eqn.params["jaxpr"], [False, False])
    assert stays == [True, False]
    assert [one.primitive.name for one in jaxpr.eqns] == ["mul"]


def test_lookups_are_alike_in_one_table_and_of_one_shape() -> None:
    one, two = (keras.Variable(np.zeros((4, 2), "float32")) for _ in range(2))
    lookup = Lookup(one, (3, 2), "float32")
    assert lookup.is_like(Lookup(one, (3, 2), "float32"))
    assert not lookup.is_like(Lookup(one, (2, 2), "float32"))
    assert not lookup.is_like(Lookup(two, (3, 2), "float32"))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("uint8", "int32"), ("int8", "int32"), ("int16", "int32"), ("int32", "int32")],
)
def test_ids_of_few_bits_become_numbers_of_rows(dtype, expected) -> None:
    ids = as_row_numbers(jnp.asarray([1, 100], dtype))
    assert ids.dtype == expected
    assert ids.tolist() == [1, 100]
