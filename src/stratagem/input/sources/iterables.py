"""Anything that can be iterated: generators, iterators that keep a state, iterable objects."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from stratagem.input.sources.source import (
    UNKNOWN_CARDINALITY,
    Reader,
    Source,
    stateless_reader,
)
from stratagem.input.sources.spec import spec_of
from stratagem.messages import explain

__all__ = ["GeneratorSource", "IterableSource", "OneShotSource"]

# How iterators of other libraries are asked for their state, and how they take it.
_STATE_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


class IterableSource(Source):
    """An object that gives a new iterator over batches each time.

    Args:
        batches: the object.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches
        self._latest: _IteratorReader | None = None

    @property
    def cardinality(self) -> int:
        """Number of batches where the object has a length; else unknown."""
        try:
            return len(self._batches)  # pyright: ignore[reportArgumentType]
        except TypeError:
            return UNKNOWN_CARDINALITY

    def open(self, epoch: int) -> Reader:
        """Begins to read from the beginning.

        Args:
            epoch: has no influence.

        Returns:
            The reader.

        Raises:
            ValueError: the object gave the same iterator as before, and that has ended.
        """
        iterator = iter(self._batches)
        reader, before = _IteratorReader(iterator, self._batches), self._latest
        if before is not None and before.iterator is iterator:
            reader = _IteratorReader(iterator, self._batches, before=before)
        self._latest = reader
        return reader


class GeneratorSource(Source):
    """What a function returns, which is called anew for each epoch.

    Args:
        make: returns an iterable of batches.
    """

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self._make = make

    def open(self, epoch: int) -> Reader:
        """Calls the function."""
        return _GeneratorReader(iter(self._make()))


class _GeneratorReader(Reader):
    """Reads what a function returned; goes on by reading what comes before once more."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator

    def read(self) -> Any:
        return _copied(next(self._iterator))

    def close(self) -> None:
        if callable(close := getattr(self._iterator, "close", None)):
            close()


class OneShotSource(Source):
    """An iterator, a generator among them: what was read is gone, and the next epoch goes on.

    Args:
        batches: the iterator.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._iterator = batches
        self._batches = batches
        self._latest: _IteratorReader | None = None

    def element_spec(self) -> Any:
        """Looks at the first batch, which stays the first to be read.

        Returns:
            Pytree of `ArraySpec`; None where there is no data at all.
        """
        for first in self._batches:
            self._batches = itertools.chain([_copied(first)], self._batches)
            return spec_of(first)
        return None

    def open(self, epoch: int) -> Reader:
        """Goes on reading.

        Args:
            epoch: has no influence.

        Returns:
            The reader. Its first batch raises a ValueError where there is none any more.
        """
        self._latest = _IteratorReader(self._batches, self._iterator, before=self._latest)
        return self._latest


class _IteratorReader(Reader):
    """Reads an iterator.

    Args:
        iterator: over batches.
        origin: what it was made of; has the state where the iterator has none.
        before: read the same iterator in an earlier epoch; None if there was none.
    """

    has_cheap_state = False

    def __init__(
        self, iterator: Iterator[Any], origin: Any, before: _IteratorReader | None = None
    ) -> None:
        self._iterator = iterator
        self._origin = origin
        # Kept as a number: a chain of readers would grow with each epoch.
        self._num_before = 0 if before is None else before.num_taken
        self.num_taken = self._num_before

    @property
    def iterator(self) -> Iterator[Any]:
        """The iterator that is read."""
        return self._iterator

    def read(self) -> Any:
        try:
            batch = next(self._iterator)
        except StopIteration:
            if self.num_taken == self._num_before > 0:
                raise _used_up(self._origin, self._num_before) from None
            raise
        self.num_taken += 1
        return _copied(batch)

    def state(self) -> Any:
        owner, names = self._stateful()
        return getattr(owner, names[0])()

    def restore(self, state: Any) -> None:
        owner, names = self._stateful()
        getattr(owner, names[1])(state)
        if owner is not self._iterator and owner is self._origin:
            self._iterator = iter(self._origin)
        self.num_taken = self._num_before = 0  # whoever sets a state may set it back

    def _stateful(self) -> tuple[Any, tuple[str, str]]:
        for owner in (self._iterator, self._origin):
            for names in _STATE_METHODS:
                if all(callable(getattr(owner, name, None)) for name in names):
                    return owner, names
        raise stateless_reader(
            f"an object of type {type(self._origin).__name__}",
            fix="give it get_state() and set_state(state), or take one of these sources.",
        )

    def close(self) -> None:
        close = getattr(self._iterator, "close", None)  # of a generator: runs its `finally`
        if callable(close) and self._iterator is not self._origin:
            close()


def _used_up(origin: Any, num_taken: int) -> ValueError:
    return ValueError(
        explain(
            f"A dataset was read again that is an object of type {type(origin).__name__}, which "
            f"ended after {num_taken} batches.",
            expected="data that can be read from its beginning in each epoch; a generator or an "
            "iterator can be read once.",
            fix="pass the function that makes it: sg.input.Dataset.from_generator(function).",
        )
    )


def _copied(batch: Any) -> Any:
    """Keeps a batch apart from its source, which may fill the same arrays again."""
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, batch)
