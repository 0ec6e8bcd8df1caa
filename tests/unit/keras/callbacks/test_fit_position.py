"""Position of a `fit` as JSON, with data that is made up."""

from __future__ import annotations

import json
import random
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from stratagem.keras.callbacks.backup_and_restore import FitPosition
from stratagem.keras.numerics.random_state import Draws


class _Data:
    """Data whose position is the number of batches used."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def state(self, batch: int, now: Draws, *, is_within: bool) -> dict[str, Any]:
        return {"read": batch, "is_within": is_within, "numpy": now.as_json["numpy"]}

    def go_to(self, state: Mapping[str, Any], batch: int) -> None:
        self.calls.append((state["read"], batch))


class _Counter:
    """A callback with a state."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def get_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_state(self, state: Mapping[str, int]) -> None:
        self.count = state["count"]


def _position(*callbacks: object) -> tuple[FitPosition, _Data]:
    data: Any = _Data()
    return FitPosition(data, callbacks), data


def _model(*, is_stopped: bool = False) -> Any:
    return types.SimpleNamespace(stop_training=is_stopped, _initial_epoch=None)


def _saved(position: FitPosition, *, is_stopped: bool = False, is_within: bool = True) -> Any:
    state = position.state(_model(is_stopped=is_stopped), 4, 3, is_within=is_within)
    return json.loads(json.dumps(state))


def test_another_fit_begins_at_the_position_with_the_same_random_numbers() -> None:
    np.random.seed(6)
    random.seed(7)
    state = _saved(_position(_Counter(11), object(), _Counter(12))[0])
    expected = np.random.random(3).tolist(), random.random()
    np.random.seed(60)
    random.seed(70)
    callbacks = [_Counter(), object(), _Counter()]
    position, data = _position(*callbacks)
    model = _model()
    position.go_to(model, 9, state)
    assert model._initial_epoch == 4
    assert data.calls == [(3, 3)]
    assert [one.count for one in callbacks if isinstance(one, _Counter)] == [11, 12]
    assert (np.random.random(3).tolist(), random.random()) == expected


def test_a_training_that_a_callback_has_stopped_has_no_epochs_left() -> None:
    position, _ = _position()
    model = _model()
    position.go_to(model, 9, _saved(position, is_stopped=True))
    assert model._initial_epoch == 9


def test_the_position_of_the_data_is_of_the_same_moment_as_the_random_state() -> None:
    state = _saved(_position()[0], is_within=False)
    assert state["data"]["numpy"] == state["random"]["numpy"]
    assert not state["data"]["is_within"]


def test_the_random_state_and_callbacks_can_be_set_again_without_moving() -> None:
    """At the start of an epoch, after what Keras and callbacks have changed."""
    counter = _Counter(5)
    position, data = _position(counter)
    state = _saved(position)
    expected = np.random.random(3).tolist()
    counter.count = 6
    position.set_state(state)
    assert np.random.random(3).tolist() == expected
    assert counter.count == 5
    assert data.calls == []


def test_a_callback_that_the_other_run_did_not_have_stays_as_it_is() -> None:
    state = _saved(_position(_Counter(11))[0])
    first, second = _Counter(1), _Counter(2)
    _position(first, second)[0].set_state(state)
    assert (first.count, second.count) == (11, 2)


def test_a_state_without_a_generator_is_refused() -> None:
    position, _ = _position()
    state = _saved(position)
    del state["random"]["keras"]
    with pytest.raises(ValueError, match=r"RandomState.set_state received"):
        position.set_state(state)


@pytest.mark.parametrize("missing", ["epoch", "data", "batch", "random", "callbacks"])
def test_a_state_of_another_kind_is_refused(missing) -> None:
    position, _ = _position()
    state = _saved(position)
    del state[missing]
    with pytest.raises(KeyError, match=missing):
        position.go_to(_model(), 9, state)
