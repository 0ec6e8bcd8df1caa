"""Restores of a state that does not fit twice into memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.checkpoint.storage import files


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """No memory for the old values beside the new ones; the paths of each portion that was read."""
    read: list[set[str]] = []
    original = files.read_arrays

    def recorded(folder: Path, manifest: Any, names: Any, receive: Any) -> Any:
        arrays = original(folder, manifest, names, receive)
        read.append({f"{name}/{path}" for name in arrays for path in arrays[name]})
        return arrays

    monkeypatch.setattr("stratagem.checkpoint.restoration.fits_in_memory", lambda _: False)
    monkeypatch.setattr("stratagem.checkpoint.saving.read_arrays", recorded)
    monkeypatch.setattr(files, "_PORTION_BYTES", 100)
    return read


def build(strategy: sg.Strategy, seed: int) -> keras.Model:
    with strategy.scope():
        keras.utils.set_random_seed(seed)
        model = keras.Sequential(
            [
                keras.layers.Input((4,)),
                keras.layers.Dense(8),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1),
            ]
        )
        model.compile("adam", "mse")
    model.fit(np.ones((4, 4)), np.ones(4), verbose=0)
    return model


class Source:
    """Counts how often its state was set."""

    def __init__(self) -> None:
        self.states: list[Any] = []

    def get_state(self) -> Any:
        return {"row": 3}

    def set_state(self, state: Any) -> None:
        self.states.append(state)


@pytest.mark.slow
def test_all_is_restored_in_portions(tmp_path: Path, scarce: list[set[str]]) -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    saved, other, source = build(strategy, 1), build(strategy, 2), Source()
    tree = {"w": np.arange(60.0), "step": 5, "none": np.zeros((0, 2))}
    path = sg.train.Checkpoint(model=saved, tree=tree, source=source).save(tmp_path / "ckpt")
    zeros = {"w": np.zeros(60), "step": 0, "none": np.zeros((0, 2))}
    checkpoint = sg.train.Checkpoint(model=other, tree=zeros, source=source)
    checkpoint.restore(path, sg.train.CheckpointOptions(restore_components=True)).assert_consumed()
    for ours, theirs in zip(other.variables, saved.variables, strict=True):
        np.testing.assert_array_equal(np.asarray(ours.value), np.asarray(theirs.value))
    np.testing.assert_array_equal(checkpoint.tree["w"], tree["w"])
    assert (checkpoint.tree["step"], source.states) == (5, [{"row": 3}])
    assert len(scarce) > 5
    assert max(len(paths) for paths in scarce) < len(set().union(*scarce)) / 2


def test_damage_of_the_last_array_changes_nothing(tmp_path: Path, scarce: list[set[str]]) -> None:
    variables = {f"v{i}": sg.Variable(np.full(1000, 1.0)) for i in range(4)}
    path = Path(sg.train.Checkpoint(**variables).save(tmp_path / "ckpt"))
    for variable in variables.values():
        variable.assign(jnp.zeros(1000))
    for file in path.glob("v3_state/**/d/*"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 0xFF
        file.write_bytes(content)
    with pytest.raises(sg.errors.DataLossError, match="is damaged"):
        sg.train.Checkpoint(**variables).restore(path)
    assert not any(np.any(np.asarray(one.value)) for one in variables.values())
    assert not scarce


def test_all_is_read_once_where_memory_suffices(
    tmp_path: Path, scarce: list[set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stratagem.checkpoint.restoration.fits_in_memory", lambda _: True)
    tree = {"a": np.arange(500.0), "b": np.arange(700.0)}
    path = sg.train.Checkpoint(tree=tree).save(tmp_path / "ckpt")
    checkpoint = sg.train.Checkpoint(tree={"a": np.zeros(500), "b": np.zeros(700)})
    checkpoint.restore(path).assert_consumed()
    np.testing.assert_array_equal(checkpoint.tree["b"], tree["b"])
    assert scarce == [{"tree_state/a", "tree_state/b", "save_counter_state/value"}]


@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
def test_large_values_are_restored_in_their_dtype_and_change_in_the_next_step(
    devices: list[str], tmp_path: Path
) -> None:
    """The next step gives away their memory; a second restore finds the file as it was."""
    noise = np.random.default_rng(0).standard_normal((600, 1000))
    values = {name: noise.astype(name) for name in ("float32", "float64", "bfloat16")}
    strategy = sg.MirroredStrategy(devices)
    with strategy.scope():
        variable = sg.Variable(values["float32"])
    tree = {"double": values["float64"], "half": jnp.asarray(values["bfloat16"])}
    path = sg.train.Checkpoint(variable=variable, tree=tree).save(tmp_path / "ckpt")
    empty = {name: np.zeros_like(leaf) for name, leaf in tree.items()}
    restored = sg.train.Checkpoint(variable=variable, tree=empty)

    def step() -> None:
        variable.assign(variable.value + 1)

    for _ in range(2):
        variable.assign(np.zeros((600, 1000)))
        restored.restore(path).assert_consumed()
        np.testing.assert_array_equal(variable.value, values["float32"], strict=True)
        np.testing.assert_array_equal(restored.tree["double"], tree["double"], strict=True)
        np.testing.assert_array_equal(restored.tree["half"], values["bfloat16"], strict=True)
        strategy.run(step)
        np.testing.assert_array_equal(variable.value, values["float32"] + np.float32(1))
