"""Steps that are defined anew before each call: one program where they do the same."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import sys
import threading
import types
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.execution.lookups import as_row_numbers
from stratagem.execution.programs.program import (
    ArgumentKinds,
    Recompilations,
    Usage,
    function_state,
    paused_garbage_collection,
)
from stratagem.execution.tracing.arguments import Leaf, Static

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


class _Holder:
    rate = 1.0


class _Slotted:
    __slots__ = ("rate",)

    def __init__(self) -> None:
        self.rate = 1.0


def _set(holder: Any, name: Any, value: Any) -> None:
    if isinstance(holder, dict | list | np.ndarray):
        holder[name] = value
    else:
        setattr(holder, name, value)


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
            is_item = isinstance(holder, dict | list | np.ndarray)
            return x * (holder[name] if is_item else getattr(holder, name))

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


class _LazyLibrary:
    """Is imported when it is used, which no comparison does."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(f"This requires another library, for {name}")


def test_state_that_cannot_be_compared_has_no_key() -> None:
    iterator, library = iter([1]), _LazyLibrary()
    masked = np.ma.masked_array([1.0, 2.0], [True, False])
    assert function_state(lambda: next(iterator)) is None
    for value in (np.zeros(1 << 20), bytearray(2), [[] for _ in range(20_000)], masked):
        assert function_state(lambda value=value: value) is None
    assert function_state(lambda: library) is not None
    assert function_state(lambda: np.ma.masked) is not None  # of a library: not compared


def test_what_a_model_trains_and_global_settings_are_part_of_a_key() -> None:
    layers = keras.layers
    model = keras.Sequential([keras.Input((2,)), layers.Dense(2), layers.Dense(1)])
    variable = keras.Variable(1.0)

    def key() -> Any:
        return function_state(lambda: (model, variable))

    keys = [key()]
    variable.assign(2.0)
    assert key() == keys[0]
    variable.trainable = False
    keys.append(key())
    model.layers[0].trainable = False
    keys.append(key())
    keras.config.set_epsilon(1e-6)
    try:
        keys.append(key())
    finally:
        keras.config.set_epsilon(1e-7)
    assert len({*keys}) == 4
    assert key() == keys[2]


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


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32"])
def test_ids_of_few_bits_become_numbers_of_rows(dtype) -> None:
    ids = as_row_numbers(jnp.asarray([1, 100], dtype))
    assert ids.dtype == "int32"
    assert ids.tolist() == [1, 100]


# Pause of garbage collection.


def test_collection_is_paused_while_a_step_is_traced_and_goes_on_after_an_error() -> None:
    def step() -> None:
        assert not gc.isenabled()
        raise ValueError("of the step")

    with pytest.raises(ValueError, match="of the step"):
        sg.OneDeviceStrategy("cpu:0").run(step)
    assert gc.isenabled()
    gc.disable()
    try:
        with paused_garbage_collection():
            pass
        assert not gc.isenabled(), "the program turned it off"
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


# Warning about steps that are compiled again and again.


@pytest.mark.slow
def test_step_that_is_compiled_again_and_again_is_named(strategy) -> None:
    def call(batch: Any) -> Any:
        def step() -> Any:
            return jnp.sum(batch)

        gc.collect()  # the programs of earlier calls are gone, and count all the same
        return strategy.run(step)

    call(jnp.ones(2))
    call(jnp.ones(2))
    words = r"step \(.*test_function_identity.py:\d+\) was comp"
    with pytest.warns(RuntimeWarning, match=words) as caught:
        call(jnp.ones(2))
    assert "the values of ['batch'] in it differ" in str(caught[0].message)


@pytest.mark.slow
@pytest.mark.parametrize("is_function", [False, True])
def test_the_sixth_kind_of_arguments_names_the_one_that_differs(strategy, is_function) -> None:
    def step(x: Any) -> Any:
        return x.sum()

    called = sg.function(step) if is_function else lambda x: strategy.run(step, args=(x,))
    if is_function:
        called(jnp.ones(8))  # not compiled
    for size in range(1, 6):
        called(jnp.ones(size))
    words = r"for 6 kinds .*args\[0\]: float32\[5\] -> float32\[6\]"
    with pytest.warns(RuntimeWarning, match=words):
        called(jnp.ones(6))
    called(jnp.ones(7))  # warned once


@pytest.mark.filterwarnings("error:.*(kinds of arguments|was compiled 3 times)")
def test_what_is_used_again_and_other_kinds_of_arguments_are_no_recompilation(strategy) -> None:
    def total(x: Any) -> Any:
        return x.sum()

    for size in range(1, 9):
        for _ in range(2):
            strategy.run(total, args=(jnp.ones(size),))
    for size in range(1, 6):
        strategy.run(lambda x: x.sum(), args=(jnp.ones(size),))

    def make(factor: Any) -> Any:
        return lambda x: x * factor

    for factor in range(4):
        step, compiled = make(factor), sg.function(make(factor))
        for _ in range(3):
            strategy.run(step, args=(1.0,))
            compiled(1.0)


