"""Prefetching: order, buffer size, errors, and no leaked threads."""

from __future__ import annotations

import contextlib
import gc
import itertools
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable

import pytest

from stratagem.input import iterator as prefetch
from stratagem.input.iterator import Prefetcher

# How long a test waits for a thread before it fails.
_LIMIT_S = 120.0


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "stratagem-prefetch"]


def _counter(last: int) -> Callable[[], int]:
    numbers = iter(range(last))
    return lambda: next(numbers)


@pytest.mark.parametrize("handover_s", [0.0, 1e-9, 10.0])
@pytest.mark.parametrize("buffer_size", [0, 1, 3])
def test_items_come_in_order_and_end(buffer_size: int, handover_s: float) -> None:
    prefetcher = Prefetcher(_counter(20), buffer_size, handover_s=handover_s)
    assert [prefetcher.take() for _ in range(20)] == list(range(20))
    for _ in range(2):
        with pytest.raises(StopIteration):
            prefetcher.take()


def test_buffer_is_filled_and_not_beyond() -> None:
    loaded = itertools.count()
    has_loaded = threading.Semaphore(0)

    def load() -> int:
        number = next(loaded)
        has_loaded.release()
        return number

    prefetcher = Prefetcher(load, 2)
    assert prefetcher.take() == 0
    for _ in range(3):
        assert has_loaded.acquire(timeout=_LIMIT_S)
    assert not has_loaded.acquire(timeout=0.05), "more than two items wait"
    assert prefetcher.take() == 1
    assert has_loaded.acquire(timeout=_LIMIT_S)
    prefetcher.close()


