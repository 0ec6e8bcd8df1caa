"""Search for the innermost object that cannot be pickled."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest

pytest.importorskip("cloudpickle", reason="needs stratagem[ray]")

from stratagem.remote.jobs.pickling import captured_values, dumps, find_unpicklable

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
