"""Fast forms of convolutions: the results of the plain operation, also of its derivatives."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import stratagem as sg
from stratagem.devices.mesh import Topology
from stratagem.execution.programs.convolutions import with_fast_convolutions
from stratagem.execution.replica_context import ReplicaBatch
from stratagem.execution.tracing.arguments import Arguments, Leaf, flatten_arguments

_IMAGES = ("NHWC", "HWIO", "NHWC")
_CHANNELS_FIRST = ("NCHW", "OIHW", "NCHW")

# Of float32 sums of hundreds of products, whose order depends on the processor; in units of the
# largest result.
_ROUNDING = 5e-6


def _arrays(*shapes: tuple[int, ...], dtype: str = "float32") -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def _convolve(x, kernel, **options):
    defaults = {"window_strides": (1, 1), "padding": "VALID", "dimension_numbers": _IMAGES}
    return jax.lax.conv_general_dilated(x, kernel, **{**defaults, **options})


def _names(jaxpr) -> list[str]:
    return [eqn.primitive.name for eqn in jaxpr.eqns]


def _check_plain(function, *arrays) -> str:
    """Compares with the plain program; returns the fast one."""
    jaxpr = jax.make_jaxpr(function)(*arrays)
    fast = with_fast_convolutions(jaxpr)
    assert fast.out_avals == jaxpr.out_avals
    results, expected = (jax.jit(jaxpr_as_fun(one))(*arrays) for one in (fast, jaxpr))
    for result, plain in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, plain, rtol=0, atol=_ROUNDING * np.max(np.abs(plain)))
    return str(fast)


def _check(x, kernel, **options) -> str:
    """Checks outputs and gradients; returns the fast program."""
    convolve = functools.partial(_convolve, **options)
    (weights,) = _arrays(jax.eval_shape(convolve, x, kernel).shape)

    def function(x, kernel, weights):
        outputs, pull = jax.vjp(convolve, x, kernel)
        return outputs, *pull(weights)

    return _check_plain(function, x, kernel, weights)


_ALL = {"lhs_dilation": (2, 2), "padding": ((-1, 1), (2, -1)), "window_strides": (1, 3)}


@pytest.mark.parametrize(
    ("size", "options"),
    [
        ((1, 1), {"window_strides": (3, 2), "padding": ((2, 0), (0, 1))}),
        ((2, 3), {"padding": ((0, 0), (0, 0))}),
        ((4, 4), {"window_strides": (3, 2), "padding": ((2, 0), (0, 1))}),
        ((2, 3), {"rhs_dilation": (2, 3), "padding": ((1, 2), (3, 0))}),
        ((2, 3), {"lhs_dilation": (2, 1), "padding": ((1, 1), (0, 2))}),
        ((2, 3), {**_ALL, "rhs_dilation": (1, 2)}),
        ((1, 1), {"padding": ((-1, -2), (3, 0))}),
        ((1, 1), _ALL),
    ],
    ids=str,
)
def test_sizes_strides_padding_and_dilation(size, options) -> None:
    x, kernel = _arrays((66, 9, 8, 3), (*size, 3, 5))
    _check(x, kernel, **options)


def test_kernel_larger_than_the_input() -> None:
    x, kernel = _arrays((8, 2, 2, 16), (3, 3, 16, 12))
    operations = _check(x, kernel, padding=((1, 1), (1, 1)))
    assert operations.count("dot_general[") == 9 + 9 + 4
    assert "conv_general_dilated" not in operations


def test_forms_that_are_used() -> None:
    x, kernel, narrow = _arrays((96, 13, 13, 4), (3, 3, 4, 8), (1, 1, 4, 8))
    operations = _check(x, kernel)
    assert operations.count("conv_general_dilated[") == 1 + 6  # the gradient of the kernel in parts
    assert operations.count("dot_general[") == 9  # the gradient of the inputs
    for strides in ((1, 1), (2, 2)):
        operations = _check(x, narrow, window_strides=strides)
        assert operations.count("dot_general[") == 3
        assert "conv_general_dilated" not in operations


@pytest.mark.parametrize("size", [1, 3])
def test_channels_first_and_second_derivatives(size) -> None:
    def loss(x, kernel):
        return jnp.square(_convolve(x, kernel, dimension_numbers=_CHANNELS_FIRST)).mean()

    def slope(x, kernel):
        return sum(jnp.square(part).sum() for part in jax.grad(loss, (0, 1))(x, kernel))

    x, kernel = _arrays((64, 3, 7, 6), (5, 3, size, size))
    fast = _check_plain(jax.grad(slope, (0, 1)), x, kernel)
    assert "dot_general" in fast


@pytest.mark.parametrize(
    ("num_rows", "channels", "dtype", "options"),
    [
        (66, 2, "float32", {"feature_group_count": 2}),
        (66, 4, "float32", {"batch_group_count": 2}),
        (64, 4, "float16", {}),
        (0, 4, "float32", {}),
    ],
    ids=["groups of features", "groups of rows", "half precision", "empty"],
)
def test_others_are_left_alone(num_rows, channels, dtype, options) -> None:
    x, kernel = _arrays((num_rows, 6, 6, 4), (1, 1, channels, 10), dtype=dtype)
    jaxpr = jax.make_jaxpr(functools.partial(_convolve, **options))(x, kernel)
    assert _names(with_fast_convolutions(jaxpr).jaxpr) == ["conv_general_dilated"]


@pytest.mark.parametrize("rank", [1, 3])
def test_one_and_three_spatial_axes(rank) -> None:
    letters = "DHW"[-rank:]
    convolve = functools.partial(
        _convolve,
        window_strides=(2,) * rank,
        dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
    )
    loss = lambda x, kernel: jnp.square(convolve(x, kernel)).mean()  # noqa: E731
    for size in (1, 2):
        x, kernel = _arrays((64, *[5] * rank, 2), (*[size] * rank, 2, 3))
        assert "dot_general" in _check_plain(jax.grad(loss, (0, 1)), x, kernel)


def test_small_batches_and_padded_gradients_are_left_alone() -> None:
    x, kernel = _arrays((8, 9, 9, 4), (3, 3, 4, 8))
    loss = lambda x, kernel: _convolve(x, kernel, padding="SAME").sum()  # noqa: E731
    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, kernel)
    assert _names(with_fast_convolutions(jaxpr).jaxpr) == _names(jaxpr.jaxpr)


def test_inner_functions() -> None:
    def function(x, kernel):
        inner = jax.checkpoint(jax.jit(_convolve))
        branch = jax.lax.cond(
            x[0, 0, 0, 0] > 0, _convolve, lambda x, k: -_convolve(x, k), x, kernel
        )
        _, rows = jax.lax.scan(lambda carry, one: (carry, inner(one[None], kernel)), 0, x)
        mapped = jax.vmap(_convolve, (0, None))(x[:, None], kernel)
        return inner(x, kernel) * branch, rows[:, 0], mapped

    x, kernel = _arrays((4, 6, 6, 3), (1, 1, 3, 2))
    assert "conv_general_dilated" not in _check_plain(function, x, kernel)


def arguments_of(part):
    """Arguments of a step of the part of the batch for one replica."""
    structure = jax.tree.structure(((0,), {}))
    leaf = Leaf(True, part.shape, part.dtype)
    return Arguments(structure, (leaf,), [jnp.asarray(part)], [], ReplicaBatch(size=len(part)))


@pytest.mark.parametrize("num_devices", [1, 2])
def test_steps_of_a_strategy_use_them_unless_turned_off(monkeypatch, num_devices) -> None:
    values, x = _arrays((1, 1, 2, 4), (8, 5, 5, 2))

    def results() -> tuple[list[float], int]:
        strategy = sg.MirroredStrategy([f"cpu:{index}" for index in range(num_devices)])
        with strategy.scope():
            kernel = sg.Variable(values, aggregation="mean")

        def step(x):
            loss = lambda values: jnp.square(_convolve(x, values)).mean()  # noqa: E731
            value, gradient = jax.value_and_grad(loss)(kernel.value)
            kernel.assign_sub(gradient)
            return value

        part = x if num_devices == 1 else x.reshape(2, 4, 5, 5, 2)
        operations = strategy.executor.lower(step, arguments_of(part)).as_text()
        losses = [
            float(strategy.reduce("mean", strategy.run(step, args=(x,)), axis=None))
            for _ in range(2)
        ]
        return losses, operations.count("stablehlo.convolution")

    fast, num_convolutions = results()
    assert num_convolutions == 0
    monkeypatch.setenv("STRATAGEM_FAST_CONVOLUTIONS", "0")
    plain, num_convolutions = results()
    assert num_convolutions > 0
    np.testing.assert_allclose(fast, plain, rtol=1e-6)
    assert fast[1] < fast[0]


# Compiled programs: how they are kept, what they close over and donate.


@pytest.fixture(params=[1, 2])
def strategy(request):
    return sg.MirroredStrategy([f"cpu:{index}" for index in range(request.param)])


def first_part(strategy, value):
    return np.asarray(strategy.local_results(value)[0])


class Step:
    """A replica function that counts how often it is traced."""

    def __init__(self):
        self.traces = 0

    def __call__(self, x=0.0):
        self.traces += 1
        return x + jnp.ones(())


def test_least_recently_used_program_goes_first(strategy, monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_PROGRAM_CACHE_SIZE", "2")
    first, second, third = Step(), Step(), Step()
    for step in (first, second, first, third):  # the second is the one not used for longest
        strategy.run(step)
    for step in (first, third):
        strategy.run(step)
    assert (first.traces, second.traces, third.traces) == (1, 1, 1)
    strategy.run(second)
    assert second.traces == 2
    strategy.run(first)
    assert first.traces == 2
    monkeypatch.setenv("STRATAGEM_PROGRAM_CACHE_SIZE", "1")
    for size in (1, 2, 1):  # programs count, and not functions
        strategy.run(third, args=(np.ones(size, "float32"),))
    assert third.traces == 1 + 3


def test_bound_methods_and_unhashable_callables_are_found_again(strategy) -> None:
    class Model:
        __hash__ = None  # type: ignore[assignment]

        def __init__(self):
            self.traces = 0

        def __call__(self):
            self.traces += 1
            return jnp.ones(())

    class Trainer:
        traces = 0

        def step(self):
            self.traces += 1
            return jnp.ones(())

    model, trainer = Model(), Trainer()
    for _ in range(3):
        strategy.run(model)
        strategy.run(trainer.step)
    assert (model.traces, trainer.traces) == (1, 1)


def test_arrays_that_a_function_closes_over_are_its_constants(strategy) -> None:
    of_jax = jnp.arange(3.0)
    of_numpy = np.arange(3.0, dtype="float32") * 10
    of_other_device = jax.device_put(np.float32(100.0), jax.devices()[5])
    number = 1000.0

    def step(x):
        return x + of_jax + of_numpy + of_other_device + number

    for factor in (1.0, 2.0):
        value = strategy.run(step, args=(np.full(3, factor, "float32"),))
        np.testing.assert_array_equal(
            first_part(strategy, value), np.array([0.0, 11.0, 22.0]) + 1100 + factor
        )


def test_written_variables_are_donated_and_nothing_else_is(strategy) -> None:
    with strategy.scope():
        written = sg.Variable(np.zeros(4, "float32"), aggregation="mean")
        read = sg.Variable(np.ones(4, "float32"))
    before_written, before_read, argument = written.storage, read.storage, jnp.ones(4)

    def step(x):
        written.assign_add(x * read.value)
        return written.value

    first, second = (strategy.run(step, args=(argument,)) for _ in range(2))
    assert before_written.is_deleted()
    assert not before_read.is_deleted()
    assert read.storage is before_read
    assert not argument.is_deleted()
    np.testing.assert_array_equal(first_part(strategy, first), np.ones(4))
    np.testing.assert_array_equal(first_part(strategy, second), np.full(4, 2.0))


def test_lowered_program_sums_once_over_all_replicas_of_other_devices(pair) -> None:
    with pair.scope():
        weight = sg.Variable(np.ones(3, "float32"), aggregation="sum")
        own = sg.Variable(1.0, synchronization="on_read", aggregation="sum")

    def step(x, scale):
        weight.assign_add(x * scale)
        own.assign_add(jnp.sum(x))

    value = pair.distribute_values_from_function(lambda _: jnp.ones(3))
    arguments = flatten_arguments((value, 2.0), {}, num_replicas=2)
    others = Topology(tuple(jax.devices()[4:6]))
    compiled = pair.executor.lower(step, arguments, others).compile()
    text = compiled.as_text()
    assert text.count("all-reduce(") + text.count("all-reduce-start(") == 1
    assert float(weight.value[0]) == 1.0
    lowered = pair.executor.program(step, arguments).lower(arguments)
    assert "all_reduce" in lowered.as_text()


def test_constants_of_a_program_first_used_under_jit_stay_usable(strategy) -> None:
    constant = jnp.arange(2.0)

    def step(x):
        return x * constant

    under_jit = jax.jit(lambda x: strategy.reduce("mean", strategy.run(step, args=(x,)), axis=None))
    for factor in (2.0, 3.0):
        np.testing.assert_array_equal(under_jit(jnp.float32(factor)), [0.0, factor])
        value = strategy.run(step, args=(jnp.float32(factor),))
        np.testing.assert_array_equal(first_part(strategy, value), [0.0, factor])
