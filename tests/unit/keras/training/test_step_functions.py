"""Step functions of `fit`: the logs of each step, and groups of steps from a source."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.input import placement
from stratagem.input.placement import MANY_GROUPS
from stratagem.keras.training import step_functions
from tests.marks import slow
from tests.parity.comparison import (
    Scope,
    assert_like_plain_keras,
    differences,
    evaluated,
    fitted,
    plain_keras,
    regression,
)
from tests.unit.keras.replicas import dense_model, two, values_of

_X, _Y = regression(23)


def _one() -> Any:
    return sg.OneDeviceStrategy("cpu:1").scope()


class _Custom(keras.Sequential):
    """A model whose step returns logs of its own."""

    def train_step(self, *args: Any) -> Any:
        logs, state = super().train_step(*args)
        return {**logs, "own": logs["loss"] + 1}, state


class _Nested(keras.Sequential):
    """A model with a dict among its logs."""

    def get_metrics_result(self) -> Any:
        return {"all": super().get_metrics_result()}


def _model(scope: Scope, kind: Any = keras.Sequential, steps: int = 1) -> Any:
    options: Any = {"metrics": ["mae"], "steps_per_execution": steps}
    return dense_model(scope, kind=kind, optimizer=keras.optimizers.SGD(0.05), **options)


def _fit(model: Any, *callbacks: Any, **arguments: Any) -> None:
    arguments = {"verbose": 0, "epochs": 2, **arguments}
    model.fit(_X, _Y, batch_size=4, shuffle=False, callbacks=[*callbacks], **arguments)


class _Reads(keras.callbacks.Callback):
    """Reads the logs of each batch at once."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(logs)


def _seen(*args: Any) -> list[dict[str, float]]:
    reads = _Reads()
    _fit(_model(*args), reads, validation_data=(_X[:8], _Y[:8]))
    return reads.seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scope", "kind", "steps"),
    [
        (two, keras.Sequential, 1),
        (two, keras.Sequential, 3),
        (two, _Custom, 1),
        (two, _Custom, 3),
        (_one, _Custom, 1),
        (_one, _Nested, 3),
    ],
)
def test_logs_are_dicts_of_the_numbers_of_one_device(scope: Scope, kind: Any, steps: int) -> None:
    seen, expected = _seen(scope, kind, steps), _seen(contextlib.nullcontext, kind, steps)
    assert len({logs.get("loss", 0.0) for logs in seen}) > 1
    assert [list(logs) for logs in seen] == [list(logs) for logs in expected]
    for logs, wanted in zip(seen, expected, strict=True):
        assert type(logs) is dict
        assert logs == pytest.approx(wanted, rel=1e-5)
        assert {type(value) for value in logs.values()} == {float}


class _Disturbs(keras.callbacks.Callback):
    """Replaces the state of the metrics before others see the logs of a batch."""

    def __init__(self, disturb: Callable[[Any], object]) -> None:
        super().__init__()
        self._disturb = disturb

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 2:
            self._disturb(self.model)


@pytest.mark.parametrize(
    "disturb",
    [
        slow(lambda model: model.reset_metrics()),
        lambda model: model.evaluate(_X[:4], _Y[:4], verbose=0),
        slow(lambda model: model.train_on_batch(_X[:4], _Y[:4])),
        slow(lambda model: model.train_function((), iter([(_X[:4], _Y[:4])]))),
    ],
    ids=["reset", "evaluate", "train_on_batch", "step"],
)
def test_callback_before_changes_nothing_in_the_logs_of_the_step(disturb) -> None:
    def logs_of_third(disturb: Callable[[Any], object]) -> Any:
        model, reads = _model(two), _Reads()
        adds = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: logs.update(batch=batch)
        )
        _fit(model, _Disturbs(disturb), adds, reads, epochs=1)
        assert [logs["batch"] for logs in reads.seen] == [0, 1, 2, 3, 4, 5]  # reach the next
        return reads.seen[2]

    assert logs_of_third(disturb) == logs_of_third(lambda model: None)


@pytest.mark.parametrize(("interval_s", "expected"), [(-1.0, 2 * 6 + 2), (1e9, 2 + 2)])
def test_progress_bar_has_results_computed_as_often_as_it_is_drawn(
    monkeypatch: pytest.MonkeyPatch, interval_s: float, expected: int
) -> None:
    """And at the end of each epoch, after which none of its results are shown."""
    seen: list[float] = []
    so_far = step_functions.MetricLogs.so_far

    def counted(self: step_functions.MetricLogs) -> dict[str, Any]:
        results = so_far(self)
        seen.append(float(results["loss"]))
        return results

    monkeypatch.setattr(step_functions, "_BAR_INTERVAL_S", interval_s)
    monkeypatch.setattr(step_functions.MetricLogs, "so_far", counted)
    _fit(_model(two), verbose=1)
    assert len(seen) == expected
    assert len({*seen}) == expected - 2 * (interval_s < 0)  # an epoch ends with its last step


