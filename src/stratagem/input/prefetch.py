"""`Prefetcher`: loads items ahead in a background thread, where that is faster."""

from __future__ import annotations

import atexit
import collections
import functools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

# A thread needs about this long to hand over an item, and slows down the consumer meanwhile. If an
# item is loaded and used up in less, the consumer had better load it itself.
HANDOVER_S = 2.5e-4
# The excess over it, summed up, with which a thread starts; in handovers. That of one item is
# limited, because it may be a pause of the machine.
_MOST_EXCESS, _MOST_EXCESS_OF_ITEM = 6, 2

# Wait at process exit for a source that is reading a batch.
_EXIT_WAIT_S = 5.0


class Prefetcher:
    """Calls `load` ahead of its consumer in a background thread; `buffer_size` 0 uses no thread.

    The thread starts once loading and using items has taken longer than `handover_s` each, in three
    items or more (0: at the first `take`); until then, `take` calls `load`. The thread ends with
    the first error of `load`, including StopIteration, on `close`, or on garbage collection.
    `give_up` is called from any thread when no more items are needed, to cancel a waiting `load`;
    it must not refer to the prefetcher. With `loads_early`, an item is loaded before the one before
    is returned, with or without a thread.
    """

    def __init__(
        self,
        load: Callable[[], Any],
        buffer_size: int,
        give_up: Callable[[], None] | None = None,
        *,
        handover_s: float = 0.0,
        loads_early: bool = False,
    ) -> None:
        self._load = load
        self._loads_early = loads_early and buffer_size > 0
        self._early: collections.deque[Any] = collections.deque()
        self._error: Exception | None = None  # of loading early, raised after the items before
        self._handover_s = handover_s
        self._excess_s = 0.0
        self._taken_s: float | None = None  # when `take` returned last
        self._buffer = _Buffer(buffer_size + self._loads_early) if buffer_size else None
        # The thread refers to the buffer, not to the prefetcher, so that the latter can be freed.
        self._end = functools.partial(_end, self._buffer, give_up)
        weakref.finalize(self, self._end).atexit = False
        self._thread: threading.Thread | None = None
        self._has_ended = False

    def take(self) -> Any:
        """Waits for the next item and returns it.

        Raises StopIteration at the end. Any other error of `load` is raised once; then the data
        ends.
        """
        if self._has_ended:
            raise StopIteration
        try:
            if self._buffer is None:
                return self._load()
            if self._error is not None and not self._early:
                raise self._error
            if self._error is not None or self._excess_s < _MOST_EXCESS * self._handover_s:
                return self._load_in_line()
            if self._thread is None:
                self._thread = self._start(self._buffer)
            return self._early.popleft() if self._early else self._buffer.take()
        except Exception:
            # Do not store the error: it refers to the frames of its handlers.
            self._has_ended, self._error = True, None
            raise

    def _load_in_line(self) -> Any:
        before_s = time.perf_counter() if self._taken_s is None else self._taken_s
        item = self._early.popleft() if self._early else self._load()
        if self._loads_early and self._error is None:
            try:
                self._early.append(self._load())
            except Exception as error:  # noqa: BLE001 - raised after this item
                self._error = error
        self._taken_s = time.perf_counter()
        excess_s = self._taken_s - before_s - self._handover_s
        excess_s = min(excess_s, _MOST_EXCESS_OF_ITEM * self._handover_s)
        self._excess_s = max(0.0, self._excess_s + excess_s)
        return item

    def _start(self, buffer: _Buffer) -> threading.Thread:
        thread = threading.Thread(
            target=_fill, args=(buffer, self._load), name="stratagem-prefetch", daemon=True
        )
        _running[thread] = self._end
        thread.start()
        return thread

    def close(self) -> None:
        """Stops the thread after the item that it is loading. May be called repeatedly."""
        self._end()
        self._early.clear()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._has_ended = True


class _Buffer:
    """Bounded buffer between two threads."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._items: collections.deque[Any] = collections.deque()
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._is_closed = False

    def wait_for_room(self) -> bool:
        """Waits for room; returns False once the buffer is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._items) < self._size)
            return not self._is_closed

    def put(self, item: object) -> None:
        with self._changed:
            if not self._is_closed:
                self._items.append(item)
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def take(self) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._error or self._is_closed)
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            error, self._error = self._error, None
            try:
                raise error or StopIteration
            finally:
                del error  # Breaks a reference cycle through all frames of the caller.

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._items.clear()
            self._changed.notify_all()


def _end(buffer: _Buffer | None, give_up: Callable[[], None] | None) -> None:
    if buffer is not None:
        buffer.close()
    if give_up is not None:
        give_up()


def _fill(buffer: _Buffer, load: Callable[[], Any]) -> None:
    try:
        while buffer.wait_for_room():
            buffer.put(load())
    except Exception as error:  # noqa: BLE001 - raised in the consumer's thread
        buffer.fail(error)


_running: weakref.WeakKeyDictionary[threading.Thread, Callable[[], None]] = (
    weakref.WeakKeyDictionary()
)


def _end_all() -> None:
    """Stops all threads at exit: a daemon thread inside JAX would crash the interpreter."""
    running = list(_running.items())
    for _, end in running:
        end()
    for thread, _ in running:
        thread.join(_EXIT_WAIT_S)


atexit.register(_end_all)
