"""Large values of the host that are assigned to variables in shards."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import ml_dtypes
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices import shards
from stratagem.execution.tracing.functionalize import on_global_model
from stratagem.keras.variables.rows import _digest, _digest_on_device
from stratagem.keras.variables.variable import reading_as_stored, reads_as_stored
from tests.fresh_process import run_fresh
from tests.marks import slow

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
# Of Keras, by name and arguments.
_INITIALIZERS = [
    ("Zeros", {}),
    ("Constant", {"value": 0.3}),
    ("RandomNormal", {"mean": 0.3}),
    ("TruncatedNormal", {"mean": 0.1}),
    ("RandomUniform", {"minval": -0.3, "maxval": 0.7}),
    ("VarianceScaling", {"distribution": "untruncated_normal"}),
    ("GlorotUniform", {}),
    ("Orthogonal", {}),
    ("Identity", {}),
]
_CONSTANTS = {"Zeros", "Constant", "Identity"}
_QUICK = {"Zeros", "Constant", "GlorotUniform"}


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


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in _STRATEGIES), ("sharded", "bfloat16"), ("sharded", "int8")],
)
def test_each_device_gets_its_slice(name: str, dtype: str, copied_bytes: list[int]) -> None:
    """Of a view, too, in the dtype of the variable, which keeps nothing of what it was given."""
    variable = _variable(_STRATEGIES[name](), dtype)
    copied_bytes.clear()
    sharding, value = variable.stored.sharding, (100 * _value()).reshape(_SHAPE[::-1]).T
    expected = value.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    variable.assign(value)
    shard_bytes = int(np.prod(sharding.shard_shape(_SHAPE))) * expected.itemsize
    assert copied_bytes == [shard_bytes] * len(_DEVICES)
    assert shard_bytes <= expected.nbytes / 2
    assert variable.stored.sharding == sharding
    assert variable._value is variable.stored  # where KerasHub looks for a value
    value[:] = 0
    np.testing.assert_array_equal(np.asarray(variable), expected)
    with pytest.raises(ValueError, match="must match"):
        variable.assign(np.ones(_SHAPE[::-1], np.float32))


def test_weights_of_a_file_arrive_in_slices(tmp_path: Path, copied_bytes: list[int]) -> None:
    def made() -> Any:
        return keras.Sequential([keras.Input((1024,)), keras.layers.Dense(512)])

    plain = made()
    plain.save_weights(tmp_path / "plain.weights.h5")
    with _STRATEGIES["sharded"]().scope():
        model = made()
    copied_bytes.clear()
    model.load_weights(tmp_path / "plain.weights.h5")
    assert max(copied_bytes) == plain.layers[0].kernel.value.nbytes / len(_DEVICES)
    model.save_weights(tmp_path / "back.weights.h5")
    again = made()
    again.load_weights(tmp_path / "back.weights.h5")
    for one, other in zip(plain.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("kind", "arguments"), [one if one[0] in _QUICK else slow(*one) for one in _INITIALIZERS]
)
def test_initial_values_are_those_of_one_device(kind: str, arguments: dict[str, Any]) -> None:
    seed = {} if kind in _CONSTANTS else {"seed": 7}
    initializer = getattr(keras.initializers, kind)(**arguments, **seed)
    for dtype in ("float32", "bfloat16") if kind in _CONSTANTS else ("float32",):
        expected = np.asarray(initializer(_SHAPE, dtype=dtype))
        for name in ("sharded", "both"):
            with _STRATEGIES[name]().scope():
                variable = keras.Variable(initializer, shape=_SHAPE, dtype=dtype, name="weight")
            assert variable.stored.sharding.shard_shape(_SHAPE) != _SHAPE
            np.testing.assert_array_equal(np.asarray(variable), expected)


@pytest.mark.parametrize("kind", ["zeros", "random_normal"])
def test_shards_of_an_initial_value_do_not_hold_the_whole(kind: str) -> None:
    with _STRATEGIES["sharded"]().scope():
        variable = keras.Variable(kind, shape=_SHAPE, name="weight")
    gc.collect()
    whole = [array for array in jax.live_arrays("cpu") if array.shape == _SHAPE]
    assert all(array is variable.stored for array in whole)
    shards = sorted(one.data.unsafe_buffer_pointer() for one in variable.stored.addressable_shards)
    shard_bytes = variable.stored.nbytes // len(shards)
    # Slices of one array would be adjacent.
    assert any(second != first + shard_bytes for first, second in itertools.pairwise(shards))


def test_freed_memory_is_released_after_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[int] = []
    monkeypatch.setattr(shards, "release_freed_memory", lambda: released.append(1))
    monkeypatch.setattr(shards, "_sliced_bytes", 0)
    monkeypatch.setattr(shards, "_RELEASED_BYTES", 3 * 2**20)
    variable, value = _variable(_STRATEGIES["sharded"](), "bfloat16"), _value()  # 1 MiB
    variable.assign(value)
    assert not released
    for _ in range(3):
        variable.assign(value)
    assert released == [1]


# Reads of variables as they are stored.

_DEVICES_OF_STORED_READS = ["cpu:0", "cpu:1"]


def _made(strategy: Any, **options: Any) -> Any:
    with strategy.scope():
        return keras.Variable(np.arange(2048.0, dtype=np.float32), **options)


def test_only_variables_of_the_strategy_are_read_as_stored() -> None:
    strategy, other = (
        sg.MirroredStrategy(_DEVICES_OF_STORED_READS, shard_state="all") for _ in range(2)
    )
    own, foreign = _made(strategy), _made(other)
    with pytest.raises(KeyError), reading_as_stored(strategy):
        raise KeyError
    assert len(own.value.devices()) == 1
    with ThreadPoolExecutor(1) as pool, reading_as_stored(strategy):
        assert pool.submit(reads_as_stored, strategy).result() is False
        assert own.value is own.stored
        assert len(foreign.value.devices()) == 1
        with reading_as_stored(None):
            assert len(own.value.devices()) == 1
    np.testing.assert_array_equal(own.stored, own.value)


def test_aggregate_of_components_is_on_all_devices() -> None:
    strategy = sg.MirroredStrategy(_DEVICES_OF_STORED_READS)
    variable = _made(strategy, synchronization="on_read", aggregation="mean", trainable=False)
    with reading_as_stored(strategy):
        value = variable.value
    assert value.shape == variable.shape
    assert value.sharding == strategy.topology.replicated
    np.testing.assert_array_equal(value, np.arange(2048.0))


# Local copies: what a variable stands for in a training step, and outside.


def test_variable_stands_for_its_copy_in_a_replica_function_only() -> None:
    strategy = sg.LocalUpdateStrategy(devices=["cpu:0", "cpu:1"])
    with strategy.scope():
        variable = keras.Variable(1.0)
        optimizer = keras.optimizers.SGD()
        assert variable.local_copy is None
        assert not variable.outer_state
        optimizer.build([variable])
    ids = sg.PerReplica(stacked=np.array([10.0, 20.0], "float32"))

    def assign(value):
        variable.assign(value)
        with on_global_model():
            whole = variable.value + 0.0
        return variable.value + 0.0, whole

    own, whole = strategy.run(assign, args=(ids,))
    assert [float(one) for one in strategy.local_results(own)] == [10.0, 20.0]
    assert [float(one) for one in strategy.local_results(whole)] == [1.0, 1.0]
    assert float(variable.value) == 1.0
    np.testing.assert_array_equal(variable.local_copy.storage, [10.0, 20.0])
    variable.assign(5.0)
    np.testing.assert_array_equal(variable.local_copy.storage, [5.0, 5.0])


# Digests of assigned values: any bit counts, and a digest takes no copy from an accelerator.


@pytest.mark.parametrize("digest", [_digest, _digest_on_device], ids=["host", "device"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint32", "bool", "complex64"])
def test_any_change_changes_the_digest(dtype: str, digest: Any) -> None:
    value = np.asarray([[1, 0, 1], [0, 1, 1]]).astype(jnp.dtype(dtype))
    seen = {int(digest(jnp.asarray(value)))}
    for place in np.ndindex(value.shape):
        changed = value.copy()
        changed[place] = not changed[place]
        seen.add(int(digest(jnp.asarray(changed))))
    seen.add(int(digest(jnp.asarray(value[::-1]))))
    assert len(seen) == 1 + value.size + 1
    assert digest(jnp.asarray(value)) == digest(jnp.asarray(value.copy()))
    assert _digest(value) == _digest(jnp.asarray(value)) == _digest(np.asfortranarray(value))
    assert _digest(None) is None
    _ = int(digest(jnp.zeros((0, 3), dtype))), int(digest(jnp.ones((), dtype)))


_KEPT_UNTIL_EXIT = """
import os
os.dup2(1, 2)
import jax
jax.config.update("jax_num_cpu_devices", 2)
import numpy as np
import stratagem as sg
strategy = sg.MirroredStrategy(shard_state="all")
with strategy.scope():
    table = sg.Variable(np.zeros((1024, 256), "float32"))