def test_callback_in_another_thread_sees_the_logs_of_its_step() -> None:
    class Late(_Reads):
        async_safe = True  # Keras calls it in a thread, while the next steps run

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            time.sleep(0.02)
            self.seen.append({"batch": batch, **logs})

    def seen(callback: Any) -> list[Any]:
        _fit(_model(two), callback, epochs=1)
        return sorted(logs["loss"] for logs in callback.seen)

    assert seen(Late()) == seen(_Reads())


def test_step_function_called_by_hand_returns_logs_that_last() -> None:
    def logs_of_batches(read: Callable[[Any], Any]) -> list[Any]:
        model = _model(two)
        _fit(model, epochs=1)
        model.reset_metrics()
        batches = [(_X[first : first + 4], _Y[first : first + 4]) for first in (0, 4, 8)]
        logs = [read(model.train_function((), iter([batch]))[0]) for batch in batches]
        return [{name: float(value) for name, value in one.items()} for one in logs]

    kept = logs_of_batches(lambda logs: logs)
    assert kept == logs_of_batches(dict)
    assert len({one["loss"] for one in kept}) == 3


# Groups of steps, the batch that is loaded ahead, and sources that end early or fail.

Batch = tuple[np.ndarray, np.ndarray]


def _batches(sizes: Sequence[int]) -> Iterator[Batch]:
    x, y = regression(sum(sizes))
    stops = np.cumsum(sizes)
    for start, stop in zip(stops - np.asarray(sizes), stops, strict=True):
        yield x[start:stop], y[start:stop]


_fitted = functools.partial(fitted, epochs=1)


class _Sizes(keras.utils.PyDataset):
    """Batches of these sizes, with 1 to 3 of one shape after another."""

    sizes = (4, 4, 4, 2, 4, 4, 2, 2, 1)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Batch:
        return list(_batches(self.sizes))[index]


@pytest.fixture(scope="module")
def one_step_at_a_time() -> dict[str, np.ndarray]:
    """What plain Keras measures of batches of many sizes, one step a call."""
    return plain_keras(lambda scope: _fitted(_model(scope), _Sizes(), epochs=2))


_OUR_DATA = {
    "dataset": lambda folder: (sg.input.Dataset(list(_batches(_Sizes.sizes))), []),
    "tracked": lambda folder: (_Sizes(), [sg.BackupAndRestore(folder)]),
    "tracked dataset": lambda folder: (
        sg.input.Dataset(list(_batches(_Sizes.sizes))),
        [sg.BackupAndRestore(folder)],
    ),
}


@pytest.mark.compatibility
@pytest.mark.parametrize("kind", _OUR_DATA)
@pytest.mark.parametrize("scope", [contextlib.nullcontext, two])
def test_groups_of_steps_read_through_our_adapters(
    scope, kind, tmp_path, one_step_at_a_time
) -> None:
    """Keras 3.16 asks an adapter for the batches of a group at once where there is no strategy."""

    def job(_: Scope) -> dict[str, Any]:
        data, callbacks = _OUR_DATA[kind](tmp_path)
        return _fitted(_model(scope, steps=2), data, epochs=2, callbacks=callbacks)

    assert differences(plain_keras(job), one_step_at_a_time) == []


def _endless() -> Iterator[Batch]:
    """Batches that all differ."""
    for number in itertools.count(1):
        x = np.random.RandomState(number).standard_normal((4, 3)).astype("float32")
        yield x, x.sum(axis=1, keepdims=True) + number


@pytest.mark.parametrize("shares", [False, True])
def test_no_batch_is_lost_or_repeated_between_epochs_and_calls(shares: bool) -> None:
    def job(scope: Scope) -> dict[str, Any]:
        if not shares:
            return _fitted(_model(scope, steps=2), _endless(), steps_per_epoch=4, epochs=3)
        model, source = _model(scope), _endless()
        first = _fitted(model, source, steps_per_epoch=2)
        evaluation = evaluated(model, source, steps=2)
        second = _fitted(model, source, steps_per_epoch=2)
        first = {f"first {key}": value for key, value in first.items()}
        return first | evaluation | {f"second {key}": value for key, value in second.items()}

    assert_like_plain_keras(job, replicas=(2,))


def test_training_that_is_stopped_leaves_the_next_one_a_fresh_start() -> None:
    class StopAt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = batch == 1

    def job(scope: Scope) -> dict[str, Any]:
        model, (x, y) = _model(scope), regression(20)
        stopped = _fitted(model, x, y=y, batch_size=4, callbacks=[StopAt()], epochs=2)
        whole = _fitted(model, x, y=y, batch_size=4)
        return {f"stopped {key}": value for key, value in stopped.items()} | whole

    expected = plain_keras(job)
    assert len(expected["stopped fit loss"]) == 1
    assert differences(plain_keras(lambda _: job(two)), expected) == []


