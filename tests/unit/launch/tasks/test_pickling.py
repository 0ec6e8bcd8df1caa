"""Search for the innermost object that cannot be pickled."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.launch.tasks.pickling import (
    captured_values,
    dumps,
    dumps_without_state,
    find_unpicklable,
    live_kind,
)

LOCK = threading.Lock()


class Holder:
    def __init__(self, **members: Any) -> None:
        vars(self).update(members)


def test_functions_are_pickled_with_what_they_capture() -> None:
    factor = 3
    again = pickle.loads(dumps(lambda x: x * factor))
    assert again(2) == 6


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (LOCK, "it"),
        ([1, {"a": (LOCK,)}], "it[1]['a'][0]"),
        (Holder(ok=1, inner=Holder(lock=LOCK)), "it.inner.lock"),
        ({"text": "abc", 7: LOCK}, "it[7]"),
    ],
    ids=["itself", "containers", "attributes", "keys"],
)
def test_innermost_object_is_found_with_its_place(value, place) -> None:
    found = find_unpicklable({"fine": 1, "it": value})
    assert found is not None
    assert found[0] == place
    assert found[1] is LOCK


def test_variable_of_a_function_is_named() -> None:
    lock = LOCK

    def step() -> Any:
        return lock

    assert set(captured_values(step)) == {"Variable 'lock'"}
    found = find_unpicklable({"the function": step})
    assert found is not None
    assert (found[0], found[1] is LOCK) == ("Variable 'lock' of the function", True)


def test_what_can_be_pickled_has_no_such_place() -> None:
    assert find_unpicklable({"a": [1, {"b": Holder(x=2)}], "f": lambda: 1}) is None
    assert captured_values(3) == {}  # pyright: ignore[reportArgumentType]


def test_depth_limits_the_search() -> None:
    assert find_unpicklable({"it": [[[LOCK]]]}, depth=1) == ("it[0]", [[LOCK]])


def _model() -> keras.Model:
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: sg.OneDeviceStrategy("cpu:0"), "strategy"),
        (_model, "state"),
        (lambda: _model().layers[0], "state"),
        (lambda: keras.Variable(1.0), "state"),
        (lambda: keras.optimizers.SGD(), "state"),
        (lambda: keras.metrics.Mean(), "state"),
        (lambda: keras.layers.Dense(1), None),  # not built: a recipe
        (lambda: np.ones(2), None),
        (lambda: sg.ReduceOp.SUM, None),
        (lambda: sg.MirroredStrategy, None),  # the class
    ],
    ids=[
        *("strategy", "model", "layer", "variable", "optimizer", "metric", "layer not built"),
        *("array", "enum", "class"),
    ],
)
def test_what_belongs_to_a_process_stays_there(make, kind) -> None:
    value = make()
    assert live_kind(value) == kind
    if kind is None:
        pickle.loads(dumps_without_state([value]))
        return
    with pytest.raises(TypeError, match=f"A {type(value).__name__} belongs to this process"):
        dumps_without_state({"part": [value]})
    found = find_unpicklable({"it": [1, value]}, pickled=dumps_without_state)
    assert found is not None
    assert (found[0], found[1] is value) == ("it[1]", True)
