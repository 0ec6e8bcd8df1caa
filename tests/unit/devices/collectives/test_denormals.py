"""Threads that compute as XLA's do."""

from __future__ import annotations

import platform
import sys
import threading

import jax
import numpy as np
import pytest

from stratagem.devices.collectives import shared_sums as denormals
from stratagem.devices.collectives.shared_sums import flush_denormals

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
    sys.platform != "linux" or platform.machine() not in denormals._CONTROLS,
    reason="the mode can be set on Linux, on x86-64 and ARM",
)
def test_a_thread_that_flushes_computes_as_xla() -> None:
    of_xla = jax.jit(lambda x: x * 0.5)(np.full(100, _SMALLEST))
    np.testing.assert_array_equal(_halved(is_flushed=True), of_xla)


def test_other_threads_keep_their_mode() -> None:
    _halved(is_flushed=True)
    assert _halved(is_flushed=False).all()


def test_another_system_keeps_its_mode(monkeypatch) -> None:
    monkeypatch.setattr(denormals.sys, "platform", "darwin")
    assert _halved(is_flushed=True).all()
