"""Large values of the host that are assigned to variables in shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import keras
import ml_dtypes
import numpy as np
import pytest

import stratagem as sg
from stratagem.topology import shards

# Keras 3.15 converts its own variables in a manner that NumPy 2 warns about.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy")

_DEVICES = [f"cpu:{index}" for index in range(4)]
_SHAPE = (512, 1024)
_LAYOUTS = {".*weight": (None, "logical")}
_STRATEGIES: dict[str, Callable[[], Any]] = {
    "sharded": lambda: sg.MirroredStrategy(_DEVICES, shard_state="all"),
    "layouts": lambda: sg.MirroredStrategy(_DEVICES, devices_per_replica=2, layout_map=_LAYOUTS),
    "both": lambda: sg.MirroredStrategy(
        _DEVICES, devices_per_replica=2, layout_map=_LAYOUTS, shard_state="all"
    ),
    "pinned": lambda: sg.CentralStorageStrategy(_DEVICES, parameter_device="pinned_host"),
}


def _variable(strategy: Any, dtype: str = "float32") -> Any:
    with strategy.scope():
        return keras.Variable("zeros", shape=_SHAPE, dtype=dtype, name="weight")


def _value(dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(1).normal(size=_SHAPE).astype(dtype)


@pytest.fixture
def copied_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the arrays that are sent to devices."""
    sizes: list[int] = []
    copy = shards.copied_to_device

    def counted(value: np.ndarray, *where: Any) -> jax.Array:
        sizes.append(value.nbytes)
        return copy(value, *where)

    monkeypatch.setattr(shards, "copied_to_device", counted)
    return sizes


@pytest.mark.parametrize("name", _STRATEGIES)
def test_each_device_gets_its_slice(name: str, copied_bytes: list[int]) -> None:
    variable = _variable(_STRATEGIES[name]())
    sharding, value = variable.stored.sharding, _value()
    variable.assign(value)
    shard_bytes = int(np.prod(sharding.shard_shape(_SHAPE))) * 4
    assert copied_bytes == [shard_bytes] * len(_DEVICES)
    assert shard_bytes <= value.nbytes / 2
    assert variable.stored.sharding == sharding
    np.testing.assert_array_equal(np.asarray(variable), value)


def test_variable_does_not_change_with_the_array_it_was_given() -> None:
    variable, value = _variable(_STRATEGIES["sharded"]()), _value()
    expected = value.copy()
    variable.assign(value)
    value[:] = 0
    np.testing.assert_array_equal(np.asarray(variable), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_values_are_cast_and_may_be_views(dtype: str) -> None:
    variable = _variable(_STRATEGIES["sharded"](), dtype)
    value = (100 * _value()).reshape(_SHAPE[::-1]).T
    variable.assign(value)
    expected = value.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    np.testing.assert_array_equal(np.asarray(variable), expected)


def test_other_shapes_are_refused() -> None:
    variable = _variable(_STRATEGIES["sharded"]())
    with pytest.raises(ValueError, match="must match"):
        variable.assign(np.ones(_SHAPE[::-1], np.float32))


def test_weights_of_a_file_arrive_in_slices(tmp_path: Any, copied_bytes: list[int]) -> None:
    def made() -> Any:
        return keras.Sequential([keras.Input((1024,)), keras.layers.Dense(512)])

    plain = made()
    plain.save_weights(tmp_path / "plain.weights.h5")
    with _STRATEGIES["sharded"]().scope():
        model = made()
    model.load_weights(tmp_path / "plain.weights.h5")
    assert max(copied_bytes) == plain.layers[0].kernel.value.nbytes / len(_DEVICES)
    model.save_weights(tmp_path / "back.weights.h5")
    again = made()
    again.load_weights(tmp_path / "back.weights.h5")
    for one, other in zip(plain.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_keras_hub_finds_shards_where_it_looks_for_a_value() -> None:
    variable = _variable(_STRATEGIES["sharded"]())
    assert variable._value is variable.stored
