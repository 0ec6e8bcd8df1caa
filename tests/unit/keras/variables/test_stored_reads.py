"""Reads of variables as they are stored."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.keras.variables.stored_value import reading_as_stored, reads_as_stored

_DEVICES = ["cpu:0", "cpu:1"]


def _made(strategy: Any, **options: Any) -> Any:
    with strategy.scope():
        return keras.Variable(np.arange(2048.0, dtype=np.float32), **options)


def test_only_variables_of_the_strategy_are_read_as_stored() -> None:
    strategy, other = (sg.MirroredStrategy(_DEVICES, shard_state="all") for _ in range(2))
    own, foreign = _made(strategy), _made(other)
    with reading_as_stored(strategy):
        assert own.value is own.stored
        assert len(foreign.value.devices()) == 1
        with reading_as_stored(None):
            assert len(own.value.devices()) == 1
    np.testing.assert_array_equal(own.stored, own.value)


def test_aggregate_of_components_is_on_all_devices() -> None:
    strategy = sg.MirroredStrategy(_DEVICES)
    variable = _made(strategy, synchronization="on_read", aggregation="mean", trainable=False)
    with reading_as_stored(strategy):
        value = variable.value
    assert value.shape == variable.shape
    assert value.sharding == strategy.topology.replicated
    np.testing.assert_array_equal(value, np.arange(2048.0))


def test_reads_of_other_threads_and_after_an_error_are_on_one_device() -> None:
    variable = _made(sg.MirroredStrategy(_DEVICES, shard_state="all"))
    strategy = variable.distribute_strategy
    with ThreadPoolExecutor(1) as pool, reading_as_stored(strategy):
        assert pool.submit(reads_as_stored, strategy).result() is False
    with pytest.raises(KeyError), reading_as_stored(strategy):
        raise KeyError
    assert len(variable.value.devices()) == 1
