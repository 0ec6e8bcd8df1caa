"""Jaxprs: parts without what is unused, calls and elements, and evaluation outside of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from stratagem.devices.mesh import REPLICA_AXIS
from stratagem.execution.jaxprs import (
    called_jaxpr,
    inner_jaxprs,
    is_by_element,
    retrace,
    without_unused,
)
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


_TABLE = np.arange(4.0, dtype="float32")


def _scanned(a: Any, b: Any, c: Any) -> Any:
    """The first of two carried values; both are computed."""
    return jax.lax.scan(lambda c, _: ((c[0] + 1.0, c[1] * b), None), (a, b), length=3)[0][0]


@pytest.mark.parametrize(
    ("function", "kept", "stays", "expected"),
    [
        (lambda a, b, c: (jnp.sin(b) * c, jnp.cos(a) * 2.0)[1], "", "a", [2 * np.cos(2.0)]),
        (lambda a, b, c: a - c, "b", "abc", [-4.0]),
        (lambda a, b, c: b * 1.0, "a", "ab", [4.0]),
        (lambda a, b, c: (b, 3.0, b), "", "b", [4.0, 3.0, 4.0]),
        (lambda a, b, c: jnp.asarray(_TABLE)[jnp.int32(a)], "", "a", [2.0]),
        (_scanned, "", "ab", [5.0]),
        (lambda a, b, c: io_callback(lambda a: a * 3, jnp.zeros(()), a), "", "a", [6.0]),
    ],
    ids=["unused", "kept", "kept and unused", "inputs", "constant", "loop", "callback"],
)
def test_what_no_result_depends_on_is_left_out(function, kept, stays, expected) -> None:
    closed, found = reduced(function, 2.0, 4.0, 6.0, kept=[one in kept for one in "abc"])
    assert "".join(one for one, stay in zip("abc", found, strict=True) if stay) == stays
    values = [jnp.float32({"a": 2, "b": 4, "c": 6}[one]) for one in stays]
    np.testing.assert_allclose(jax.jit(jaxpr_as_fun(closed))(*values), expected, rtol=1e-6)
    assert "sin" not in str(closed)


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


def test_naming_a_mesh_axis_is_no_reason_to_stay() -> None:
    mesh = mirrored(2).topology.mesh

    def step(a: Any, b: Any) -> Any:
        jax.lax.psum(b, REPLICA_AXIS)
        return a * 2.0

    split = P(REPLICA_AXIS)
    closed = jax.make_jaxpr(
        jax.shard_map(step, mesh=mesh, in_specs=(split, split), out_specs=split, check_vma=False)
    )(np.ones(2, "float32"), np.ones(2, "float32"))
    (eqn,) = [one for one in closed.jaxpr.eqns if one.primitive.name == "shard_map"]
    jaxpr, stays = without_unused(eqn.params["jaxpr"], [False, False])
    assert stays == [True, False]
    assert [one.primitive.name for one in jaxpr.eqns] == ["mul"]


# Parts of a jaxpr, and operations in the place of others.


@pytest.mark.compatibility
@pytest.mark.parametrize(
    "function",
    [jax.jit(jnp.sin), jax.nn.relu, jax.checkpoint(jnp.sin), jax.numpy.linalg.norm],
    ids=["jit", "custom_jvp", "checkpoint", "norm"],
)
def test_calls_are_those_of_jax(function) -> None:
    (eqn,) = jax.make_jaxpr(function)(jnp.ones((2, 3))).jaxpr.eqns
    called = called_jaxpr(eqn)
    assert inner_jaxprs(eqn) == [getattr(called, "jaxpr", called)]


# Evaluating a trace anew gives what the function gives, without the mesh that it was traced in.


def loops(x: jax.Array) -> jax.Array:
    limit = x.max()
    return jax.lax.while_loop(lambda v: v.sum() < 40 + limit, lambda v: v * 2 + limit, x)


def scans(x: jax.Array) -> jax.Array:
    scale = jnp.clip(x[0], 1, 2)

    def step(carry, part):
        return carry + part * scale, jnp.linalg.norm(carry)

    end, parts = jax.lax.scan(step, jnp.zeros(()), x, reverse=True)
    return jnp.concatenate([end[None], parts])


def distinct(x: jax.Array) -> jax.Array:
    values, places = jnp.unique(x, return_inverse=True, size=6, fill_value=9)
    return values + places.sum().astype(x.dtype) + jax.ops.segment_sum(x, places, num_segments=6)


FUNCTIONS = [
    *(loops, scans, distinct),
    lambda x: jax.lax.cond(x.sum() > 0, lambda v: jnp.where(v > 1, v, -v), lambda v: v * 3, x),
    lambda x: jax.nn.relu(x) + jax.checkpoint(jnp.sin)(x) + jax.nn.silu(x) + jax.nn.softmax(x),
    lambda x: jax.lax.fori_loop(0, 3, lambda index, v: v @ v.T / (index + 1), jnp.outer(x, x)),
]


@pytest.mark.slow
@pytest.mark.parametrize("function", FUNCTIONS, ids=range(len(FUNCTIONS)))
def test_gives_what_the_function_gives(function) -> None:
    x = jnp.array([0.5, 2.0, -1.0, 3.0])
    traced = jax.make_jaxpr(jax.jit(function))(x)
    for given in (x, -x):
        (got,) = jax.jit(lambda value: retrace(traced, [value]))(given)
        np.testing.assert_allclose(got, function(given), rtol=1e-6)


def test_calls_of_a_name_can_be_replaced() -> None:
    @jax.jit
    def doubled(x):
        return x * 2

    traced = jax.make_jaxpr(lambda x: doubled(x) + jax.jit(jnp.square)(x))(jnp.ones(2))
    (got,) = retrace(traced, [jnp.full(2, 3.0)], {"doubled": lambda x: [x * 10]})
    np.testing.assert_array_equal(got, [39.0, 39.0])


@pytest.mark.compatibility
def test_what_was_traced_for_replicas_goes_with_arrays_of_a_mesh() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("replica",))

    def function(x):
        order = jnp.unique(x, size=4)
        return jnp.where(x > 0, jnp.clip(x, 0, 2), jax.nn.softplus(x)) + order

    whole = jax.make_jaxpr(
        jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    )(jnp.ones(4))
    (eqn,) = whole.eqns
    x = jax.device_put(jnp.array([1.0, -1.0, 3.0, 0.0]), NamedSharding(mesh, P("replica")))
    (got,) = jax.jit(lambda value: retrace(eqn.params["jaxpr"], [value * 1]))(x)
    np.testing.assert_allclose(got + x, function(x) + x, rtol=1e-6)


# Operations by element: those that a device may do for its own part of an array.


def equation(function: Any) -> Any:
    """The only operation of a function of a matrix."""
    (eqn,) = jax.make_jaxpr(function)(jnp.ones((2, 3))).jaxpr.eqns
    return eqn


@pytest.mark.parametrize(
    ("function", "is_one", "is_one_with_rev"),
    [
        (lambda x: jax.lax.sqrt(x), True, True),
        (lambda x: x * 2.0, True, True),
        (lambda x: x**3, True, True),
        (jax.jit(lambda x: jnp.exp(x) - x), True, True),
        (lambda x: x.T, False, False),
        (lambda x: jax.lax.cumsum(x), False, False),
        (jax.jit(lambda x: x - jnp.sum(x)), False, False),
        (lambda x: jax.lax.rev(x, (0,)), False, True),
        (jax.jit(lambda x: jax.lax.rev(x, (0,)) + x), False, True),
    ],
    ids=["sqrt", "product", "power", "inner", "T", "running sum", "inner sum", "rev", "inner rev"],
)
def test_elements_of_the_result_follow_from_the_same_elements(
    function, is_one, is_one_with_rev
) -> None:
    eqn = equation(function)
    assert is_by_element(eqn) is is_one
    assert is_by_element(eqn, also=("rev",)) is is_one_with_rev  # as a caller may allow
