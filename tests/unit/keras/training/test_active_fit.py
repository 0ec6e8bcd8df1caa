"""Order of callbacks, the batch logs that they read, and the iterator of the active `fit`."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest

import stratagem.keras  # noqa: F401 - patches Keras
from stratagem.keras.training.active_fit import (
    awaits_each_step,
    call_after_fit,
    epoch_iterator,
    uses_batch_logs,
)


class Quiet(keras.callbacks.Callback):
    """Has no hook for batches."""


class AtBatches(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None: ...


class WithoutLogs(AtBatches):
    needs_batch_logs = False


class Last(Quiet):
    runs_last = True


class First(Quiet):
    runs_first = True


class Awaiting(WithoutLogs):
    awaits_steps = True


@pytest.mark.parametrize(
    ("callback", "expected"),
    [
        (Quiet(), False),
        (AtBatches(), True),
        (WithoutLogs(), False),
        (keras.callbacks.LambdaCallback(), False),
        (keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None), True),
        (keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: None), False),
    ],
    ids=["none", "hook", "declared", "lambda without", "lambda at end", "lambda at begin"],
)
def test_batch_logs_are_read_by_hooks_at_the_end_of_batches(callback, expected) -> None:
    assert uses_batch_logs(callback) is expected


def test_callbacks_that_run_last_do_and_get_the_list() -> None:
    first, second, third, last = First(), Quiet(), Quiet(), Last()
    made = keras.callbacks.CallbackList([last, second, third, first])
    own = [one for one in made.callbacks if one in (first, second, third, last)]
    assert own == [first, second, third, last]
    assert made.callbacks[0] is first
    assert made.callbacks[-1] is last
    assert last.callback_list is made
    assert not hasattr(first, "callback_list")


@pytest.mark.parametrize(
    ("callback", "expected"),
    [(Quiet(), False), (WithoutLogs(), False), (Awaiting(), True), (AtBatches(), True)],
)
def test_steps_are_awaited_for_callbacks_that_need_it(callback, expected) -> None:
    class Recorder(Quiet):
        awaited: Any = None
        iterator: Any = None

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.awaited, self.iterator = awaits_each_step(), epoch_iterator()

    recorder = Recorder()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = np.ones((4, 2)), np.ones((4, 1))
    # Validation makes an iterator of its own, which is not the one of `fit`.
    model.fit(*data, 2, verbose=0, callbacks=[recorder, callback], validation_data=data)
    assert recorder.awaited is expected
    assert recorder.iterator.data_adapter.num_batches == 2
    assert awaits_each_step(), "outside fit"


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_function_is_called_after_fit_even_if_it_fails(fails) -> None:
    notes: list[str] = []

    class Registering(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            call_after_fit(lambda: notes.append("after"))

        def on_train_end(self, logs: Any = None) -> None:
            notes.append("end")
            if fails:
                raise ZeroDivisionError

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    expected = pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext()
    with expected:
        model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0, callbacks=[Registering()])
    assert notes == ["end", "after"]
    call_after_fit(lambda: notes.append("never"))  # no fit is active
    assert notes == ["end", "after"]
