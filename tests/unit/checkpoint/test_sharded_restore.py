"""Restores by shards: any number of devices and any layout, from whole arrays, too."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import stratagem as sg
from stratagem.checkpoint import restoration
from stratagem.checkpoint import restoration as sharded_restore
from stratagem.checkpoint.restoration import SavedValue, ShardedRestore
from stratagem.errors import DataLossError

LARGE = np.random.default_rng(0).standard_normal((1024, 512), "float32")
WIDE = np.random.default_rng(1).standard_normal((3, 2**18), "float32")
SMALL = np.arange(2048, dtype="float32")


def checkpoint(count: int, values: bool = False, dtype: str = "float32") -> Any:
    options: Any = {"shard_state": "all"} if count > 1 else {}
    with sg.MirroredStrategy(jax.devices()[:count], **options).scope():
        state = {
            name: sg.Variable(value if values else np.zeros_like(value), dtype=dtype)
            for name, value in (("large", LARGE), ("small", SMALL), ("wide", WIDE))
        }
    return sg.train.Checkpoint(state=state)


def assert_restored(restored: Any) -> None:
    for name, value in (("large", LARGE), ("small", SMALL), ("wide", WIDE)):
        variable = restored.state[name]
        expected = value.astype(variable.dtype)
        np.testing.assert_array_equal(np.asarray(variable.value), expected, err_msg=name)


def path_of_saved(folder: Path, count: int) -> str:
    return checkpoint(count, values=True).save(folder / "ckpt")


@pytest.mark.parametrize(("saved", "opened"), [(4, 4), (4, 2), (2, 4), (4, 1), (1, 4)])
def test_any_number_of_devices(saved: int, opened: int, tmp_path: Path) -> None:
    path = path_of_saved(tmp_path, saved)
    restored = checkpoint(opened)
    restored.restore(path).assert_consumed()
    assert_restored(restored)
    assert restored.state["large"].stored.sharding.is_fully_replicated == (opened == 1)


def test_shards_are_read_without_the_whole(tmp_path: Path, monkeypatch: Any) -> None:
    path = path_of_saved(tmp_path, 4)
    loaded: list[Any] = []
    load = restoration.load_arrays
    monkeypatch.setattr(
        restoration,
        "load_arrays",
        lambda folder, manifest, names, receive: (
            loaded.extend(names["state_state"]) or load(folder, manifest, names, receive)
        ),
    )
    checkpoint(2).restore(path)
    assert loaded == ["small"]


def test_other_layout_and_dtype(tmp_path: Path) -> None:
    path = path_of_saved(tmp_path, 4)
    restored = checkpoint(2, dtype="bfloat16")
    restored.restore(path).assert_consumed()
    assert_restored(restored)
    assert restored.state["large"].stored.dtype == "bfloat16"


def test_layout_within_replicas(tmp_path: Path) -> None:
    """Two replicas of two devices hold columns; the checkpoint has rows, and the reverse."""
    groups = [["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]
    rules = {"large": (None, "logical")}
    with sg.MirroredStrategy(groups, layout_map=rules).scope():
        state = {"large": sg.Variable(np.zeros_like(LARGE), name="large")}
    divided: Any = sg.train.Checkpoint(state=state)
    divided.restore(path_of_saved(tmp_path, 4)).expect_partial()
    np.testing.assert_array_equal(np.asarray(divided.state["large"].value), LARGE)
    path = divided.save(tmp_path / "columns")
    restored = sg.train.Checkpoint(state={"large": checkpoint(4).state["large"]})
    restored.restore(path).assert_consumed()
    np.testing.assert_array_equal(np.asarray(state["large"].value), LARGE)


def _addresses(of: Any) -> list[int]:
    """Addresses of the shards, of an array of its own: no buffer that has a view is donated."""
    stored = of.state["large"].stored
    shards = [one.data for one in jax.device_put(stored, stored.sharding).addressable_shards]
    return [one.unsafe_buffer_pointer() for one in shards]


def _step(of: Any) -> None:
    variable = of.state["large"]
    variable.stored = jax.jit(lambda x: x + 1, donate_argnums=0)(variable.stored)


@pytest.mark.parametrize("is_saved", [True, False])
def test_next_step_reuses_the_memory(is_saved: bool, tmp_path: Path) -> None:
    one = checkpoint(2, values=True)
    if is_saved:
        _step(one)  # replaces arrays that share the memory of NumPy's
        one.save(tmp_path / "ckpt")
    else:
        one.restore(path_of_saved(tmp_path, 4))
    before = _addresses(one)
    _step(one)
    assert _addresses(one) == before


@pytest.mark.parametrize("fits", [True, False])
def test_damaged_shard_changes_nothing(fits: bool, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(sharded_restore, "fits_in_memory", lambda size_bytes: fits)
    path = path_of_saved(tmp_path, 4)
    restored = checkpoint(2)
    files = Path(path).glob("state_state/shards.process_0/d/*")
    file = max(files, key=lambda one: one.stat().st_size)
    content = file.read_bytes()
    middle = len(content) // 2
    file.write_bytes(content[:middle] + bytes(9) + content[middle + 9 :])
    with pytest.raises(DataLossError, match=r"(wide|large) differs from the saved one"):
        restored.restore(path)
    assert not any(np.any(np.asarray(one.value)) for one in restored.state.values())
    file.write_bytes(content)
    restored.restore(path).assert_consumed()
    assert_restored(restored)


@pytest.mark.parametrize("is_same", [True, False])
def test_processes_that_find_other_files_get_the_whole(
    is_same: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    path = path_of_saved(tmp_path, 4)
    monkeypatch.setattr(sharded_restore, "agree_on_all", lambda name, own: own and is_same)
    restored = checkpoint(4)
    variable = restored.state["large"]
    entry = {"path": "large", "shape": [1024, 512], "dtype": "float32"}
    values = [SavedValue(("state", "large"), variable, "state_state", entry | {"shard_shape": []})]
    assert (("state", "large") in ShardedRestore(Path(path), values)) == is_same


@pytest.mark.parametrize("fits", [True, False])
def test_without_memory_one_value_at_a_time_is_on_the_host(
    fits: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(sharded_restore, "fits_in_memory", lambda size_bytes: fits)
    count = 6
    with sg.MirroredStrategy(jax.devices()[:4], shard_state="all").scope():
        state = {str(index): sg.Variable(LARGE) for index in range(count)}
    restored = sg.train.Checkpoint(state=state)
    path = restored.save(tmp_path / "ckpt")
    restored.restore(path)  # modules that are imported
    tracemalloc.start()
    restored.restore(path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (peak_bytes > count * LARGE.nbytes) == fits
    assert fits or peak_bytes < 2 * LARGE.nbytes
