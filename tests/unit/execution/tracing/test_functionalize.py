"""ReplicaScope: reads and writes of variables as inputs and outputs."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax

import stratagem as sg
from stratagem import config
from stratagem.devices.mesh import Topology
from stratagem.execution.programs.steps import sequence_options
from stratagem.execution.tracing import errors as program_fingerprint
from stratagem.execution.tracing.arguments import flatten_arguments
from stratagem.execution.tracing.errors import agree_on_program
from stratagem.execution.tracing.functionalize import ReplicaScope, is_uninitialized, stand_in
from stratagem.execution.tracing.tracer import trace_replica_function
from stratagem.group.current import Identity
from stratagem.planning.planner import planned_strategy
from stratagem.planning.targets import parse_target
from tests.unit.strategies.decoders import NUM_WORDS, compiled_decoder, largest_difference


@pytest.fixture
def variable():
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        return sg.Variable(1.0, name="weight")


def test_plain_stateless_scope_of_keras_inside_goes_before(variable) -> None:
    """A user's own stateless call, of a model say, within a replica function."""
    with ReplicaScope(lambda _: jnp.float32(7.0)) as outer:
        with keras.StatelessScope([(variable, jnp.float32(3.0))]) as inner:
            assert float(variable.value) == 3.0
            variable.assign(jnp.float32(4.0))
        assert float(inner.get_current_value(variable)) == 4.0
        assert float(variable.value) == 7.0
    assert not outer.writes


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


# Sequences split over the devices of a replica: the numbers of one device, computed in parts.

RNG = np.random.default_rng(7)
# Six rows a batch over two replicas, then one: the second replica only pads.
WORDS, NEXT_WORDS = RNG.integers(0, NUM_WORDS, (2, 7, 8), dtype="int32")
FIT: dict[str, Any] = {"batch_size": 6, "epochs": 2, "verbose": 0, "shuffle": False}


def strategy_of(replicas: int, parts: int, **options: Any) -> sg.MirroredStrategy:
    names = [f"cpu:{index}" for index in range(replicas * parts)]
    return sg.MirroredStrategy(names, devices_per_replica=parts, sequence_axis=1, **options)


def made(scope: contextlib.AbstractContextManager[Any]) -> keras.Model:
    return compiled_decoder(scope, keras.optimizers.Adam(1e-3, epsilon=1e-4), num_layers=1)


@functools.cache
def alone() -> tuple[keras.Model, dict[str, Any]]:
    model = made(contextlib.nullcontext())
    return model, numbers_of(model)


def numbers_of(model: keras.Model) -> dict[str, Any]:
    return {
        "losses": model.fit(WORDS, NEXT_WORDS, **FIT).history["loss"],
        "loss": model.evaluate(WORDS, NEXT_WORDS, batch_size=4, verbose=0),
        "logits": model.predict(WORDS, batch_size=4, verbose=0),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "parts", "shard_state"), [(2, 2, None), (2, 4, "optimizer"), (2, 4, "all")]
)
def test_decoder_is_that_of_one_device(replicas, parts, shard_state) -> None:
    """Positions and causal masks of a part are those of the whole."""
    model = made(strategy_of(replicas, parts, shard_state=shard_state).scope())
    found = numbers_of(model)
    reference, expected = alone()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
    assert largest_difference(model, reference) < 1e-5


@pytest.mark.compatibility
def test_a_step_of_fit_is_that_of_one_device() -> None:
    """One update with SGD, whose change is the gradient."""
    models: list[keras.Model] = []
    for scope in (contextlib.nullcontext(), strategy_of(1, 2).scope()):
        keras.utils.set_random_seed(3)
        with scope:
            x = keras.Input((8, 12))
            attention = keras.layers.MultiHeadAttention(2, 6, use_bias=False)
            attended = attention(x, x, use_causal_mask=True)
            model = keras.Model(x, keras.layers.Dense(3)(attended))
            model.compile("sgd", "mse")
        y = np.sin(np.arange(2 * 8 * 3.0)).reshape(2, 8, 3)
        model.fit(np.cos(np.arange(2 * 8 * 12.0)).reshape(2, 8, 12), y, verbose=0)
        models.append(model)
    assert largest_difference(*models) < 1e-6


