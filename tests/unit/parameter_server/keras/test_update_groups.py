"""Rows of several tables updated as one array: the same bits as apart, and few programs."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from stratagem.parameter_server.keras import update_rule as update_groups
from stratagem.parameter_server.keras.update_rule import KerasUpdate, is_elementwise
from stratagem.parameter_server.server.shards import ShardSpec
from stratagem.parameter_server.server.store import ServerVariables

OPTIMIZERS: dict[str, Any] = {
    "adadelta": keras.optimizers.Adadelta(0.5),
    "adagrad": keras.optimizers.Adagrad(0.1),
    "adam": keras.optimizers.Adam(0.01, amsgrad=True, clipvalue=0.5),
    "adamax": keras.optimizers.Adamax(0.01),
    "adamw": keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "ftrl": keras.optimizers.Ftrl(0.1),
    "lion": keras.optimizers.Lion(0.01),
    "nadam": keras.optimizers.Nadam(0.01),
    "rmsprop": keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "sgd": keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "average": keras.optimizers.SGD(0.1, use_ema=True),
    "accumulated": keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
}
TABLES = {"a/part_0": 5, "b": 5, "wide": 7, "c/part_1": 5, "undecayed/part_2": 5, "wide 2": 7}
NUM_ROWS = 300


class Server:
    """Tables of random rows, and a kernel, that one optimizer trains."""

    def __init__(self, optimizer: Any, tables: dict[str, int] = TABLES) -> None:
        rng = np.random.default_rng(0)
        self.tables = tables
        self.store = ServerVariables()
        for name, width in tables.items():
            self._create(ShardSpec(name, (NUM_ROWS, width), "float32", has_rows=True), rng)
        self._create(ShardSpec("kernel", (70, 5), "float32"), rng)
        self.rule = KerasUpdate(optimizer, ["undecayed"])
        self.names = [*tables, "kernel"]
        self.store.set_rule(self.rule, self.names)
        self.num_before = len(self.rule._programs)

    def _create(self, spec: ShardSpec, rng: np.random.Generator) -> None:
        value = rng.normal(size=spec.shape).astype("float32")
        self.store.create(spec, lambda: value)

    @property
    def programs(self) -> list[list[str]]:
        """Names of the arrays of each program for updates."""
        programs = [*self.rule._programs][self.num_before :]
        return [[name for name, _, _ in shapes] for shapes in programs]

    def push(self, counts: list[int], seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        rows = {
            name: (
                rng.choice(NUM_ROWS, count, replace=False),
                rng.normal(size=(count, width)).astype("float32"),
            )
            for count, (name, width) in zip(counts, self.tables.items(), strict=True)
        }
        self.store.update({"kernel": rng.normal(size=(70, 5)).astype("float32")}, rows)

    def state(self) -> dict[str, Any]:
        slots = [slot.name for slot in self.rule.slots("b", (2, 5), "float32")]
        names = [*self.names, *(f"{name}:{slot}" for name in self.names for slot in slots)]
        return dict(zip(names, self.store.pull(names), strict=True)) | self.store.scalars


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_joined_rows_have_the_bits_of_separate_ones(name, monkeypatch) -> None:
    joined, apart = Server(OPTIMIZERS[name]), Server(OPTIMIZERS[name])
    for seed, counts in enumerate([[3, 70, 64, 130, 2, 9], [0, 65, 60, 200, 1, 0]]):
        joined.push(counts, seed)
        with monkeypatch.context() as patch:
            patch.setattr(update_groups, "_MOST_BYTES", -1)
            apart.push(counts, seed)
    for key, value in apart.state().items():
        np.testing.assert_array_equal(joined.state()[key], value, err_msg=key)
    # One without weight decay, and those of another width, are apart.
    wanted = ["a/part_0", "kernel", "undecayed/part_2", "wide"]
    assert [sorted(names) for names in joined.programs] == [wanted]
    assert [sorted(names) for names in apart.programs] == [sorted(["kernel", *TABLES])]


def test_wavering_sizes_compile_few_programs() -> None:
    server = Server(keras.optimizers.SGD(0.1), {f"table {place}": 3 for place in range(12)})
    rng = np.random.default_rng(0)
    sizes: set[tuple[int, ...]] = set()
    for seed in range(40):
        counts = rng.integers(60, 69, 12).tolist()  # padded to 64 or 128
        sizes.add(tuple(count > 64 for count in counts))
        server.push(counts, seed)
    assert len(sizes) > 30  # of as many programs, apart
    assert len(server.programs) <= 6


def test_large_rows_stay_apart(monkeypatch) -> None:
    """A copy of them would take longer than another array in the program."""
    monkeypatch.setattr(update_groups, "_MOST_BYTES", 64 * 5 * 4)
    server = Server(keras.optimizers.SGD(0.1))
    server.push([64, 65, 3, 3, 3, 3])
    assert sorted(server.programs[0]) == sorted(
        ["kernel", "a/part_0", "b", "wide", "wide 2", "undecayed/part_2"]
    )


class OwnSGD(keras.optimizers.SGD):
    """May do anything."""


@pytest.mark.parametrize("optimizer", [keras.optimizers.Lamb(0.1), OwnSGD(0.1)])
def test_optimizers_that_may_look_at_an_array_get_each_table(optimizer) -> None:
    assert not is_elementwise(type(optimizer))
    server = Server(optimizer, {"one": 3, "two": 3})
    server.push([5, 9])
    assert sorted(server.programs[0]) == ["kernel", "one", "two"]
