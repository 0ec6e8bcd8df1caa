"""Steps that are defined anew before each call: one program where they do the same."""

from __future__ import annotations

import functools
import gc
import importlib
import sys
import threading
import types
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, PartitionSpec

import stratagem as sg
from stratagem.devices.mesh import Topology
from stratagem.execution.lookups import as_row_numbers
from stratagem.execution.programs.program import function_state, paused_garbage_collection
from stratagem.execution.tracing.arguments import Static
from stratagem.execution.tracing.remote_state import (
    UNTOUCHED,
    Lookup,
    local_jaxpr,
    without_unused_variables,
)

RATE = 1.0


@pytest.fixture
def strategy() -> Any:
    return sg.MirroredStrategy(["cpu:0", "cpu:1"])


def test_new_closure_over_a_model_is_compiled_for_its_first_calls_only(strategy) -> None:
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)

    def train(x: Any) -> Any:
        count = strategy.num_replicas_in_sync

        def step(x: Any) -> Any:

            loss, gradients = sg.value_and_grad(
                lambda: keras.ops.sum(model(x)) / count, model.trainable_variables
            )
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return strategy.run(step, args=(x,))

    for _ in range(6):
        train(jnp.ones((3, 2)))
    assert len(strategy.executor.programs) <= 2  # the optimizer is built in the first
    assert int(optimizer.iterations) == 6


def test_state_of_a_step_is_hashed_once(strategy, monkeypatch) -> None:
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])

    def step(x: Any) -> Any:
        return model(x)

    strategy.run(step, args=(jnp.ones((3, 2)),))
    hashed = []
    own_hash = Static.__hash__
    monkeypatch.setattr(Static, "__hash__", lambda own: hashed.append(own) or own_hash(own))
    strategy.run(step, args=(jnp.ones((3, 2)),))
    assert hashed == []
    hash(function_state(lambda: model))
    assert hashed


class _Holder:
    rate = 1.0


class _Slotted:
    __slots__ = ("rate",)

    def __init__(self) -> None:
        self.rate = 1.0


def _set(holder: Any, name: str, value: Any) -> None:
    (
        holder.__setitem__
        if isinstance(holder, dict | list | np.ndarray)
        else functools.partial(setattr, holder)
    )(name, value)


