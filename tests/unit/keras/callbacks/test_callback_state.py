"""State of callbacks as JSON: names, selected attributes, and callbacks without a state."""

from __future__ import annotations

import json
from typing import Any

import keras
import numpy as np

from stratagem.keras.callbacks.backup_and_restore import callback_states, set_callback_states


class Counter(keras.callbacks.Callback):
    """A callback with a state of its own."""

    def __init__(self, count: int = 0) -> None:
        super().__init__()
        self.count = count

    def get_state(self) -> Any:
        return {"count": np.int64(self.count)}

    def set_state(self, state: Any) -> None:
        self.count = int(state["count"])


def stopping(wait: int) -> keras.callbacks.EarlyStopping:
    callback = keras.callbacks.EarlyStopping(patience=3)
    callback.on_train_begin()
    callback.wait, callback.best = wait, 0.5
    callback.best_weights = [np.arange(3, dtype=np.float32)]
    return callback


def test_states_come_back_by_class_and_number() -> None:
    callbacks = [Counter(3), stopping(1), Counter(5), stopping(2)]
    states = json.loads(json.dumps(callback_states(callbacks)))
    assert list(states) == ["Counter 1", "EarlyStopping 1", "Counter 2", "EarlyStopping 2"]
    others = [stopping(0), stopping(0), Counter(), Counter()]
    set_callback_states(others, states)
    assert [one.count for one in others[2:]] == [3, 5]
    assert [one.wait for one in others[:2]] == [1, 2]
    assert others[0].best == 0.5
    np.testing.assert_array_equal(others[0].best_weights[0], [0, 1, 2])


def test_arguments_of_keras_callbacks_are_no_state() -> None:
    (state,) = callback_states([stopping(1)]).values()
    assert set(state) == {"best", "best_epoch", "best_weights", "stopped_epoch", "wait"}
    history = keras.callbacks.History()
    history.on_train_begin()
    history.history = {"loss": [1.0, 0.5]}
    assert callback_states([history]) == {
        "History 1": {"epoch": [], "history": {"loss": [1.0, 0.5]}}
    }


def test_callbacks_without_a_state_or_an_entry_stay_unchanged() -> None:
    plain = keras.callbacks.LambdaCallback()
    assert callback_states([plain]) == {}
    counter = Counter(7)
    set_callback_states([plain, counter], {"Counter 2": {"count": 1}})
    assert counter.count == 7


def test_attribute_that_is_not_there_yet_is_left_out() -> None:
    callback = keras.callbacks.EarlyStopping()
    names = set(next(iter(callback_states([callback]).values())))
    assert names == {name for name in names if hasattr(callback, name)}
    assert "patience" not in names
