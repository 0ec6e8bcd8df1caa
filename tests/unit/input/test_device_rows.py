"""Rows of arrays on devices: order, padding, shardings, and one program for a group of steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stratagem.input.batches import take_batch
from stratagem.input.device_rows import DeviceRows, is_on_accelerator, with_selected_rows
from stratagem.input.placement import place
from tests.parity.comparison import mirrored
from tests.row_selections import count_selections

_X = np.arange(60, dtype="float32").reshape(20, 3)
_Y = np.arange(20, dtype="int32")
_ORDER = np.random.default_rng(0).permutation(20)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The programs that select rows, by their calls."""
    return count_selections(monkeypatch)


def _batches(selections: list[Any], num_replicas: int, device: int = 0) -> list[Any]:
    put = jax.device_put((_X, _Y), jax.devices("cpu")[device])
    x, y = map(DeviceRows, put)
    return [take_batch((x[rows], y[rows]), num_replicas) for rows in selections]


_SELECTIONS = {
    "consecutive": [slice(0, 4), slice(4, 8), slice(8, 12)],
    "one": [slice(8, 12)],
    "short": [slice(18, 20)],
    "with holes": [slice(0, 4), slice(8, 12)],
    "overlapping": [slice(0, 4), slice(2, 6)],
    "in an order": [_ORDER[:4], _ORDER[4:8], _ORDER[8:12]],
    "mixed": [slice(0, 4), _ORDER[:4]],
    "not even": [slice(0, 5), slice(5, 10)],
    "not even, in an order": [_ORDER[:5], _ORDER[5:10]],
}


@pytest.mark.parametrize("name", _SELECTIONS)
@pytest.mark.parametrize("num_replicas", [1, 2, 4])
@pytest.mark.parametrize("device", [0, 3])
def test_rows_are_those_of_arrays_on_the_host(
    name: str, num_replicas: int, device: int, calls: list[Any]
) -> None:
    selections = _SELECTIONS[name]
    topology = mirrored(num_replicas).topology
    placed = place(_batches(selections, num_replicas, device), topology)
    hosts = [take_batch((_X[rows], _Y[rows]), num_replicas) for rows in selections]
    expected = place(hosts, topology)
    assert len(calls) == 1
    assert (placed.lengths, placed.size) == (expected.lengths, expected.size)
    for array, other in zip(placed.arrays, expected.arrays, strict=True):
        np.testing.assert_array_equal(array, other)
        assert array.sharding == other.sharding
        assert array.dtype == other.dtype


def test_columns_with_other_rows_or_on_other_devices_are_selected_apart(calls: list[Any]) -> None:
    x = DeviceRows(jax.device_put(_X, jax.devices("cpu")[0]))
    y = DeviceRows(jax.device_put(_Y, jax.devices("cpu")[1]))
    topology = mirrored(1).topology
    placed = place([take_batch((x[:4], y[:4], x[4:8], _Y[:4]), 1)], topology)
    assert len(calls) == 3
    for array, other in zip(placed.arrays, (_X[:4], _Y[:4], _X[4:8], _Y[:4]), strict=True):
        np.testing.assert_array_equal(array, other)


def test_array_on_all_devices_of_the_strategy_stays_there(calls: list[Any]) -> None:
    topology = mirrored(4).topology
    x = DeviceRows(jax.device_put(_X, topology.stacked))
    batches = [take_batch(x[start : start + 4], 4) for start in (0, 4)]
    (array,) = place(batches, topology).arrays
    assert len(calls) == 1
    assert array.sharding == topology.stacked_steps
    np.testing.assert_array_equal(array, _X[:8].reshape(2, 4, 1, 3))


def test_rows_of_rows_are_those_of_numpy() -> None:
    rows = DeviceRows(jnp.asarray(_X))
    assert (rows.shape, rows.ndim, len(rows)) == ((20, 3), 2, 20)
    for first in (slice(3, 15), _ORDER[:12], slice(2, 100)):
        for second in (slice(1, 5), slice(None, None, 2), np.array([3, 0, 3]), slice(8, 4)):
            selected = rows[first][second]
            np.testing.assert_array_equal(selected, _X[first][second])
            assert selected.shape == _X[first][second].shape


def test_rows_are_cast_when_they_are_selected() -> None:
    rows = DeviceRows(jnp.asarray(_X, "bfloat16"), dtype="float32")
    data = with_selected_rows({"x": rows[4:6], "y": _Y})
    assert data["x"].dtype == np.float32
    np.testing.assert_array_equal(data["x"], _X[4:6])
    assert data["y"] is _Y


def test_arrays_on_cpu_and_values_of_a_trace_are_not_on_an_accelerator() -> None:
    assert not is_on_accelerator(jnp.ones(3))
    assert not is_on_accelerator(_X)
    jax.jit(lambda x: [None, x][is_on_accelerator(x)])(_X)