print("made")
"""


def test_variables_that_live_until_exit_say_nothing() -> None:
    assert run_fresh(_KEPT_UNTIL_EXIT, JAX_PLATFORMS="cpu") == ["made"]


_LOADING = """
import gc
import pathlib
import jax
jax.config.update("jax_num_cpu_devices", 8)
import keras
import stratagem as sg

def status_mib(key):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024

def make(count):
    layers = [keras.layers.Dense(2048, kernel_initializer="zeros") for _ in range(count)]
    return keras.Sequential([keras.Input((2048,)), *layers])

with sg.MirroredStrategy(shard_state="all").scope():
    warm = make(1)
    warm.save_weights("warm.weights.h5")
    warm.load_weights("warm.weights.h5")
    before = status_mib("VmRSS")
    model = make(24)
    model.save_weights("whole.weights.h5")
    gc.collect()
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    for _ in range(3):
        model.load_weights("whole.weights.h5")
print("peak:", status_mib("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="no /proc")
def test_reading_weights_takes_the_memory_of_shards_and_one_array(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (line,) = run_fresh(_LOADING, JAX_PLATFORMS="cpu")
    array_mib = 2048**2 * 4 / 2**20
    assert float(line.split("peak:")[1]) < 1.2 * 24 * array_mib + array_mib
