"""The walks of `docs/design/architecture.md`, compared with the calls that really happen."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from tests.architecture.test_layers import DEPTH, innermost_room
from tests.parameter_server.clusters import coordinated

PAGE = Path(__file__).parents[2] / "docs/design/architecture.md"
STEP = re.compile(r"^\d+\. `([\w.]+)`: `([\w.]+)`", re.MULTILINE)


def walk(title: str) -> list[tuple[str, str]]:
    """Module and function of each line of a walk."""
    (text,) = [part for part in PAGE.read_text().split("\n### ") if part.startswith(title)]
    return [(f"stratagem.{module}", function) for module, function in STEP.findall(text)]


class Calls:
    """Records the calls of functions of this package."""

    def __init__(self) -> None:
        self.entered: list[tuple[str, str]] = []

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith("stratagem."):
            self.entered.append((name, frame.f_code.co_qualname))


def recorded(action: Callable[[], Any]) -> list[tuple[str, str]]:
    calls = Calls()
    sys.setprofile(calls)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls.entered


def run_step() -> list[tuple[str, str]]:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    rows = strategy.experimental_distribute_values_from_function(lambda _: jnp.ones(2))

    def step(row: Any) -> Any:
        return row * 2

    strategy.run(step, args=(rows,))
    return recorded(lambda: strategy.run(step, args=(rows,)))


def fit() -> list[tuple[str, str]]:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    return recorded(lambda: model.fit(x, y, batch_size=8, verbose=0))


def fit_on_servers() -> list[tuple[str, str]]:
    calls = Calls()
    threading.setprofile(calls)  # the worker and the server are threads that start in the block
    try:
        with coordinated(num_servers=1) as coordinator, coordinator.strategy.scope():
            model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            model.fit(np.ones((4, 3)), np.ones((4, 1)), batch_size=4, verbose=0)
    finally:
        threading.setprofile(None)
    return calls.entered


@pytest.mark.parametrize(
    ("title", "run"),
    [("Arguments of", run_step), ("A batch of", fit), ("A gradient to", fit_on_servers)],
)
def test_calls_follow_the_walk(title, run) -> None:
    steps, entered = walk(title), run()
    assert len(steps) > 3
    place = 0
    for step in steps:
        found = next((i for i in range(place, len(entered)) if entered[i] == step), None)
        assert found is not None, f"{step} is not entered after {steps[: steps.index(step)]}"
        place = found + 1


@pytest.mark.parametrize(("title", "max_rooms"), [("Arguments of", 5), ("A batch of", 6)])
def test_walk_begins_at_its_top_and_has_few_rooms(title, max_rooms) -> None:
    rooms = [innermost_room(module) or "" for module, _ in walk(title)]
    assert min(rooms, key=lambda room: DEPTH[room]) == rooms[0]
    assert 1 < len(set(rooms)) <= max_rooms


def test_gradient_stays_in_one_folder_and_the_transport() -> None:
    modules = [module for module, _ in walk("A gradient to")]
    assert len(modules) <= 8
    assert {module.split(".")[1] for module in modules} == {"parameter_server", "transport"}
    depths = [DEPTH[innermost_room(module) or ""] for module in modules]
    assert depths[:5] == sorted(depths[:5])  # the client's half, down to the wire
