"""Handlers of custom calls that are written in Python."""

from __future__ import annotations

import platform
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stratagem.devices import shared_sums
from stratagem.devices.shared_sums import (
    DTYPES,
    PendingCall,
    flush_denormals,
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


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_arrays_of_every_dtype_and_shape(dtype: str) -> None:
    with jax.enable_x64(True):
        arrays = [
            jnp.arange(1, 1 + np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
            for shape in [(), (1,), (3, 4), (2, 0)]
        ]
        results = jax.jit(lambda arrays: [call("test_negate", one) * 1 for one in arrays])(arrays)
        for array, result in zip(arrays, results, strict=True):
            assert result.dtype == dtype
            np.testing.assert_array_equal(result, np.negative(np.asarray(array)))
            # The argument is not overwritten.
            np.testing.assert_array_equal(array, np.arange(1, 1 + array.size).reshape(array.shape))


def test_a_call_waits_for_those_that_it_depends_on() -> None:
    @jax.jit
    def program(array):
        return call("test_negate", call("test_negate", array) + 1) + 1

    np.testing.assert_array_equal(program(jnp.arange(4)), np.arange(4))


@pytest.mark.parametrize(("name", "words"), [("refuse", "no, thanks"), ("stumble", "a bug")])
def test_an_error_ends_the_program(name: str, words: str) -> None:
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=f"UNAVAILABLE.*{words}"):
        jax.block_until_ready(jax.jit(lambda array: call(f"test_{name}", array))(jnp.ones(3)))


def test_handlers_are_known_to_work_only_if_xla_accepts_them(monkeypatch) -> None:
    assert handlers_work()

    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("another version")

    monkeypatch.setattr(jax.ffi, "register_ffi_target", refused)
    assert not handlers_work.__wrapped__()


# Threads that compute as XLA's do.

_SMALLEST = np.finfo(np.float32).tiny


def _halved(*, is_flushed: bool) -> np.ndarray:
    found = []

    def halve() -> None:
        if is_flushed:
            flush_denormals()
        found.append(np.full(100, _SMALLEST) * np.float32(0.5))

    thread = threading.Thread(target=halve)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in shared_sums._CONTROLS,
    reason="the mode can be set on Linux, on x86-64 and ARM",
)
def test_a_thread_that_flushes_computes_as_xla() -> None:
    of_xla = jax.jit(lambda x: x * 0.5)(np.full(100, _SMALLEST))
    np.testing.assert_array_equal(_halved(is_flushed=True), of_xla)


def test_other_threads_keep_their_mode() -> None:
    _halved(is_flushed=True)
    assert _halved(is_flushed=False).all()


def test_an_array_of_an_unknown_dtype_ends_the_program() -> None:
    array = jnp.ones(3, jnp.float8_e4m3fn)
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=r"UNAVAILABLE.*KeyError"):
        jax.block_until_ready(jax.jit(lambda array: call("test_negate", array))(array))
