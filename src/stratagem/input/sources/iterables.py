"""Sources of iterables: generators, stateful iterators, iterable objects."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from stratagem.errors import explain
from stratagem.input.sources.source import (
    UNKNOWN_CARDINALITY,
    Reader,
    Source,
    not_resumable_error,
    spec_of,
)

# State methods of iterators of other libraries.
_STATE_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


class IterableSource(Source):
    """An object that returns a new iterator over batches each time."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches
        self._latest: _IteratorReader | None = None

    @property
    def cardinality(self) -> int:
        """Number of batches if the object has a length, else unknown."""
        try:
            return len(self._batches)  # pyright: ignore[reportArgumentType]
        except TypeError:
            return UNKNOWN_CARDINALITY

    def open(self, epoch: int) -> Reader:
        """Opens an iterator; raises ValueError for the same, exhausted iterator."""
        iterator = iter(self._batches)
        reader, before = _IteratorReader(iterator, self._batches), self._latest
        if before is not None and before.iterator is iterator:
            reader = _IteratorReader(iterator, self._batches, before=before)
        self._latest = reader
        return reader


class GeneratorSource(Source):
    """A function that returns an iterable of batches, called once per epoch."""

    @property
    def is_repeatable(self) -> bool:
        """True: `from_generator` asks for a function that yields the same batches again."""
        return True

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self._make = make

    def open(self, epoch: int) -> Reader:
        """Calls the function."""
        return _GeneratorReader(iter(self._make()))


class _GeneratorReader(Reader):
    """Reads a generator; resumes by reading earlier batches again."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator

    def read(self) -> Any:
        return _copied(next(self._iterator))

    def close(self) -> None:
        if callable(close := getattr(self._iterator, "close", None)):
            close()


class OneShotSource(Source):
    """An iterator or generator, which cannot be rewound: each epoch continues the last."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._iterator = batches
        self._batches = batches
        self._latest: _IteratorReader | None = None

    def element_spec(self) -> Any:
        """Returns the `ArraySpec`s of the first batch, without consuming it; None if empty."""
        for first in self._batches:
            self._batches = itertools.chain([_copied(first)], self._batches)
            return spec_of(first)
        return None

    def open(self, epoch: int) -> Reader:
        """Continues reading; raises ValueError at the first batch if none is left."""
        self._latest = _IteratorReader(self._batches, self._iterator, before=self._latest)
        return self._latest


class _IteratorReader(Reader):
    """Reads an iterator.

    `origin` returned the iterator and may have the state methods that the iterator lacks. `before`
    is the reader of the same iterator in an earlier epoch.
    """

    has_cheap_state = False

    def __init__(
        self, iterator: Iterator[Any], origin: Iterable[Any], before: _IteratorReader | None = None
    ) -> None:
        self._iterator = iterator
        self._origin = origin
        # Only the count: a chain of readers would grow by one per epoch.
        self._num_before = 0 if before is None else before.num_taken
        self.num_taken = self._num_before

    @property
    def iterator(self) -> Iterator[Any]:
        """The iterator."""
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

    def restore(self, state: object) -> None:
        owner, names = self._stateful()
        getattr(owner, names[1])(state)
        if owner is not self._iterator and owner is self._origin:
            self._iterator = iter(self._origin)
        self.num_taken = self._num_before = 0  # A state may also rewind the iterator.

    def _stateful(self) -> tuple[Any, tuple[str, str]]:
        for owner in (self._iterator, self._origin):
            for names in _STATE_METHODS:
                if all(callable(getattr(owner, name, None)) for name in names):
                    return owner, names
        raise not_resumable_error(
            f"an object of type {type(self._origin).__name__}",
            fix="give it get_state() and set_state(state), or use one of these sources.",
        )

    def close(self) -> None:
        close = getattr(self._iterator, "close", None)  # Runs a generator's `finally`.
        if callable(close) and self._iterator is not self._origin:
            close()


def _used_up(origin: object, num_taken: int) -> ValueError:
    return ValueError(
        explain(
            f"The dataset cannot be read again: it is an object of type "
            f"{type(origin).__name__}, which ended after {num_taken} batches.",
            expected="data that can be read from the start in each epoch; generators and "
            "iterators can be read only once.",
            fix="pass the function that creates it: sg.input.Dataset.from_generator(function).",
            code="SG303",
        )
    )


def _copied(batch: object) -> Any:
    """Copies a batch, because its source may reuse the arrays."""
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, batch)
