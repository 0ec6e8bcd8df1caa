"""Fast forms of convolutions: the results of the plain operation, also of its derivatives."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import stratagem as sg
from stratagem.execution.programs.convolutions import with_fast_convolutions

_IMAGES = ("NHWC", "HWIO", "NHWC")
_CHANNELS_FIRST = ("NCHW", "OIHW", "NCHW")


def _arrays(*shapes: tuple[int, ...], dtype: str = "float32") -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def _convolve(x, kernel, **options):
    defaults = {"window_strides": (1, 1), "padding": "VALID", "dimension_numbers": _IMAGES}
    return jax.lax.conv_general_dilated(x, kernel, **{**defaults, **options})


def _names(jaxpr) -> list[str]:
    return [eqn.primitive.name for eqn in jaxpr.eqns]


def _check(function, *arrays) -> list[str]:
    """Compares with the plain function in float64; returns the operations of the fast one."""
    jaxpr = jax.make_jaxpr(function)(*arrays)
    fast = with_fast_convolutions(jaxpr)
    assert [aval.str_short() for aval in fast.out_avals] == [
        aval.str_short() for aval in jaxpr.out_avals
    ]
    leaves = jax.tree.leaves(arrays)
    results = jax.jit(jaxpr_as_fun(fast))(*leaves)
    plain = jax.jit(jaxpr_as_fun(jaxpr))(*leaves)
    with jax.enable_x64(True):
        exact = jax.tree.leaves(jax.jit(function)(*[jnp.asarray(one, "float64") for one in arrays]))
    for result, same, expected in zip(results, plain, exact, strict=True):
        scale = np.max(np.abs(expected), initial=1e-30)
        error, usual = (np.max(np.abs(one - expected), initial=0) for one in (result, same))
        assert error <= max(1e-6 * scale, 2 * usual)
    return _names(fast.jaxpr)


def _and_gradients(**options):
    """Returns a function with the outputs, and gradients of both operands and of second order."""

    def loss(x, kernel):
        y = _convolve(x, kernel, **options)
        return (jnp.sin(y) * y).mean()

    def function(x, kernel):
        slope = lambda x, kernel: sum(  # noqa: E731
            (jnp.cos(part) * part).sum() for part in jax.grad(loss, (0, 1))(x, kernel)
        )
        return (
            _convolve(x, kernel, **options),
            *jax.grad(loss, (0, 1))(x, kernel),
            *jax.grad(slope, (0, 1))(x, kernel),
        )

    return function


@pytest.mark.parametrize("padding", ["VALID", "SAME", ((2, 0), (0, 1))], ids=str)
@pytest.mark.parametrize("strides", [(1, 1), (2, 1), (3, 2)], ids=str)
@pytest.mark.parametrize("size", [(1, 1), (3, 3), (2, 3), (5, 5)], ids=str)
def test_sizes_strides_and_padding(size, strides, padding) -> None:
    x, kernel = _arrays((66, 7, 8, 3), (*size, 3, 5))
    _check(_and_gradients(window_strides=strides, padding=padding), x, kernel)


@pytest.mark.parametrize(
    "options",
    [
        {"rhs_dilation": (2, 1)},
        {"rhs_dilation": (2, 3), "padding": "SAME"},
        {"lhs_dilation": (2, 1), "padding": ((1, 1), (0, 2))},
        {"lhs_dilation": (2, 2), "rhs_dilation": (1, 2), "padding": ((-1, 1), (2, -1))},
        {"padding": ((-1, -2), (3, 0))},
        {"precision": jax.lax.Precision.HIGHEST},
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [(1, 1), (2, 2), (3, 3)], ids=str)
def test_dilation_and_negative_padding(size, options) -> None:
    x, kernel = _arrays((70, 9, 10, 2), (*size, 2, 3))
    _check(_and_gradients(**options), x, kernel)


@pytest.mark.parametrize("size", [1, 3])
def test_channels_first(size) -> None:
    x, kernel = _arrays((64, 3, 7, 6), (5, 3, size, size))
    _check(_and_gradients(dimension_numbers=_CHANNELS_FIRST), x, kernel)


@pytest.mark.parametrize(
    ("groups", "channels"), [({"feature_group_count": 2}, 2), ({"batch_group_count": 5}, 4)], ids=str
)
def test_groups_are_left_alone(groups, channels) -> None:
    x, kernel = _arrays((65, 6, 6, 4), (1, 1, channels, 10))
    function = lambda x, kernel: _convolve(x, kernel, **groups)  # noqa: E731
    assert "conv_general_dilated" in _check(function, x, kernel)


@pytest.mark.parametrize("rank", [1, 3])
def test_one_and_three_spatial_axes(rank) -> None:
    letters = "DHW"[-rank:]
    numbers = (f"N{letters}C", f"{letters}IO", f"N{letters}C")
    for size, stride in itertools.product((1, 2), (1, 2)):
        x, kernel = _arrays((64, *[5] * rank, 2), (*[size] * rank, 2, 3))
        options = {"window_strides": (stride,) * rank, "dimension_numbers": numbers}
        _check(_and_gradients(**options), x, kernel)


def test_forms_that_are_used() -> None:
    x, kernel, narrow = _arrays((96, 13, 13, 4), (3, 3, 4, 8), (1, 1, 4, 8))
    of_kernel = jax.grad(lambda kernel, x: _convolve(x, kernel).sum())
    of_inputs = jax.grad(lambda x, kernel: _convolve(x, kernel).sum())
    assert _check(of_kernel, kernel, x).count("conv_general_dilated") == 7  # 6 parts, 1 dead value
    assert _check(of_inputs, x, kernel).count("dot_general") == 9
    for strides in ((1, 1), (2, 2)):
        function = _and_gradients(window_strides=strides)
        assert "conv_general_dilated" not in _check(function, x, narrow)


def test_small_batches_and_padded_gradients_are_left_alone() -> None:
    x, kernel = _arrays((8, 9, 9, 4), (3, 3, 4, 8))
    jaxpr = jax.make_jaxpr(_and_gradients(padding="SAME"))(x, kernel)
    assert _names(with_fast_convolutions(jaxpr).jaxpr) == _names(jaxpr.jaxpr)


def test_half_precision_is_left_alone() -> None:
    x, kernel = _arrays((64, 9, 9, 4), (1, 1, 4, 8), dtype="float16")
    jaxpr = jax.make_jaxpr(_convolve)(x, kernel)
    assert _names(with_fast_convolutions(jaxpr).jaxpr) == ["conv_general_dilated"]


def test_empty_arrays_are_left_alone() -> None:
    x, kernel = _arrays((0, 9, 9, 4), (1, 1, 4, 8))
    jaxpr = jax.make_jaxpr(_convolve)(x, kernel)
    assert _names(with_fast_convolutions(jaxpr).jaxpr) == ["conv_general_dilated"]


def test_inner_functions() -> None:
    def function(x, kernel):
        inner = jax.checkpoint(jax.jit(_convolve))
        branch = jax.lax.cond(x[0, 0, 0, 0] > 0, _convolve, lambda x, k: -_convolve(x, k), x, kernel)
        _, rows = jax.lax.scan(lambda carry, one: (carry, inner(one[None], kernel)), 0, x)
        mapped = jax.vmap(_convolve, (0, None))(x[:, None], kernel)
        return inner(x, kernel) * branch, rows[:, 0], mapped

    x, kernel = _arrays((4, 6, 6, 3), (1, 1, 3, 2))
    jaxpr = jax.make_jaxpr(function)(x, kernel)
    assert "conv_general_dilated" not in str(with_fast_convolutions(jaxpr))
    _check(function, x, kernel)


def _trained(strategy) -> tuple[float, str]:
    """Returns the loss after two steps, and the program."""
    kernel_values, x = _arrays((3, 3, 2, 4), (128, 9, 9, 2))
    with strategy.scope():
        kernel = sg.Variable(kernel_values, aggregation="sum")

    def step(x):
        def loss(values):
            return jnp.square(_convolve(x, values)).mean()

        value, gradient = jax.value_and_grad(loss)(kernel.value)
        kernel.assign_sub(0.1 * gradient)
        return value

    for _ in range(2):
        result = strategy.run(step, args=(x,))
    return float(result), strategy.executor


@pytest.mark.parametrize("enabled", [True, False])
def test_setting(monkeypatch, enabled) -> None:
    monkeypatch.setenv("STRATAGEM_FAST_CONVOLUTIONS", str(int(enabled)))
    assert sg.config.fast_convolutions() is enabled
