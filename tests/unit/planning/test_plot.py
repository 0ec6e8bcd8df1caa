"""Picture of a plan."""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem import environment as optional_libraries
from stratagem.planning.result import Plan, draw, figure_of

_GIB = 2**30


@pytest.fixture(scope="module")
def plan() -> Plan:
    def build():
        model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(256)])
        model.compile("adam", "mse")
        return model

    return sg.plan(build, (np.ones((8, 256)), np.ones((8, 256))), "2xH100")


def _with_temporaries(plan: Plan, num_bytes: int, **fields) -> Plan:
    memory = dataclasses.replace(plan.memory, temporary_bytes=num_bytes)
    return dataclasses.replace(plan, memory=memory, **fields)


def test_picture_shows_all_parts_and_steps(plan, tmp_path) -> None:
    figure = figure_of(_with_temporaries(plan, 30 * _GIB))
    memory, steps = figure.axes
    labels = memory.get_legend_handles_labels()[1]
    assert labels == ["activations and gradients 30.00 GiB"]  # what else there is is too small
    assert len(memory.patches) == sum(size > 0 for _, size in plan.memory.parts())
    assert [tick.get_text() for tick in steps.get_xticklabels()] == ["1", "2"]
    draw(plan, tmp_path / "new" / "plan.png")
    assert (tmp_path / "new" / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_picture_without_matplotlib(plan, monkeypatch, tmp_path) -> None:
    def missing(name: str):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(optional_libraries.importlib, "import_module", missing)
    with pytest.raises(ImportError, match="Plotting a plan needs matplotlib"):
        draw(plan, tmp_path / "plan.png")
