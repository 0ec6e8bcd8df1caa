"""Shards to save: which variables have them, and whether processes write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import stratagem as sg
from stratagem.checkpoint import latest as group_calls
from stratagem.checkpoint import restoration as sharded_values
from stratagem.checkpoint.objects import part_of
from stratagem.checkpoint.restoration import (
    begin_sharded_write,
    bytes_to_write,
    own_shards,
    sharded_items_of,
    sharded_value_of,
)
from stratagem.checkpoint.storage.shards import ShardedArray
from tests.unit.checkpoint.test_group_calls import Group

LARGE = np.arange(2**19, dtype="float32").reshape(1024, 512)
ITEMS = {"state": "state_item"}


def variables(count: int = 4, **options: Any) -> dict[str, Any]:
    with sg.MirroredStrategy(jax.devices()[:count], **(options or {"shard_state": "all"})).scope():
        return {
            "large": sg.Variable(LARGE),
            "small": sg.Variable(LARGE[:64]),
            "sum": sg.Variable(LARGE, synchronization=sg.VariableSynchronization.ON_READ),
        }


def test_large_values_with_shards_are_saved_as_such() -> None:
    parts = {"state": part_of("state", variables())}
    described = ShardedArray((1024, 512), "float32", (256, 512))
    expected = {"large": described, "small": None, "sum": None}
    assert sharded_items_of(parts, ITEMS) == {"state_item": expected}
    assert bytes_to_write(parts["state"]) == LARGE.nbytes * 2 + LARGE[:64].nbytes


def test_copies_are_not_shards() -> None:
    with sg.MirroredStrategy(jax.devices()[:2]).scope():
        copied = sg.Variable(LARGE)
    with sg.CentralStorageStrategy(jax.devices()[:2]).scope():
        central = sg.Variable(LARGE)
    for variable in (copied, central, sg.Variable(LARGE), variables(1)["large"]):
        assert sharded_value_of(variable) is None


def test_each_shard_is_saved_once_in_its_place() -> None:
    stored = sharded_value_of(variables()["large"])
    assert stored is not None
    shards = dict(own_shards("a/large", stored))
    assert list(shards) == [f"a.large/c/{index}/0" for index in range(4)]
    np.testing.assert_array_equal(np.concatenate(list(shards.values())), LARGE)


def test_copies_of_a_shard_are_saved_by_one_device() -> None:
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    sharding = jax.sharding.NamedSharding(
        jax.sharding.Mesh(devices, ("replica", "model")), jax.sharding.PartitionSpec(None, "model")
    )
    shards = dict(own_shards("x", jax.device_put(LARGE, sharding)))
    assert list(shards) == ["x/c/0/0", "x/c/0/1"]
    np.testing.assert_array_equal(np.concatenate(list(shards.values()), axis=1), LARGE)


def _begin(folder: Path) -> Any:
    return begin_sharded_write(folder, {"state": part_of("state", variables())}, ITEMS)


def test_temporary_folder_replaces_one_that_a_killed_save_left(tmp_path: Path) -> None:
    other = tmp_path / "ckpt-11.orbax-checkpoint-tmp-1"
    other.mkdir()
    first, second = _begin(tmp_path / "ckpt-1"), _begin(tmp_path / "ckpt-1")
    assert sorted(tmp_path.iterdir()) == sorted([second.folder, other])
    assert (first.num_processes, second.num_processes) == (1, 1)
    assert begin_sharded_write(tmp_path / "ckpt-2", {}, {}) is None


class Agreeing(Group):
    """Two processes, of which the other sees a folder or does not."""

    num_processes = 2

    def __init__(self, process_id: int, folder: Path | None, *, other_sees: bool) -> None:
        super().__init__(process_id)
        self.folder, self.other_sees = folder, other_sees

    def exchange(self, name: str, value: Any, **limits: Any) -> list[Any]:
        is_flag = isinstance(value["result"], bool)
        answer = self.other_sees if is_flag else self.folder and str(self.folder)
        self.other = {"result": answer, "error": None}
        return super().exchange(name, value, **limits)


@pytest.mark.parametrize("other_sees", [True, False])
def test_processes_write_shards_to_a_folder_that_all_see(
    other_sees: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Agreeing(0, None, other_sees=other_sees)
    for module in (group_calls, sharded_values):
        monkeypatch.setattr(module, "current_group", lambda: group)
    begun = _begin(tmp_path / "ckpt-1")
    if other_sees:
        assert (begun.num_processes, list(tmp_path.iterdir())) == (2, [begun.folder])
    else:
        assert (begun, list(tmp_path.iterdir())) == (None, [])


@pytest.mark.parametrize("is_shared", [True, False])
def test_process_looks_for_the_folder_of_process_0(
    is_shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path if is_shared else tmp_path / "missing"
    group = Agreeing(1, folder, other_sees=True)
    for module in (group_calls, sharded_values):
        monkeypatch.setattr(module, "current_group", lambda: group)
    begun = _begin(tmp_path / "elsewhere" / "ckpt-1")
    assert (None if begun is None else begun.folder) == (folder if is_shared else None)


def test_values_are_gathered_where_no_folder_can_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert _begin(tmp_path / "file" / "ckpt-1") is None
