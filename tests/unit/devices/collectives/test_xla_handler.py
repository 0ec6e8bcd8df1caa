"""Handlers of custom calls that are written in Python."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stratagem.devices.collectives.xla_handler import (
    DTYPES,
    PendingCall,
    handlers_work,
    register_handler,
)


def negate_later(call: PendingCall) -> None:
    def negate() -> None:
        np.negative(call.arguments[0], out=call.results[0])
        call.complete()

    threading.Thread(target=negate).start()


def refuse(call: PendingCall) -> None:
    call.fail("no, thanks")


def stumble(call: PendingCall) -> None:
    raise ValueError("a bug")


@pytest.fixture(scope="module", autouse=True)
def handlers() -> None:
    for name, start in [
        ("test_negate", negate_later),
        ("test_refuse", refuse),
        ("test_stumble", stumble),
    ]:
        register_handler(name, start)


def call(name: str, array: Any) -> Any:
    shape = jax.ShapeDtypeStruct(array.shape, array.dtype)
    return jax.ffi.ffi_call(name, shape, input_output_aliases={0: 0})(array)


@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (2, 0)])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_arrays_of_every_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    with jax.enable_x64(True):
        array = jnp.arange(1, 1 + np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
        result = jax.jit(lambda array: call("test_negate", array) * 1)(array)
        assert result.dtype == dtype
        np.testing.assert_array_equal(result, np.negative(np.asarray(array)))
        # The argument is not overwritten.
        np.testing.assert_array_equal(array, np.arange(1, 1 + array.size).reshape(shape))


def test_a_call_waits_for_those_that_it_depends_on() -> None:
    @jax.jit
    def program(array):
        return call("test_negate", call("test_negate", array) + 1) + 1

    np.testing.assert_array_equal(program(jnp.arange(4)), np.arange(4))


@pytest.mark.parametrize(("name", "words"), [("refuse", "no, thanks"), ("stumble", "a bug")])
def test_an_error_ends_the_program(name: str, words: str) -> None:
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=f"UNAVAILABLE.*{words}"):
        jax.block_until_ready(jax.jit(lambda array: call(f"test_{name}", array))(jnp.ones(3)))


def test_an_array_of_an_unknown_dtype_ends_the_program() -> None:
    array = jnp.ones(3, jnp.float8_e4m3fn)
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=r"UNAVAILABLE.*KeyError"):
        jax.block_until_ready(jax.jit(lambda array: call("test_negate", array))(array))


def test_handlers_are_known_to_work_only_if_xla_accepts_them(monkeypatch) -> None:
    assert handlers_work()

    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("another version")

    monkeypatch.setattr(jax.ffi, "register_ffi_target", refused)
    assert not handlers_work.__wrapped__()
