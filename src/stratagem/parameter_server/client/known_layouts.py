"""Layouts of variables that a client has created or received; they change between requests only."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Generator
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from stratagem.parameter_server.client.shard_layout import ShardLayout


class KnownLayouts:
    """Layouts by name of the variable, `num_moves` of them replaced. Thread-safe.

    Requests hold `in_use` from the choice of servers to the last answer. `changing` waits for
    these, and new ones wait for it, so that no request is split between two layouts of a table.
    """

    def __init__(self) -> None:
        self._layouts: dict[str, ShardLayout] = {}
        self._condition = threading.Condition()
        self._num_users = 0
        self._is_changing = False
        self.num_moves = 0
        self.moving = threading.Lock()  # by operations on whole tables, which exclude each other

    @property
    def all(self) -> list[ShardLayout]:
        """All layouts."""
        return list(self._layouts.values())

    @property
    def moved(self) -> list[ShardLayout]:
        """Layouts of tables that were moved to other servers."""
        return [one for one in self.all if one.generation]

    def add(self, layout: ShardLayout) -> bool:
        """Adds a layout, and returns True if it replaces one of other servers.

        An older one than the layout known is left out: a message may be from before a move.
        """
        known = self._layouts.get(layout.name)
        if known is not None and known.generation > layout.generation:
            return False
        self._layouts[layout.name] = layout
        is_moved = known is not None and known.generation < layout.generation
        self.num_moves += is_moved
        return is_moved

    def __getitem__(self, name: str) -> ShardLayout:
        """Returns the layout of a variable; raises KeyError if it is not known."""
        return self._layouts[name]

    def find(self, name: str) -> tuple[ShardLayout, str]:
        """Returns the layout of a variable or of a slot "variable:slot", and ":slot" or ""."""
        if name in self._layouts:
            return self._layouts[name], ""
        variable, colon, slot = name.rpartition(":")
        return self._layouts[variable], colon + slot

    @contextlib.contextmanager
    def in_use(self) -> Generator[None]:
        """Keeps the layouts as they are in a `with` block."""
        with self._condition:
            self._condition.wait_for(lambda: not self._is_changing)
            self._num_users += 1
        try:
            yield
        finally:
            with self._condition:
                self._num_users -= 1
                self._condition.notify_all()

    @contextlib.contextmanager
    def changing(self) -> Generator[None]:
        """Keeps requests from beginning in a `with` block, and waits for those in progress."""
        with self._condition:
            self._condition.wait_for(lambda: not self._is_changing)
            self._is_changing = True
            self._condition.wait_for(lambda: not self._num_users)
        try:
            yield
        finally:
            with self._condition:
                self._is_changing = False
                self._condition.notify_all()


class _WithLayouts(Protocol):
    known: KnownLayouts


_Self = TypeVar("_Self", bound=_WithLayouts)
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def by_layouts(
    method: Callable[Concatenate[_Self, _Args], _Result],
) -> Callable[Concatenate[_Self, _Args], _Result]:
    """Decorates a method that sends requests by `self.known`, which then stays as it is."""

    @functools.wraps(method)
    def run(self: _Self, /, *args: Any, **kwargs: Any) -> _Result:
        with self.known.in_use():
            return method(self, *args, **kwargs)

    return run
