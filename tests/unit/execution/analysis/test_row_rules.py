"""Rules for primitives, against what changing one row of the input does to the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from stratagem.execution.analysis.row_rules import (
    ELEMENTWISE,
    LINEAR,
    SUB_JAXPRS,
    contracts_rows,
    keeps_rows,
    shape_of,
)

X = np.random.default_rng(0).normal(size=(3, 4, 2)).astype(np.float32)
WEIGHTS = np.random.default_rng(1).normal(size=(4, 5)).astype(np.float32)
IMAGES = np.random.default_rng(2).normal(size=(3, 4, 4, 1)).astype(np.float32)
KERNEL = np.ones((2, 2, 1, 1), np.float32)

# Function, example, row axis of the example, and of the result.
KEPT: dict[str, tuple[Callable[[Any], Any], Any, int, int]] = {
    "sum of other axes": (lambda x: jnp.sum(x, axis=(1, 2)), X, 0, 0),
    "cumsum of another axis": (lambda x: lax.cumsum(x, axis=1), X, 0, 0),
    "reverse of another axis": (lambda x: lax.rev(x, (2,)), X, 0, 0),
    "flattened rows": (lambda x: lax.reshape(x, (3, 8)), X, 0, 0),
    "a new leading axis": (lambda x: lax.reshape(x, (1, 3, 8)), X, 0, 1),
    "broadcast": (lambda x: lax.broadcast_in_dim(x, (5, 3, 4, 2), (1, 2, 3)), X, 0, 1),
    "transpose": (lambda x: lax.transpose(x, (1, 0, 2)), X, 0, 1),
    "slice of columns": (lambda x: lax.slice(x, (0, 1, 0), (3, 3, 2)), X, 0, 0),
    "padded columns": (lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 1, 0), (0, 0, 0))), X, 0, 0),
    "largest of the last axis": (lambda x: lax.top_k(x, 1)[0], X, 0, 0),
    "product with weights": (
        lambda x: lax.dot_general(x, WEIGHTS, (((1,), (0,)), ((), ()))), X, 0, 0,
    ),
    "convolution": (
        lambda x: lax.conv_general_dilated(
            x, KERNEL, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        IMAGES, 0, 0,
    ),
}  # fmt: skip
MIXED: dict[str, tuple[Callable[[Any], Any], Any, int, int | None]] = {
    "sum of the rows": (lambda x: jnp.sum(x, axis=0), X, 0, None),
    "cumsum of the rows": (lambda x: lax.cumsum(x, axis=0), X, 0, 0),
    "reverse of the rows": (lambda x: lax.rev(x, (0,)), X, 0, 0),
    "every second row": (lambda x: lax.slice(x, (0, 0, 0), (3, 4, 2), (2, 1, 1)), X, 0, 0),
    "some rows": (lambda x: lax.slice(x, (1, 0, 0), (3, 4, 2)), X, 0, 0),
    "padded rows": (lambda x: lax.pad(x, 0.0, ((1, 0, 0), (0, 0, 0), (0, 0, 0))), X, 0, 0),
    "largest of the rows": (lambda x: lax.top_k(x, 1)[0], X[..., 0].T, 1, 1),
    "product over the rows": (
        lambda x: lax.dot_general(x, np.ones((3, 2), np.float32), (((0,), (0,)), ((), ()))),
        X, 0, 0,
    ),
    "rows in another order": (lambda x: lax.reshape(x, (4, 3, 2)), X, 0, 1),
    "broadcast along the rows": (
        lambda x: lax.broadcast_in_dim(x, (3, 4, 2, 3), (0, 1, 2)), X, 0, 3,
    ),
}  # fmt: skip


def equation_of(function: Callable[..., Any], *examples: Any) -> Any:
    jaxpr = jax.make_jaxpr(function)(*examples).jaxpr
    return jaxpr.eqns[-1]


def answer(
    function: Callable[[Any], Any], example: Any, row_axis: int, out_axis: int | None
) -> Any:
    eqn = equation_of(function, example)
    in_axes = [row_axis, *[None] * (len(eqn.invars) - 1)]
    return keeps_rows(eqn, in_axes, [out_axis] * len(eqn.outvars))


@pytest.mark.parametrize("name", KEPT)
def test_rows_are_kept_and_only_the_row_that_changes_differs(name) -> None:
    function, example, row_axis, out_axis = KEPT[name]
    assert answer(function, example, row_axis, out_axis) is True
    changed = np.array(example)
    changed[(slice(None),) * row_axis + (1,)] += 10
    differs = np.asarray(function(changed)) != np.asarray(function(example))
    rows = np.moveaxis(differs, out_axis, 0).reshape(differs.shape[out_axis], -1).any(axis=1)
    assert rows.tolist() == [False, True, False]


@pytest.mark.parametrize("name", MIXED)
def test_rows_that_depend_on_others_are_never_called_kept(name) -> None:
    function, example, row_axis, out_axis = MIXED[name]
    assert not answer(function, example, row_axis, out_axis)


def test_primitive_without_a_rule_is_unknown() -> None:
    eqn = equation_of(lambda x: jnp.linalg.cholesky(x), np.eye(3, dtype=np.float32)[None])
    assert eqn.primitive.name not in ELEMENTWISE
    assert keeps_rows(eqn, [0], [0]) is None


def test_lookup_keeps_the_rows_of_its_ids_but_not_of_its_table() -> None:
    table, ids = np.ones((7, 2), np.float32), np.array([[1], [2], [3]], np.int32)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    eqn = equation_of(lambda t, i: lax.gather(t, i, numbers, (1, 2)), table, ids)
    assert eqn.primitive.name == "gather"
    assert keeps_rows(eqn, [None, 0], [0]) is True
    assert keeps_rows(eqn, [0, None], [0]) is None


def test_product_of_two_batches_keeps_rows_only_along_a_batch_axis() -> None:
    def product(left: Any, right: Any) -> Any:
        return lax.dot_general(left, right, (((2,), (2,)), ((0,), (0,))))

    eqn = equation_of(product, X, X)
    assert keeps_rows(eqn, [0, 0], [0]) is True
    assert keeps_rows(eqn, [1, 1], [1]) is False


def test_contraction_is_over_the_rows_of_both_factors() -> None:
    eqn = equation_of(lambda x, y: lax.dot_general(x, y, (((0,), (0,)), ((), ()))), X, X)
    assert contracts_rows(eqn, [0, 0])
    assert not contracts_rows(eqn, [0, 1])
    assert not contracts_rows(eqn, [1, 1])


def test_linear_primitives_add_up() -> None:
    """Primitives that are listed as linear and keep the dtype."""
    calls = {
        "broadcast_in_dim": lambda x: lax.broadcast_in_dim(x, (2, 3, 4, 2), (1, 2, 3)),
        "copy": jnp.copy,
        "neg": lax.neg,
        "reduce_sum": lambda x: jnp.sum(x, axis=0),
        "reshape": lambda x: lax.reshape(x, (24,)),
        "squeeze": lambda x: lax.squeeze(x[:1], (0,)),
        "transpose": lambda x: lax.transpose(x, (2, 0, 1)),
    }
    assert set(calls) <= LINEAR
    y = X[::-1] * 2
    for name, call in calls.items():
        np.testing.assert_allclose(call(X + 3 * y), call(X) + 3 * call(y), rtol=1e-5, err_msg=name)
    assert not {"exp", "mul", "max", "abs"} & LINEAR


def test_parameters_of_inner_programs_are_those_of_jax() -> None:
    jitted = equation_of(jax.jit(lambda x: x + 1), X)
    assert SUB_JAXPRS[jitted.primitive.name] in jitted.params
    smooth = equation_of(jax.nn.relu, X)
    assert SUB_JAXPRS[smooth.primitive.name] in smooth.params
    assert shape_of(jitted.invars[0]) == X.shape
