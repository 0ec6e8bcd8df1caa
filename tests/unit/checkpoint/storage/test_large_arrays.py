"""Large arrays: reading without Orbax gives the same values, and leaves other layouts to Orbax."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import orbax.checkpoint.experimental.v1 as orbax
import pytest

from stratagem.checkpoint.storage import files
from stratagem.checkpoint.storage.files import check_arrays, read_arrays, read_manifest, write
from stratagem.checkpoint.storage.large_arrays import read_large_arrays, verify_large_arrays
from stratagem.errors import DataLossError

NOISE = np.random.default_rng(0).standard_normal((1000, 1200), "float32")

LARGE = {
    "a/kernel": NOISE,
    "a/transposed": NOISE.T,
    "b.with.dots": NOISE.astype("float64"),
    "half": NOISE.astype(ml_dtypes.bfloat16),
    "bytes": NOISE.view(np.int8).reshape(-1),
    "zeros": np.zeros((2, 3, 2**18), "int32"),
}
SMALL = {"scalar": np.array(3.0), "bias": np.ones(7), "below": np.zeros(2**20 - 1, "int8")}
ITEMS: dict[str, Any] = {"pytree": LARGE | SMALL, "state": {"value": NOISE[:500]}, "empty": {}}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    return _write(tmp_path / "one")


def _write(folder: Path) -> tuple[Path, dict[str, Any]]:
    write(folder, ITEMS, {})
    return folder, read_manifest(folder)


def _read(saved: tuple[Path, dict[str, Any]], receive: Any = None) -> dict[str, Any]:
    folder, manifest = saved
    return read_large_arrays(folder, manifest["items"], receive)


def _largest_file(folder: Path) -> Path:
    return max(folder.rglob("d/*"), key=lambda path: path.stat().st_size)


def _flip_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_large_arrays_are_read_without_orbax(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    by_orbax = orbax.load_checkpointables(saved[0])
    monkeypatch.setattr(orbax, "load_checkpointables", None)
    read = _read(saved)
    assert {name: set(arrays) for name, arrays in read.items()} == {
        "pytree": set(LARGE),
        "state": {"value"},
    }
    for name, arrays in read.items():
        for path, array in arrays.items():
            np.testing.assert_array_equal(array, ITEMS[name][path], strict=True)
    np.testing.assert_array_equal(read["pytree"]["a/kernel"], by_orbax["pytree"]["a"]["kernel"])
    np.testing.assert_array_equal(read["state"]["value"], by_orbax["state"]["value"])


def test_all_arrays_of_a_checkpoint_in_order(saved: Any) -> None:
    folder, manifest = saved
    read = read_arrays(folder, manifest, list(ITEMS))
    assert {name: list(arrays) for name, arrays in read.items()} == {
        name: list(arrays) for name, arrays in ITEMS.items()
    }
    for name, arrays in ITEMS.items():
        for path, array in arrays.items():
            np.testing.assert_array_equal(read[name][path], array, strict=True)
    some = read_arrays(folder, manifest, {"pytree": ["bias", "half"]})
    assert set(some["pytree"]) == {"bias", "half"}


def test_the_receiver_replaces_large_arrays_only(saved: Any) -> None:
    folder, manifest = saved
    read = read_arrays(folder, manifest, ["pytree"], np.shape)["pytree"]
    assert read["half"] == NOISE.shape
    np.testing.assert_array_equal(read["bias"], SMALL["bias"], strict=True)


def test_received_arrays_share_memory_until_they_are_copied(saved: Any) -> None:
    copied = _read(saved, np.array)
    for name, arrays in copied.items():
        for path, array in arrays.items():
            np.testing.assert_array_equal(array, ITEMS[name][path], strict=True)
    seen: set[int] = set()
    _read(saved, lambda array: seen.add(array.ctypes.data))
    assert len(seen) < len(LARGE)


def test_arrays_are_verified_without_keeping_them(saved: Any) -> None:
    folder, manifest = saved
    assert verify_large_arrays(folder, manifest["items"]) == {
        "pytree": dict.fromkeys(LARGE, True),
        "state": {"value": True},
    }


@pytest.mark.parametrize("option", ["use_compression", "use_ocdbt"])
def test_other_layouts_are_left_to_orbax(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As older versions wrote them, or plain Orbax."""
    original: Callable[..., Any] = files._saving

    def saving(library: Any) -> Any:
        context = original(library)
        setattr(context.array.saving, option, option == "use_compression")
        return context

    monkeypatch.setattr(files, "_saving", saving)
    folder, manifest = _write(tmp_path / "one")
    assert _read((folder, manifest)) == {}
    read = read_arrays(folder, manifest, ["pytree"])["pytree"]
    np.testing.assert_array_equal(read["a/kernel"], NOISE, strict=True)


@pytest.mark.parametrize(
    "damage",
    [
        _flip_byte,
        pytest.param(Path.unlink, marks=pytest.mark.slow),
        pytest.param(lambda file: file.write_bytes(b""), marks=pytest.mark.slow),
    ],
)
def test_damaged_arrays_are_not_returned(saved: Any, damage: Callable[[Path], object]) -> None:
    folder, manifest = saved
    damage(_largest_file(folder / "state"))
    assert list(_read(saved)) == list(_read(saved, np.array)) == ["pytree"]
    assert list(verify_large_arrays(folder, manifest["items"])) == ["pytree"]
    with pytest.raises(DataLossError, match="is damaged"):
        read_arrays(folder, manifest, ["state"])
    with pytest.raises(DataLossError, match="is damaged"):
        check_arrays(folder, manifest, ["state"])


def test_unreadable_index(saved: Any) -> None:
    folder, _ = saved
    (folder / "state" / "manifest.ocdbt").write_bytes(b"nothing")
    assert list(_read(saved)) == ["pytree"]
