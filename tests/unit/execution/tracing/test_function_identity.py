"""Steps that are defined anew before each call: one program where they do the same."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.execution.tracing import function_identity
from stratagem.execution.tracing.function_identity import function_key

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
    own_hash = function_identity._Same.__hash__
    monkeypatch.setattr(
        function_identity._Same, "__hash__", lambda same: hashed.append(same) or own_hash(same)
    )
    strategy.run(step, args=(jnp.ones((3, 2)),))
    assert hashed == []
    function_key(lambda: model)
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
        return function_key(lambda: value)

    first = key(jnp.ones(2))
    assert all(key(jnp.ones(2)) != first for _ in range(20))  # no id is used again


def test_state_that_cannot_be_compared_has_no_key() -> None:
    iterator = iter([1])
    assert function_key(lambda: next(iterator)) is None
    big = np.zeros(1 << 20)
    assert function_key(lambda: big) is None


def test_library_that_is_imported_when_it_is_used_is_not_asked() -> None:
    class LazyLibrary:
        def __getattr__(self, name: str) -> Any:
            raise ImportError(f"This requires another library, for {name}")

    library = LazyLibrary()

    def step() -> Any:
        return library

    assert function_key(step) == function_key(step)


def test_changed_trainable_flag_is_seen() -> None:
    variable = keras.Variable(1.0)
    first = function_key(lambda: variable)
    variable.assign(2.0)

    def again() -> Any:
        return function_key(lambda: variable)

    before = again()
    assert before == again()
    assert first != before  # another lambda
    variable.trainable = False
    assert before != again()


def test_global_settings_are_part_of_a_key() -> None:
    def key() -> Any:
        return function_key(lambda: 1)

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


def test_modules_of_any_folder_with_installed_packages_are_not_walked(
    tmp_path, monkeypatch
) -> None:
    # As `pip install --target` leaves them, and as an environment's base has them.
    (tmp_path / "elsewhere-1.0.dist-info").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "__init__.py").write_text("rate = 1.0\n")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "ours.py").write_text("rate = 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path / "own"))
    for name, changes in (("elsewhere", False), ("ours", True)):
        module = importlib.import_module(name)
        monkeypatch.setitem(globals(), "_module", module)
        before = function_key(_rate_of_module)
        monkeypatch.setattr(module, "rate", 2.0)
        assert (function_key(_rate_of_module) != before) is changes, name
        monkeypatch.delitem(sys.modules, name)


def _rate_of_module() -> Any:
    return _module.rate  # noqa: F821 - set by a test


def test_masked_arrays_are_not_compared() -> None:
    masked = np.ma.masked_array([1.0, 2.0], [True, False])
    assert function_key(lambda: masked) is None
    plain = np.array([1.0, 2.0])
    assert function_key(lambda: plain) is not None
    assert function_key(lambda: np.ma.masked) is not None  # of a library: not walked
