"""Strategies of devices that are not here."""

from __future__ import annotations

import jax
import pytest

import stratagem as sg
from stratagem.strategies.compile_only import CompileOnlyStrategy


def test_replicas_are_the_devices() -> None:
    strategy = CompileOnlyStrategy(jax.devices()[:3])
    assert strategy.num_replicas_in_sync == 3
    assert strategy.topology.devices == tuple(jax.devices()[:3])


def test_gradients_are_combined_as_requested() -> None:
    ops = sg.RingAllReduce()
    assert CompileOnlyStrategy(jax.devices()[:2], ops).cross_device_ops is ops


def test_run_is_refused() -> None:
    with pytest.raises(RuntimeError, match="run was called on the 2 devices"):
        CompileOnlyStrategy(jax.devices()[:2]).run(lambda: 1)


def test_no_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"devices=\(\) is empty"):
        CompileOnlyStrategy([])
