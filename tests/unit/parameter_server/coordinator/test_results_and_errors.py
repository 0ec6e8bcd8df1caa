"""What comes back from workers: results, and errors."""

from __future__ import annotations

import collections
import threading
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from stratagem import config
from stratagem.errors import CancelledError
from stratagem.parameter_server.coordinator.remote_value import RemoteValueStatus
from stratagem.parameter_server.coordinator.shipping import (
    PerWorkerValues,
    WorkerReport,
    merge_reports,
)
from stratagem.parameter_server.coordinator.worker import get_current_worker_index
from stratagem.variables.distributed import PerReplica
from tests.unit.parameter_server.clusters import coordinated
from tests.unit.parameter_server.shared_with_workers import (
    LIMIT_S,
    fail,
    fail_together,
    go_on,
    note,
    seen,
    started,
    ten_more,
    wait_to_go_on,
)

pytestmark = pytest.mark.usefixtures("nothing_shared")


# Results


Pair = collections.namedtuple("Pair", ["first", "second"])


@pytest.mark.parametrize(
    "make",
    [
        lambda: None,
        lambda: "text",
        lambda: (1, [2.5, {"a": b"c"}], True),
        lambda: Pair(1, "two"),
        lambda: {"b": 1, "a": {2, 3}},
        lambda: {1: "one", "two": 2},
    ],
    ids=["none", "text", "nested", "named", "dict", "keys of two types"],
)
def test_plain_results_come_back_as_they_are(coordinator, make) -> None:
    value = coordinator.schedule(make)
    expected = make()
    assert value.fetch() == expected
    assert type(value.fetch()) is type(expected)
    assert value.get() == expected
    assert repr(value) == "RemoteValue(READY)"


def test_arrays_come_back_as_numpy_or_jax_arrays(coordinator) -> None:
    def make() -> Any:
        half = jnp.ones(2, jnp.bfloat16)
        return {
            "a": jnp.arange(3),
            "b": [np.float64(1.5), np.arange(2.0)],
            "half": half,
            "none": None,
        }

    value = coordinator.schedule(make)
    fetched = value.fetch()
    assert isinstance(fetched["a"], np.ndarray)
    assert fetched["a"].tolist() == [0, 1, 2]
    assert fetched["b"][0] == 1.5
    assert fetched["half"].dtype == jnp.bfloat16
    assert fetched["none"] is None
    got = value.get()
    assert isinstance(got["a"], jax.Array)
    assert isinstance(got["b"][1], jax.Array)
    assert got["half"].dtype == jnp.bfloat16


def test_variables_come_back_as_their_values(coordinator) -> None:
    with coordinator.strategy.scope():
        v = sg.Variable(np.arange(3.0, dtype="float32"))
        count = sg.Variable(4, trainable=False)
    fetched = coordinator.schedule(lambda: (v, [count])).fetch()
    assert fetched[0].tolist() == [0, 1, 2]
    assert fetched[1] == [4]


def test_replicas_come_back_apart() -> None:
    with coordinated(devices_per_worker=2) as coordinator:

        def step() -> Any:
            return sg.get_replica_context().replica_id_in_sync_group * 10

        value = coordinator.schedule(lambda: sg.get_strategy().run(step))
        fetched = value.fetch()
        assert isinstance(fetched, PerReplica)
        assert [int(sg.select_replica(i, fetched)) for i in (0, 1)] == [0, 10]
        reduced = coordinator.schedule(
            lambda: sg.get_strategy().reduce("sum", sg.get_strategy().run(step), axis=None)
        )
        assert reduced.fetch() == 10


def test_fetch_takes_structures(coordinator) -> None:
    values = [coordinator.schedule(ten_more, args=(i,)) for i in range(3)]
    each = PerWorkerValues(
        [coordinator.schedule(get_current_worker_index, worker=i) for i in range(3)]
    )
    structure = {"a": values[0], "b": (values[1], [values[2]], 7, None), "each": each}
    assert coordinator.fetch(structure) == {"a": 10, "b": (11, [12], 7, None), "each": [0, 1, 2]}
    assert coordinator.fetch(values[0]) == 10
    assert coordinator.fetch(3) == 3


# Waiting, and errors


def test_join_waits_and_done_does_not(coordinator) -> None:
    assert coordinator.done()
    coordinator.join()
    values = [coordinator.schedule(wait_to_go_on, args=(i,)) for i in range(5)]
    assert started.acquire(timeout=LIMIT_S)
    assert not coordinator.done()
    assert values[-1].status is RemoteValueStatus.NOT_READY
    go_on.set()
    coordinator.join()
    assert coordinator.done()
    assert [value.status for value in values] == [RemoteValueStatus.READY] * 5
    assert coordinator.fetch(values) == list(range(5))


@pytest.mark.parametrize("call", ["schedule", "join", "done"])
def test_error_is_raised_once_and_then_all_begins_anew(coordinator, call) -> None:
    value = coordinator.schedule(fail)
    with pytest.raises(ArithmeticError, match="on purpose"):
        value.fetch()
    calls = {
        "schedule": lambda: coordinator.schedule(ten_more, args=(1,)),
        "join": coordinator.join,
        "done": coordinator.done,
    }
    with pytest.raises(ArithmeticError, match="on purpose"):
        calls[call]()
    assert coordinator.done()
    assert coordinator.schedule(ten_more, args=(1,)).fetch() == 11
    coordinator.join()
    assert value.status is RemoteValueStatus.ABORTED
    with pytest.raises(ArithmeticError, match="on purpose"):
        value.fetch()


