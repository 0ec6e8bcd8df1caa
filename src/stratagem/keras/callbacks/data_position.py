"""Position of `fit` in its data: tracking, saving and resuming."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from stratagem.keras.callbacks.tracked_data import TrackedAdapter
from stratagem.keras.numerics.random_state import Draws
from stratagem.keras.private.iterators import (
    batches_taken,
    goes_on_with_iterator,
    order_number,
    replace_steps,
    restore_steps,
    set_batches_taken,
)
from stratagem.messages import explain

if TYPE_CHECKING:
    from stratagem.keras.private import JAXEpochIterator


# Entries of a position that only a read changes.
_OF_SOURCE = ("ahead", "following", "earlier", "own", "opened")


class DataPosition:
    """Tracks Keras's iterator over the batches of an epoch, from construction on.

    It replaces the iterator's adapter and steps until `release`.
    """

    def __init__(self, iterator: JAXEpochIterator) -> None:
        self._iterator: Any = iterator
        self._data = TrackedAdapter(iterator.data_adapter, 3 * iterator.steps_per_execution)
        self._data.position = self
        self._iterator.data_adapter = self._data
        replace_steps(iterator, self._steps)
        self._first_batch = 0
        self._before_epoch = 0  # batches that earlier epochs read from this epoch's iterator

    @classmethod
    def of(cls, iterator: JAXEpochIterator) -> DataPosition:
        """Returns the position that tracks an iterator; creates it if there is none."""
        adapter = iterator.data_adapter
        return adapter.position if isinstance(adapter, TrackedAdapter) else cls(iterator)

    def release(self) -> None:
        """Stops reading, and restores the iterator's original adapter and steps."""
        if self._data.running is not None:
            self._data.running.close()
        restore_steps(self._iterator)
        self._iterator.data_adapter = self._data.adapter
        self._data.running = self._data.position = None

    @property
    def num_batches(self) -> int | None:
        """Batches per epoch; None if unknown."""
        return self._iterator.steps_per_epoch or self._data.num_batches

    def has_more(self, batch: int) -> bool:
        """Returns True if batches remain after `batch`; reads one if the length is unknown."""
        if self.num_batches is not None and batch >= self.num_batches:
            return False
        if self._data.num_batches is not None:
            return self._before_epoch + batch < self._data.num_batches
        assert self._data.running is not None
        return self._data.running.has_more()

    def state(self, batch: int, now: Draws, *, is_within: bool) -> dict[str, Any]:
        """Returns the position as JSON.

        `batch` is the number of batches used in this epoch; `now` is the current random state.
        `is_within` is False between epochs, where `batch` is 0.
        """
        data, running = self._data, self._data.running
        taken = self._before_epoch + batch
        if not is_within:
            taken = batches_taken(self._iterator) if goes_on_with_iterator(self._iterator) else 0
        state: dict[str, Any] = {
            "num_batches": self.num_batches,
            "is_within": is_within,
            "taken": taken,
            "ahead": 0,
            "following": None,
            "began": None if data.began is None else data.began.as_json,
            "now": now.as_json,
            "hooks": data.hooks,
            "order": order_number(data.adapter),
        }
        resumed = data.resuming
        if taken and resumed is not None:  # nothing was read since
            return state | {key: resumed[key] for key in _OF_SOURCE}
        if not taken or running is None:
            finished = [] if running is None else [(running.num_taken, running.has_ended)]
            return state | {
                "earlier": data.earlier + finished,
                "own": data.own if is_within else data.own_state(),
                "opened": None,
            }
        assert running.opened is not None
        following = running.draws_at(taken)
        if running.num_taken > taken and following is not None:
            state |= {"ahead": running.num_taken - taken, "following": following.as_json}
        opened = running.opened.as_json
        return state | {"earlier": data.earlier, "own": running.own, "opened": opened}

    def go_to(self, state: Mapping[str, Any], batch: int) -> None:
        """Makes the next epoch begin at the position of another run, after `batch` batches.

        Raises a ValueError if epochs now have another number of batches.
        """
        then, here = state["num_batches"], self.num_batches
        if batch and None not in (then, here) and then != here:
            raise ValueError(
                explain(
                    f"The backup was saved at batch {batch} of {then}, but an epoch now has {here} "
                    "batches.",
                    expected="the data, batch size and steps_per_epoch of the run that saved it.",
                    fix="pass the same arguments, or delete the backup to start over.",
                    code="SG706",
                )
            )
        self._data.resuming = state
        self._first_batch = batch

    def _steps(self, original: Callable[[], Any]) -> Iterator[Any]:
        """Yields groups of the epoch's steps that are not done yet.

        If groups have another size than before, they begin where the earlier ones ended.
        """
        state, first = self._data.resuming, self._first_batch
        self._first_batch = 0
        size = self._iterator.steps_per_execution
        shift = first % size
        for begin, end, batches in original():
            if begin == 0:
                before = batches_taken(self._iterator) - size
                if state is not None:
                    before = state["taken"] - first
                    set_batches_taken(self._iterator, before + shift + size)
                self._before_epoch = before
            is_done = begin + shift < first
            is_over = self.num_batches is not None and begin + shift >= self.num_batches
            if not is_done and not is_over:
                yield begin + shift, end + shift, batches