@pytest.mark.parametrize(
    ("holder", "name"),
    [
        ({"rate": 1.0}, "rate"),
        ([1.0], 0),
        (np.ones(1), 0),
        (types.SimpleNamespace(rate=1.0), "rate"),
        (_Slotted(), "rate"),
        (_Holder(), "rate"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_changed_state_is_seen_and_unchanged_state_is_one_program(strategy, holder, name) -> None:
    def call() -> float:
        def step(x: Any) -> Any:
            return x * (
                holder[name]
                if not isinstance(name, str) or isinstance(holder, dict)
                else getattr(holder, name)
            )

        return float(strategy.local_results(strategy.run(step, args=(jnp.float32(1.0),)))[0])

    assert [call(), call()] == [1.0, 1.0]
    assert len(strategy.executor.programs) == 1
    _set(holder, name, 3.0)
    assert call() == 3.0


def test_changed_state_of_a_function_is_seen(strategy, monkeypatch) -> None:
    def call(factor: Any, extra: Any = 0.0) -> float:
        def step(x: Any, extra: Any = extra) -> Any:
            return x * factor * RATE * _Holder.rate + extra

        return float(strategy.local_results(strategy.run(step, args=(jnp.float32(1.0),)))[0])

    assert [call(2.0), call(2.0), call(jnp.float32(3.0)), call(2.0, 1.0)] == [2, 2, 3, 3]
    assert [np.signbit(call(0.0)), np.signbit(call(-0.0))] == [False, True]
    monkeypatch.setitem(globals(), "RATE", 5.0)
    assert call(2.0) == 10
    monkeypatch.setattr(_Holder, "rate", 2.0)
    assert call(2.0) == 20


def test_partials_and_inner_functions_are_compared_by_what_they_do(strategy) -> None:
    def call(factor: Any) -> float:
        def scaled(x: Any) -> Any:
            return x * factor

        def step(scaled: Any, x: Any) -> Any:
            return scaled(x) + (lambda: factor)()

        value = strategy.run(functools.partial(step, scaled), args=(jnp.float32(1.0),))
        return float(strategy.local_results(value)[0])

    assert [call(2.0), call(2.0), call(2), call(3.0), call(2.0)] == [4, 4, 4, 6, 4]
    assert len(strategy.executor.programs) == 3


def test_key_keeps_what_it_compares_by_identity() -> None:
    def key(value: Any) -> Any:
        return function_state(lambda: value)

    first = key(jnp.ones(2))
    assert all(key(jnp.ones(2)) != first for _ in range(20))  # no id is used again


def test_state_that_cannot_be_compared_has_no_key() -> None:
    iterator = iter([1])
    assert function_state(lambda: next(iterator)) is None
    for value in (np.zeros(1 << 20), bytearray(2), [[] for _ in range(20_000)]):
        assert function_state(lambda value=value: value) is None


def test_library_that_is_imported_when_it_is_used_is_not_asked() -> None:
    class LazyLibrary:
        def __getattr__(self, name: str) -> Any:
            raise ImportError(f"This requires another library, for {name}")

    library = LazyLibrary()

    def step() -> Any:
        return library

    assert function_state(step) == function_state(step)


def test_changed_trainable_flag_is_seen() -> None:
    variable = keras.Variable(1.0)
    first = function_state(lambda: variable)
    variable.assign(2.0)

    def again() -> Any:
        return function_state(lambda: variable)

    before = again()
    assert before == again()
    assert first != before  # another lambda
    variable.trainable = False
    assert before != again()


def test_layer_counts_by_the_variables_that_it_trains() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(1)])

    def state() -> Any:
        return function_state(lambda: model)

    before = state()
    assert before == state()
    model.layers[0].trainable = False
    assert before != state()


def test_global_settings_are_part_of_a_key() -> None:
    def key() -> Any:
        return function_state(lambda: 1)

    before = key()
    assert before == key()
    keras.config.set_epsilon(1e-6)
    try:
        assert before != key()
    finally:
        keras.config.set_epsilon(1e-7)


def test_equal_containers_are_not_the_same_one(strategy) -> None:
    def call() -> tuple[list[int], Any]:
        calls: list[int] = []
        return calls, strategy.run(lambda: (calls.append(1), calls)[1])

    for _ in range(2):
        calls, returned = call()
        assert calls == returned == [1]


def test_installed_modules_count_by_identity(tmp_path, monkeypatch) -> None:
    for folder, name in (("site-packages", "elsewhere"), ("own", "ours")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.py").write_text("rate = 1.0\n")
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    for name, changes in (("elsewhere", False), ("ours", True)):
        module = importlib.import_module(name)
        monkeypatch.setitem(globals(), "_module", module)
        before = function_state(_rate_of_module)
        monkeypatch.setattr(module, "rate", 2.0)
        assert (function_state(_rate_of_module) != before) is changes, name
        monkeypatch.delitem(sys.modules, name)


def _rate_of_module() -> Any:
    return _module.rate  # noqa: F821 - set by a test


def test_masked_arrays_are_not_compared() -> None:
    masked = np.ma.masked_array([1.0, 2.0], [True, False])
    assert function_state(lambda: masked) is None
    plain = np.array([1.0, 2.0])
    assert function_state(lambda: plain) is not None
    assert function_state(lambda: np.ma.masked) is not None  # of a library: not walked


# What a step needs from outside: lookups that are told apart.


def test_lookups_are_alike_in_one_table_and_of_one_shape() -> None:
    one, two = (keras.Variable(np.zeros((4, 2), "float32")) for _ in range(2))
    lookup = Lookup(one, (3, 2), "float32")
    assert lookup.is_like(Lookup(one, (3, 2), "float32"))
    assert not lookup.is_like(Lookup(one, (2, 2), "float32"))
    assert not lookup.is_like(Lookup(two, (3, 2), "float32"))


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32"])
def test_ids_of_few_bits_become_numbers_of_rows(dtype) -> None:
    ids = as_row_numbers(jnp.asarray([1, 100], dtype))
    assert ids.dtype == "int32"
    assert ids.tolist() == [1, 100]


# The program of one replica, without inputs that nothing reads.

CONSTANT = np.arange(3, dtype=np.float32)


def test_one_replica_is_the_program_itself_without_untouched_inputs() -> None:
    closed = jax.make_jaxpr(lambda a, unused, b: a * b + CONSTANT)(*np.ones((3, 3), np.float32))
    sources = [("argument", 0), UNTOUCHED, ("argument", 1)]
    program, inputs, constants = local_jaxpr(closed, sources, Topology(None))
    values = {("argument", 0): 2 * CONSTANT, ("argument", 1): 3 * CONSTANT}
    values |= {("constant", index): value for index, value in enumerate(constants)}
    assert set(inputs) == set(values)
    (result,) = jaxpr_as_fun(program)(*[jnp.asarray(values[source]) for source in inputs])
    np.testing.assert_allclose(result, 6 * CONSTANT**2 + CONSTANT)


def test_program_of_a_replica_is_inside_of_shard_map() -> None:
    topology = Topology(tuple(jax.devices()[:2]))
    mesh = Mesh(np.array(topology.devices), ("replica",))
    mapped = jax.shard_map(
        lambda part, shared, unused: part * shared,
        mesh=mesh,
        in_specs=(PartitionSpec("replica"), PartitionSpec(), PartitionSpec()),
        out_specs=PartitionSpec("replica"),
        check_vma=False,
    )
    closed = jax.make_jaxpr(mapped)(np.ones((2, 3), np.float32), CONSTANT, CONSTANT)
    sources = [("stacked", 0), ("shared", 0), UNTOUCHED]
    program, inputs, constants = local_jaxpr(closed, sources, topology)
    assert inputs == sources[:2]
    assert constants == []
    assert [aval.shape for aval in program.in_avals] == [(1, 3), (3,)]
    (result,) = jaxpr_as_fun(program)(jnp.full((1, 3), 2.0), jnp.asarray(CONSTANT))
    np.testing.assert_array_equal(result, [2 * CONSTANT])


def test_read_only_variables_without_use_are_dropped_and_others_renumbered() -> None:
    closed = jax.make_jaxpr(lambda a, b, c, d: (a + c, d))(*np.ones((4, 2), np.float32))
    inputs = [("read_only", 0), ("read_only", 1), ("read_only", 2), ("argument", 7)]
    program, remaining, used, _ = without_unused_variables(closed, inputs, ["va", "vb", "vc"])
    assert remaining == [("read_only", 0), ("read_only", 1), ("argument", 7)]
    assert used == ["va", "vc"]
    a, c, d = (jnp.full(2, value) for value in (1.0, 10.0, 100.0))
    np.testing.assert_array_equal(jaxpr_as_fun(program)(a, c, d)[0], [11, 11])


# Pause of garbage collection.


def test_collection_is_paused_while_a_step_is_traced_and_goes_on_after() -> None:
    seen = []
    strategy = sg.OneDeviceStrategy("cpu:0")
    strategy.run(lambda: seen.append(gc.isenabled()))
    assert seen == [False]
    assert gc.isenabled()


def test_an_error_in_the_step_ends_the_pause() -> None:
    def step() -> None:
        raise ValueError("of the step")

    with pytest.raises(ValueError, match="of the step"):
        sg.OneDeviceStrategy("cpu:0").run(step)
    assert gc.isenabled()


def test_collection_that_the_program_turned_off_stays_off() -> None:
    gc.disable()
    try:
        with paused_garbage_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_last_of_two_threads_ends_the_pause() -> None:
    inside, may_leave = threading.Event(), threading.Event()

    def trace() -> None:
        with paused_garbage_collection():
            inside.set()
            may_leave.wait(120)

    thread = threading.Thread(target=trace)
    thread.start()
    assert inside.wait(120)
    with paused_garbage_collection():
        pass
    assert not gc.isenabled()
    may_leave.set()
    thread.join()
    assert gc.isenabled()