def test_what_runs_ends_and_what_has_not_started_is_cancelled(coordinator) -> None:
    running = [coordinator.schedule(wait_to_go_on, args=(i,), worker=i) for i in (0, 1)]
    for _ in running:
        assert started.acquire(timeout=LIMIT_S)
    waiting = [coordinator.schedule(note, args=(value,)) for value in running]
    failing = coordinator.schedule(fail, worker=2)
    with pytest.raises(ArithmeticError):
        failing.fetch()
    for value in waiting:
        with pytest.raises(CancelledError, match="was cancelled before it finished"):
            value.fetch()
    go_on.set()
    with pytest.raises(ArithmeticError, match="on purpose"):
        coordinator.join()
    assert coordinator.fetch(running) == [0, 1]
    assert seen == []
    again = [coordinator.schedule(note, args=(value,)) for value in running]
    coordinator.join()
    assert coordinator.fetch(again) == [0, 1]
    assert sorted(seen) == [0, 1]


class OwnError(Exception):
    """Takes arguments of its own, and has more."""

    def __init__(self, code: int, *, text: str = "no text") -> None:
        super().__init__(code)
        self.code = code
        self.text = text


def test_error_of_a_class_that_is_here_too(coordinator) -> None:
    def function() -> None:
        error = OwnError(7)
        error.text = "told"
        raise error

    coordinator.schedule(function)
    with pytest.raises(OwnError) as raised:
        coordinator.join()
    assert (raised.value.code, raised.value.text) == (7, "told")


class TwoArgumentsError(Exception):
    """Pickle cannot make it again: it would give it one argument."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


def raise_two() -> None:
    raise TwoArgumentsError("one", "two")


def raise_lock() -> None:
    error = LookupError("has a lock")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    raise error


@pytest.mark.parametrize(
    ("function", "words"),
    [(raise_two, "TwoArgumentsError: one and two"), (raise_lock, "LookupError: has a lock")],
)
def test_error_or_result_that_cannot_be_sent_is_reported_in_words(
    coordinator, function, words
) -> None:
    coordinator.schedule(function)
    with pytest.raises(RuntimeError, match=words) as raised:
        coordinator.join()
    assert function.__name__ in "".join(raised.value.__notes__)
    value = coordinator.schedule(threading.Lock)
    for wait in (coordinator.join, value.fetch):
        with pytest.raises(TypeError, match="cannot be sent"):
            wait()


def test_notes_of_an_error_have_the_traceback_of_the_worker(coordinator) -> None:
    def inner() -> None:
        try:
            fail("the cause")
        except ArithmeticError as error:
            raise KeyError("the effect") from error

    coordinator.schedule(inner, worker=2)
    with pytest.raises(KeyError, match="the effect") as raised:
        coordinator.join()
    notes = "".join(raised.value.__notes__)
    assert "Raised on worker 2:" in notes
    assert "in inner" in notes
    assert "ArithmeticError: the cause" in notes


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=["exit", "interrupt"])
def test_worker_survives_what_would_end_a_process(coordinator, error) -> None:
    def function() -> None:
        raise error

    coordinator.schedule(function, worker=0)
    with pytest.raises(RuntimeError, match=type(error).__name__):
        coordinator.join()
    assert coordinator.schedule(ten_more, args=(1,), worker=0).fetch() == 11


def test_the_same_error_on_several_workers_is_one_error_that_names_them(coordinator) -> None:
    values = [
        coordinator.schedule(fail_together, args=("no such key",), worker=worker)
        for worker in range(3)
    ]
    with pytest.raises(LookupError) as raised:
        coordinator.join()
    (note,) = (note for note in raised.value.__notes__ if note.startswith("Raised on"))
    assert note.startswith("Raised on workers 0, 1 and 2:\nTraceback (most recent call last):")
    assert note.count("no such key") == 1
    assert note.count("Traceback") == 1
    assert coordinator.done()
    for value in values:
        with pytest.raises(LookupError, match="no such key"):
            value.fetch()


def test_reports_of_one_error_are_merged_and_addresses_do_not_count() -> None:
    first, same, other = (KeyError("a") for _ in range(3))
    WorkerReport(first, 2, "<f at 0x7f01>")
    WorkerReport(same, 0, "<f at 0x7f02>")
    WorkerReport(other, 1, "<g at 0x7f01>")
    for later in (same, other, ValueError("of no worker")):
        merge_reports(first, later)
    assert first.__notes__ == ["Raised on workers 0 and 2:\n<f at 0x7f01>"]


def test_frames_between_the_caller_and_the_error_are_left_out(coordinator, monkeypatch) -> None:
    def files_of_join() -> list[str]:
        coordinator.schedule(fail)
        with pytest.raises(ArithmeticError, match="on purpose") as raised:
            coordinator.join()
        return [entry.filename for entry in traceback.extract_tb(raised.value.__traceback__)]

    monkeypatch.setattr(config, "filters_tracebacks", lambda: True)
    assert set(files_of_join()) == {__file__}
    monkeypatch.setattr(config, "filters_tracebacks", lambda: False)
    assert any("coordinated_workers" in name for name in files_of_join())
