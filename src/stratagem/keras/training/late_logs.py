"""Logs of steps whose values are read from the devices only when a callback uses them."""

from __future__ import annotations

import functools
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import keras

from stratagem.keras.private import pythonify_logs
from stratagem.keras.private.trainers import calls_in_thread, last_drawn_s
from stratagem.keras.training.active_fit import uses_batch_logs
from stratagem.variables.late_reads import LateRead

_UNREAD = object()


class LateLogs(dict[str, Any]):
    """A dict of known names whose values are those of `read()`, called when one is first used.

    `source` is the read of variables that `read` asks for, if any.
    """

    def __init__(
        self, names: Iterable[str], read: Callable[[], Any], source: LateRead | None = None
    ) -> None:
        super().__init__(dict.fromkeys(names, _UNREAD))
        self._read: Callable[[], Any] | None = read
        self.source = source
        self.is_shared = False

    def load(self) -> None:
        """Reads the values, if they were not."""
        if self._read is not None:
            values = self._read()
            self._read = None
            super().update(values)

    def forget_if_shared(self) -> None:
        """Drops the read if callbacks had the logs and no one kept them."""
        if self.is_shared and self.source is not None:
            self.source.drop()

    def __iter__(self) -> Iterator[str]:  # makes `dict(logs)` call `__getitem__`
        return super().__iter__()

    def __reduce__(self) -> tuple[Any, ...]:  # pickled and copied as a plain dict
        return dict, (dict(self),)


def _loading(name: str) -> Callable[..., Any]:
    original = getattr(dict, name)

    @functools.wraps(original)
    def method(self: LateLogs, *args: Any, **kwargs: Any) -> Any:
        self.load()
        return original(self, *args, **kwargs)

    return method


for _name in (
    *("__getitem__", "get", "items", "values", "copy", "__eq__", "__ne__", "__repr__"),
    *("__or__", "__ror__", "__ior__", "__setitem__", "__delitem__"),
    *("clear", "pop", "popitem", "setdefault", "update"),
):
    setattr(LateLogs, _name, _loading(_name))


def _dict(names: Iterable[str], values: Iterable[Any]) -> Any:
    return dict(zip(names, values, strict=True))


# As JAX flattens a dict: by sorted keys.
jax.tree_util.register_pytree_node(
    LateLogs,
    lambda logs: ([logs[name] for name in sorted(logs)], tuple(sorted(logs))),
    _dict,
)


def sharing_late_logs(original: Callable[..., Any]) -> Any:
    """Returns the method of a `CallbackList` that gives callbacks numbers read on first use.

    Keras converts the logs of each batch to numbers first, which waits for the step.
    """
    name = original.__name__
    in_test = name == "on_test_batch_end"

    @functools.wraps(original)
    def shared(self: keras.callbacks.CallbackList, batch: int, logs: Any = None) -> None:
        if not isinstance(logs, LateLogs):
            original(self, batch, logs)
            return
        if calls_in_thread(self, in_test=in_test) and any(map(_needs_thread, self.callbacks)):
            original(self, batch, dict(logs))  # read now: the next step starts meanwhile
            return
        numbers = LateLogs(sorted(logs), lambda: pythonify_logs(logs))
        for callback in self.callbacks:
            getattr(callback, name)(batch, logs=numbers)
        kept = weakref.ref(numbers)
        del numbers
        if kept() is not None and logs.source is not None:
            logs.source.result()
        logs.is_shared = True

    return shared


def _needs_thread(callback: keras.callbacks.Callback) -> bool:
    """Returns True if a callback may wait for each step; a bar does so 20 times a second."""
    if isinstance(callback, keras.callbacks.ProgbarLogger):
        return last_drawn_s(callback.progbar) is None
    return uses_batch_logs(callback)


def reading_when_drawn(original: Callable[..., Any]) -> Any:
    """Returns the method of `ProgbarLogger` that uses logs only if the bar is drawn now."""

    @functools.wraps(original)
    def update(self: keras.callbacks.ProgbarLogger, batch: int, logs: Any = None) -> None:
        bar: Any = self.progbar
        drawn_s = last_drawn_s(bar) if isinstance(logs, LateLogs) else None
        if drawn_s is None or time.time() - drawn_s >= bar.interval:
            original(self, batch, logs)
            return
        interval, bar.interval = bar.interval, math.inf  # as the interval could end meanwhile
        try:
            original(self, batch)
        finally:
            bar.interval = interval

    return update