def test_source_with_too_little_data_ends_the_training_with_a_warning() -> None:
    def job(scope: Scope) -> dict[str, Any]:
        model = _model(scope)
        with pytest.warns(UserWarning, match="ran out of data"):
            return _fitted(model, _batches([4, 4, 2, 3]), steps_per_epoch=3, epochs=2)

    assert_like_plain_keras(job, replicas=(2,))


class _SourceError(Exception):
    """What a source of the user's raises."""


def _failing(num_batches: int) -> Iterator[Batch]:
    yield from _batches([4] * num_batches)
    raise _SourceError("the disk is gone")


@pytest.mark.parametrize(
    ("scope", "steps", "puts_first"), [(two, 1, False), (two, 3, False), slow(_one, 1, True)]
)
def test_error_of_the_source_comes_out_after_the_batches_before_it(
    scope, steps, puts_first, monkeypatch
) -> None:
    monkeypatch.setattr(step_functions.TrainOrTestFunction, "_puts_first", lambda _: puts_first)
    models, ends = [], []
    for scope_of_model in (scope, contextlib.nullcontext):
        done: list[int] = []
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, done=done: done.append(batch)
        )
        model = _model(scope_of_model, steps=steps if scope_of_model is scope else 1)
        with pytest.raises(_SourceError, match="the disk is gone"):
            model.fit(_failing(3), shuffle=False, verbose=0, callbacks=[note])
        models.append(model)
        ends.append(done)
    assert ends[1] == [0, 1, 2]
    assert steps == 3 or ends[0] == ends[1]
    for _ in range(2):
        for value, wanted in zip(*(values_of(one.weights) for one in models), strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-5)
        for one in models:  # they train on
            one.fit(*regression(), batch_size=4, shuffle=False, verbose=0)


@pytest.mark.parametrize("puts_first", [False, True])
def test_next_group_is_on_the_devices_before_this_one_runs_if_transfers_wait(
    puts_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    place, run = step_functions.place, step_functions.TrainOrTestFunction._run
    monkeypatch.setattr(step_functions.TrainOrTestFunction, "_puts_first", lambda _: puts_first)
    monkeypatch.setattr(
        step_functions,
        "place",
        lambda *args, **options: events.append("put") or place(*args, **options),
    )
    monkeypatch.setattr(
        step_functions.TrainOrTestFunction, "_run", lambda *args: events.append("run") or run(*args)
    )
    x, y = regression(12)
    _model(two, steps=2).fit(x, y, batch_size=2, epochs=2, verbose=0)
    order = "put put run put run run" if puts_first else "put run put run put run"
    assert events == order.split() * 2


@pytest.mark.parametrize("scope", [_one, two])
def test_small_batches_that_a_program_transfers_train_like_plain_keras(scope, monkeypatch) -> None:
    x, y = regression(4 * (MANY_GROUPS + 8) + 2)  # the last batch is shorter
    shapes: list[Any] = []
    put = placement._put_small
    monkeypatch.setattr(
        placement,
        "_put_small",
        lambda arrays, *args, **options: (
            shapes.append(arrays[0].shape) or put(arrays, *args, **options)
        ),
    )
    models = [_model(contextlib.nullcontext), _model(scope)]
    for one in models:
        one.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert len(shapes) == 9
    for wanted, got in zip(*(values_of(one.variables) for one in models), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_groups_that_are_transferred_early_train_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _fitted(_model(two, steps=3), _Sizes(), epochs=2)
    monkeypatch.setattr(step_functions.TrainOrTestFunction, "_puts_first", lambda _: True)
    actual = _fitted(_model(two, steps=3), _Sizes(), epochs=2)
    for key, value in expected.items():
        np.testing.assert_array_equal(actual[key], value)
    # A generator that two epochs share: none of its batches is lost or read too early.
    source = _batches((4,) * 8)
    _fitted(_model(two, steps=3), source, epochs=2, steps_per_epoch=3)
    assert len([*source]) == 2


@pytest.mark.parametrize("puts_first", [False, True])
def test_groups_read_before_steps_became_eager_run_whole(puts_first: bool, monkeypatch) -> None:
    monkeypatch.setattr(step_functions.TrainOrTestFunction, "_puts_first", lambda _: puts_first)
    counts: list[int] = []
    for scope in (two, contextlib.nullcontext):
        model = _model(scope, steps=2)
        turn_on = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, model=model: setattr(model, "run_eagerly", True)
        )
        model.fit(*regression(32), batch_size=4, verbose=0, callbacks=[turn_on])
        counts.append(int(model.optimizer.iterations))
    assert counts == [8, 8]