class _Clock:
    """Stands while a test does not move it."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    made = _Clock()
    monkeypatch.setattr(prefetch, "time", made)
    return made


def test_fast_items_are_loaded_by_the_consumer_until_many_are_slow(clock: _Clock) -> None:
    seconds = iter([0.3, 0.0, 0.0, 0.1, 0.0, 0.0, 0.1, 0.1, 0.1, *[0.0] * 4])
    loaders: list[str] = []

    def load() -> int:
        clock.now_s += next(seconds)
        loaders.append(threading.current_thread().name)
        return len(loaders)

    prefetcher = Prefetcher(load, 1, handover_s=0.02)
    assert [prefetcher.take() for _ in range(13)] == list(range(1, 14))
    with pytest.raises(StopIteration):
        prefetcher.take()
    own = threading.current_thread().name
    assert loaders == [own] * 9 + ["stratagem-prefetch"] * 4


def test_consumer_that_takes_its_time_gets_a_thread(clock: _Clock) -> None:
    loaders: list[str] = []

    def load() -> None:
        loaders.append(threading.current_thread().name)

    prefetcher = Prefetcher(load, 1, handover_s=0.02)
    for pause_s in (0.1, 0.0, 0.0, 0.1, 0.1, 0.1):
        prefetcher.take()
        clock.now_s += pause_s
    prefetcher.take()
    assert loaders == [threading.current_thread().name] * 7
    prefetcher.take()
    prefetcher.close()
    assert set(loaders[7:]) == {"stratagem-prefetch"}


def test_nothing_is_loaded_before_it_is_asked_for() -> None:
    def load() -> int:
        raise AssertionError("was called")

    Prefetcher(load, 2).close()
    assert not _threads()


@pytest.mark.parametrize(("buffer_size", "handover_s"), [(0, 0.0), (1, 0.0), (1, 10.0)])
def test_error_is_raised_after_the_batches_before_it(buffer_size: int, handover_s: float) -> None:
    error = OSError("disk")
    numbers = iter(range(2))

    def load() -> int:
        for number in numbers:
            return number
        raise error

    prefetcher = Prefetcher(load, buffer_size, handover_s=handover_s)
    assert [prefetcher.take(), prefetcher.take()] == [0, 1]
    with pytest.raises(OSError, match="disk") as raised:
        prefetcher.take()
    assert raised.value is error
    with pytest.raises(StopIteration):
        prefetcher.take()
    for thread in _threads():
        thread.join(_LIMIT_S)
    assert not _threads()


def test_thread_ends_when_the_prefetcher_is_freed() -> None:
    prefetcher = Prefetcher(itertools.count().__next__, 1)
    prefetcher.take()
    (thread,) = _threads()
    gone = weakref.ref(prefetcher)
    del prefetcher
    assert gone() is None
    thread.join(_LIMIT_S)
    assert not thread.is_alive()


def test_error_keeps_nothing_of_whoever_sees_it_alive() -> None:
    prefetcher = Prefetcher(_counter(1), 1)
    mine = threading.Event()  # stands for anything in this frame
    gone = weakref.ref(mine)

    def read(_: object) -> None:
        prefetcher.take()
        with contextlib.suppress(StopIteration):
            prefetcher.take()

    gc.disable()
    try:
        read(mine)
        del mine
        assert gone() is None
    finally:
        gc.enable()


def test_thread_in_the_middle_of_a_slow_source_ends_after_it() -> None:
    may_go_on, is_loading = threading.Event(), threading.Event()
    numbers = itertools.count()

    def load() -> int:
        number = next(numbers)
        if number:
            is_loading.set()
            may_go_on.wait(_LIMIT_S)
        return number

    prefetcher = Prefetcher(load, 1)
    assert prefetcher.take() == 0
    assert is_loading.wait(_LIMIT_S)
    (thread,) = _threads()
    del prefetcher
    assert thread.is_alive()
    may_go_on.set()
    thread.join(_LIMIT_S)
    assert not thread.is_alive()
    assert next(numbers) == 2, "it loaded on"


def test_closed_prefetcher_gives_nothing_more_and_may_be_closed_again() -> None:
    prefetcher = Prefetcher(itertools.count().__next__, 2)
    prefetcher.take()
    prefetcher.close()
    prefetcher.close()
    assert not _threads()
    with pytest.raises(StopIteration):
        prefetcher.take()


def _close(prefetchers: list[Prefetcher]) -> None:
    prefetchers[0].close()


def _end_process(_: list[Prefetcher]) -> None:
    prefetch._end_all()


@pytest.mark.parametrize("end", [_close, list.clear, _end_process])
def test_load_that_waits_for_others_is_given_up(end: Callable[[list[Prefetcher]], None]) -> None:
    is_waiting, is_given_up = threading.Event(), threading.Event()
    numbers = itertools.count()

    def load() -> int:
        number = next(numbers)
        if number:
            is_waiting.set()
            assert is_given_up.wait(_LIMIT_S), "nobody gave it up"
            raise StopIteration
        return number

    prefetchers = [Prefetcher(load, 2, is_given_up.set)]
    assert prefetchers[0].take() == 0
    assert is_waiting.wait(_LIMIT_S)
    (thread,) = _threads()
    end(prefetchers)
    assert is_given_up.is_set()
    thread.join(_LIMIT_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("buffer_size", [0, 2])
@pytest.mark.parametrize("end", [_close, list.clear])
def test_give_up_is_called_even_if_nothing_was_loaded(
    end: Callable[[list[Prefetcher]], None], buffer_size: int
) -> None:
    is_given_up = threading.Event()
    prefetchers = [Prefetcher(itertools.count().__next__, buffer_size, is_given_up.set)]
    end(prefetchers)
    assert is_given_up.is_set()


@pytest.mark.slow
def test_process_ends_while_a_source_is_read() -> None:
    program = (
        "import itertools, stratagem as sg, numpy as np\n"
        "strategy = sg.MirroredStrategy(['cpu:0', 'cpu:1'])\n"
        "data = strategy.distribute_dataset(np.full(8, i) for i in itertools.count())\n"
        "iterator = iter(data)\n"
        "print(next(iterator))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "PerReplica[[0 0 0 0] | [0 0 0 0]]"
    assert not run.stderr


@pytest.mark.parametrize("handover_s", [0.0, 1e-9, 10.0])
def test_early_item_is_loaded_before_the_one_before_it_is_returned(handover_s: float) -> None:
    loaded: list[int] = []
    count = _counter(20)

    def load() -> int:
        loaded.append(count())
        return loaded[-1]

    prefetcher = Prefetcher(load, 1, handover_s=handover_s, loads_early=True)
    for number in range(20):
        assert prefetcher.take() == number
        if handover_s == 10.0:  # without a thread
            assert loaded == [*range(min(number + 2, 20))]
    with pytest.raises(StopIteration):
        prefetcher.take()


def test_error_of_an_early_item_is_raised_after_the_item_before_it() -> None:
    items = iter([1, 2])

    def load() -> int:
        item = next(items, None)
        if item is None:
            raise OSError("disk")
        return item

    prefetcher = Prefetcher(load, 1, handover_s=10.0, loads_early=True)
    assert [prefetcher.take(), prefetcher.take()] == [1, 2]
    with pytest.raises(OSError, match="disk"):
        prefetcher.take()
    with pytest.raises(StopIteration):
        prefetcher.take()


def test_early_item_of_a_closed_prefetcher_is_dropped() -> None:
    prefetcher = Prefetcher(_counter(20), 1, handover_s=10.0, loads_early=True)
    assert prefetcher.take() == 0
    prefetcher.close()
    with pytest.raises(StopIteration):
        prefetcher.take()