def attend(x: jax.Array) -> jax.Array:
    """Attends to earlier positions with four heads and one of keys and values."""
    heads = jnp.reshape(jnp.cos(x), (*x.shape[:2], 4, 16))
    return keras.ops.dot_product_attention(heads, heads[:, :, :1], heads[:, :, 1:2], is_causal=True)


def test_devices_exchange_keys_and_values_only() -> None:
    strategy = strategy_of(2, 4)
    x = RNG.normal(size=(2, 32, 64)).astype("float32")
    result = strategy.local_results(strategy.run(attend, (x,)))[-1]
    np.testing.assert_allclose(result, attend(jnp.asarray(x)), rtol=1e-5, atol=1e-6)
    (program,) = strategy.executor._programs.values()
    text = program.step.compiled(many=False).lower([], [], [], [x], [], []).compile().as_text()
    assert "f32[2,8,64]" in next(line for line in text.splitlines() if "cosine" in line)
    # The last one gathers the result itself.
    gathered = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)
    sizes = [np.prod([int(size) for size in shape.split(",")]) for shape in gathered]
    assert sorted(sizes) == [2 * 32 * 16, 2 * 32 * 16, x.size]


def test_tpu_compiler_gathers_keys_and_values(monkeypatch) -> None:
    """A ring, its default, keeps the scores of all parts."""
    monkeypatch.setattr(Topology, "platform", "tpu")
    found: list[Any] = []
    for strategy in (strategy_of(1, 2), sg.OneDeviceStrategy("cpu:0")):
        arguments = flatten_arguments((np.ones((2, 8)),), {}, num_replicas=1)
        trace = trace_replica_function(strategy, jnp.sum, arguments)
        found.append(sequence_options(trace, strategy.topology))
    assert found == [{"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}, None]
    monkeypatch.undo()
    assert sequence_options(trace, strategy.topology) is None


def test_each_array_is_split_once_if_its_size_allows() -> None:
    strategy = strategy_of(1, 4)
    arrays = {"ids": np.ones((2, 8)), "lengths": np.ones(2), "weight": np.ones((2, 1))}
    shardings: dict[str, Any] = {}

    def step(values: dict[str, Any]) -> Any:
        for name, value in values.items():
            jax.debug.inspect_array_sharding(
                value, callback=lambda found, name=name: shardings.__setitem__(name, found)
            )
        return sum(jnp.sum(value) for value in values.values())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert strategy.run(step, (arrays,)) == 20
    assert shardings["ids"].shard_shape((2, 8)) == (2, 2)
    assert shardings["lengths"].shard_shape((2,)) == (2,)
    assert shardings["weight"].shard_shape((2, 1)) == (2, 1)


def test_length_that_cannot_be_divided_stays_whole_with_a_warning() -> None:
    strategy = strategy_of(2, 4)
    match = r"shape \(2, 6\) cannot be divided along sequence_axis=1: 6 over 4 devices"
    with pytest.warns(UserWarning, match=match):
        result = strategy.run(jnp.sum, (np.ones((2, 6)),))
    assert [float(value) for value in strategy.local_results(result)] == [12, 12]


@pytest.mark.parametrize(
    ("axis", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), ("1", TypeError)]
)
def test_other_axes_and_replicas_of_one_device_are_refused(axis, error) -> None:
    with pytest.raises(error, match="received sequence_axis="):
        sg.MirroredStrategy(["cpu:0", "cpu:1"], devices_per_replica=2, sequence_axis=axis)
    for make in (sg.MirroredStrategy, sg.MultiWorkerMirroredStrategy):
        with pytest.raises(ValueError, match="for replicas of one device"):
            make(sequence_axis=1)


def test_axis_stays_with_copies_and_plans() -> None:
    strategy = strategy_of(2, 2)
    assert copy.deepcopy(strategy).sequence_axis == 1
    assert planned_strategy(parse_target("v5e:2x4"), strategy).sequence_axis == 1
    assert sg.MultiWorkerMirroredStrategy(devices_per_replica=4, sequence_axis=2).sequence_axis == 2
    assert sg.MirroredStrategy(["cpu:0", "cpu:1"]).sequence_axis is None


# Objects that a step changes: an error where the change would be lost.


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Module:
    """A mutable pytree, as modules of Flax NNX are."""

    kernel: Any
    count: Any


def _second_call(fn: Any, *args: Any) -> Any:
    """Calls a compiled function, which ran as Python before."""
    compiled = sg.function(fn)
    compiled(*copy.deepcopy(args))
    return compiled(*args)


@pytest.fixture(params=[("run", 2), ("eager", 2), ("function", 1)])
def call(request: pytest.FixtureRequest) -> Any:
    way, count = request.param
    strategy = sg.MirroredStrategy([f"cpu:{index}" for index in range(count)])
    config.run_eagerly(way == "eager")
    if way == "function":
        yield _second_call
    else:
        yield lambda fn, *args: strategy.local_results(strategy.run(fn, args=args))[0]
    config.run_eagerly(False)


def _module() -> Module:
    return Module(jnp.ones(3), jnp.zeros((), jnp.int32))


def _train(module: Module) -> Any:
    module.kernel = module.kernel * 2
    module.count += 1
    return module.kernel.sum()


def _train_and_return_part(module: Module) -> Any:
    _train(module)
    return module.kernel


@pytest.mark.parametrize(
    ("step", "given", "words"),
    [
        (_train, lambda module: module, "_train changed its argument of type Module"),
        (lambda tree: _train(tree["a"][0]), lambda module: {"a": [module]}, "would be lost"),
        (_train_and_return_part, lambda module: module, r"nnx\.merge\(graph, state\)"),
    ],
    ids=["argument", "deep in it", "returned in part"],
)
def test_changed_argument_is_an_error(call, step, given, words) -> None:
    module = _module()
    with pytest.raises(RuntimeError, match=words):
        call(step, given(module))
    assert module.kernel.tolist() == [1, 1, 1]


def test_changed_argument_that_is_returned_is_none(call) -> None:
    def step(module: Module) -> Any:
        _train(module)
        return module

    changed = step(_module())
    result = jax.tree.leaves(call(step, _module()))
    first = [getattr(leaf, "components", (leaf,))[0] for leaf in result]
    assert first[0].reshape(-1)[:3].tolist() == changed.kernel.tolist()


@pytest.mark.slow
def test_lists_and_dicts_of_a_step_are_its_own(call) -> None:
    def step(state: dict[str, Any]) -> Any:
        state["kernel"] = 2 * state["kernel"]
        return state["kernel"].sum()

    assert float(call(step, {"kernel": jnp.ones(3)})) == 6


def test_error_of_flax_for_a_module_around_the_step_names_the_way() -> None:
    def step() -> None:
        raise ValueError("Cannot extract graph node from different trace level, got Param(...)")

    with pytest.raises(RuntimeError, match="step changed a Flax NNX object created outside it"):
        sg.OneDeviceStrategy("cpu:0").run(step)


def test_modules_of_flax_are_refused_or_trained_by_their_state() -> None:
    nnx = pytest.importorskip("flax.nnx", reason="Flax is no dependency of this library")
    optax = pytest.importorskip("optax")
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    x = jnp.ones((4, 3))

    def train(model: Any, optimizer: Any, x: Any) -> Any:
        loss, gradients = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        context = sg.get_replica_context()
        gradients = context.all_reduce("MEAN", gradients) if context else gradients
        optimizer.update(model, gradients)
        return loss

    with pytest.raises(RuntimeError, match="would be lost"):
        strategy.run(train, args=(model, optimizer, x))
    with pytest.raises(RuntimeError, match="object created outside it"):
        strategy.run(lambda x: train(model, optimizer, x), args=(x,))

    graph, state = nnx.split((model, optimizer))

    def step(state: Any, x: Any) -> Any:
        modules = nnx.merge(graph, state)
        return train(*modules, x), nnx.state(modules)

    for _ in range(3):
        _, state = strategy.run(step, args=(state, x))

    def forget(state: Any, *, copy: bool) -> None:
        model, _ = nnx.merge(graph, state, copy=copy)
        model.kernel[...] = jnp.zeros_like(model.kernel[...])

    with pytest.raises(RuntimeError, match=r"To drop a change .* copy=True"):
        strategy.run(forget, args=(state,), kwargs={"copy": False})
    strategy.run(forget, args=(state,), kwargs={"copy": True})
    plain_model, plain_optimizer = nnx.merge(*nnx.split((model, optimizer)))
    for _ in range(3):
        train(plain_model, plain_optimizer, x)
    nnx.update((model, optimizer), strategy.reduce("MEAN", state, axis=None))
    assert jnp.allclose(model.kernel[...], plain_model.kernel[...], atol=1e-6)


# Programs of several processes are compared by shapes and operations, not by names.


class Recorder:
    """A group of two: this process, and one that sent `other`."""

    def __init__(self, other: Any = None) -> None:
        self.identity = Identity(0, ("chief 0", "worker 0"), "h", 1)
        self.other = other
        self.own: Any = None

    def exchange(self, name: str, own: Any) -> list[Any]:
        self.own = own
        return [own, own if self.other is None else self.other]


def loop(step: Any) -> Any:
    return lambda x: jax.lax.fori_loop(0, 3, lambda _, v: step(v), x)


def double(x: Any) -> Any:
    named = jnp.sin(x)
    return named * 2


@pytest.mark.parametrize(
    ("own", "other", "size", "what"),
    [
        (double, lambda value: jnp.sin(value) * 2, 3, None),
        (loop(jnp.sin), loop(jnp.sin), 3, None),
        (double, lambda x: jnp.cos(x) * 2, 3, "operations"),
        (double, lambda x: jnp.sin(x) * 3, 3, "operations"),
        (double, lambda x: jax.lax.cond(True, double, double, x), 3, "operations"),
        (loop(jnp.sin), loop(jnp.cos), 3, "operations"),
        (double, lambda x: (jnp.sin(x) * 2)[:2], 3, "results"),
        (double, double, 4, r"arguments are .*float32\[4\].*float32\[3\]"),
    ],
    ids=["names", "loop", "function", "constant", "branch", "inner", "shape", "arguments"],
)
def test_another_program_is_refused_with_what_differs(own, other, size, what, monkeypatch) -> None:
    group = Recorder()
    monkeypatch.setattr(program_fingerprint, "current_group", lambda: group)
    agree_on_program("step", jax.make_jaxpr(other)(np.ones(size, np.float32)))
    group.other = group.own
    words = rf"worker 0 and chief 0 traced .*step: their {what}"
    with contextlib.nullcontext() if what is None else pytest.raises(RuntimeError, match=words):
        agree_on_program("step", jax.make_jaxpr(own)(np.ones(3, np.float32)))


# Variables that are created in a trace: no value, a stand-in, and a value after it.


def test_variable_of_a_scope_has_a_stand_in_and_then_its_value() -> None:
    with keras.StatelessScope():
        variable = keras.Variable(lambda shape, dtype: np.full(shape, 3, dtype), shape=(2,))
        assert is_uninitialized(variable)
        np.testing.assert_array_equal(stand_in(variable), [3, 3])
    assert not is_uninitialized(variable)
    assert stand_in(variable) is None
    np.testing.assert_array_equal(variable.value, [3, 3])