@dataclasses.dataclass
class _WithInitVar:
    first: dataclasses.InitVar[float]

    def __post_init__(self, first: float) -> None:
        self.rate = first

    def __call__(self, x: Any) -> Any:
        return x * self.rate


@dataclasses.dataclass(frozen=True)
class _Frozen:
    rate: Any

    def __call__(self, x: Any) -> Any:
        return x / jnp.float32(self.rate) if self.rate is not True else -x


@dataclasses.dataclass
class _WithList:
    rates: Any

    def __call__(self, x: Any) -> Any:
        return x * self.rates[0]


@pytest.mark.parametrize(
    ("make", "values", "results"),
    [
        (_WithInitVar, (2.0, 3.0), [2, 3]),
        (_Frozen, (1, True), [1, -1]),
        (_Frozen, (0.0, -0.0), [np.inf, -np.inf]),
        (_WithList, ([2.0], jnp.full(1, 3.0)), [2, 3]),
    ],
)
def test_dataclasses_of_users_count_by_identity(make, values, results) -> None:
    strategy = sg.OneDeviceStrategy("cpu:0")
    found = [strategy.run(make(value), args=(np.float32(1),)) for value in values]
    assert found == results


def test_a_dataclass_may_be_the_function(strategy) -> None:
    made = strategy.run(_WithList, args=(np.float32(1),))
    assert isinstance(made, _WithList)
    assert [*strategy.local_results(made.rates)] == [1, 1]


@pytest.mark.parametrize(("one", "other"), [(1, True), (0.0, -0.0), (1, 1.0), ((1,), (True,))])
def test_equal_values_of_other_types_or_signs_are_told_apart(one, other) -> None:
    def made(value: Any) -> list[Any]:
        return [
            lambda: value,
            lambda value=value: value,
            lambda *, value=value: value,
            functools.partial(repr, value),
        ]

    for first, second in zip(made(one), made(other), strict=True):
        assert function_state(first) != function_state(second)
    nan = [function_state(functools.partial(repr, float("nan"))) for _ in range(2)]
    assert nan[0] == nan[1]


@pytest.mark.parametrize(
    ("setting", "num_programs"),
    [
        (contextlib.nullcontext, 1),
        (lambda: jax.default_matmul_precision("highest"), 2),
        (lambda: jax.enable_x64(not jax.config.jax_enable_x64), 2),
    ],
    ids=["none", "precision", "x64"],
)
def test_settings_of_jax_that_change_a_trace_are_seen(strategy, setting, num_programs) -> None:
    x = jnp.ones((2, 2))

    def step(x: Any) -> Any:
        return x @ x, jnp.arange(2.0)

    def dtype() -> Any:
        return strategy.local_results(strategy.run(step, args=(x,))[1])[0].dtype

    first = dtype()
    with setting():
        assert dtype() == jax.jit(step)(x)[1].dtype
    assert dtype() == first
    assert len(strategy.executor.programs) == num_programs


class _Net:
    def __call__(self, x: Any) -> Any:
        return x + 1


class _Trainer:
    def __init__(self) -> None:
        self.net = _Net()
        self.step = lambda x: self.net(x)
        self.steps = [lambda x: self.net(x) + 1]


def _with_net(net: Any, x: Any) -> Any:
    return net(x)


@pytest.mark.filterwarnings("ignore:.*was compiled")
def test_objects_are_freed_with_the_programs_that_used_them(strategy) -> None:
    x = np.float32(1)
    references: list[weakref.ref[Any]] = []
    for _ in range(4):
        trainer, net = _Trainer(), _Net()
        strategy.run(trainer.step, args=(x,))
        strategy.run(trainer.steps[0], args=(x,))
        strategy.run(_with_net, args=(net, x))
        references += [weakref.ref(trainer), weakref.ref(net)]
    del trainer, net
    strategy.executor._programs.clear()
    gc.collect()
    assert [one() for one in references] == [None] * 8


def test_kinds_of_arguments_of_a_function_are_bounded() -> None:
    known = Recompilations()
    for number in range(1_000):
        kinds = (Leaf(split=False, static=Static(str(number))),)
        known.note(
            _with_net, ArgumentKinds(jax.tree.structure(((0,), {})), kinds), Usage(is_reused=True)
        )
    assert len(known._kinds[_with_net.__code__]) <= 100
