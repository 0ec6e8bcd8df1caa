"""Position of `fit` in its data: tracking, saving and resuming."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import keras

from stratagem.checkpoint.objects import Stateful
from stratagem.errors import invalid
from stratagem.keras.numerics.random_state import Draws, from_json, to_json
from stratagem.keras.private import (
    GeneratorDataAdapter,
    PyDatasetAdapter,
    TFDatasetAdapter,
    batches_taken,
    goes_on_with_iterator,
    grouped,
    order_number,
    replace_steps,
    restore_steps,
    set_batches_taken,
    set_order_number,
    torch_loader,
)
from stratagem.keras.training.datasets import DatasetAdapter

if TYPE_CHECKING:
    from stratagem.keras.private import DataAdapter, JAXEpochIterator

# Data adapter that counts the batches read, and resumes at the position of another run.

_ORDER, _OF_DATA = "order", "of_data"


class TrackedAdapter:
    """Wraps a Keras adapter and forwards all other attributes to it.

    At most `max_ahead` batches are read before their steps begin. `running` are the batches opened
    last. `earlier` has, for each iterator before, the number of batches read and whether it was
    read to the end. `began` is the random state at the start of the epoch. `position` tracks this
    adapter.
    """

    def __init__(self, adapter: DataAdapter, max_ahead: int) -> None:
        self.adapter: Any = adapter
        self.max_ahead = max_ahead
        self.running: TrackedBatches | None = None
        self.earlier: list[tuple[int, bool]] = []
        self.began: Draws | None = None
        self.own: Any = None
        self.hooks: list[Any] = []
        self.resuming: Mapping[str, Any] | None = None
        self.position: Any = None
        self._keeps_hooks = _has_hooks(adapter)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.adapter, name)

    def get_jax_iterator(self, super_batch: int | None = None) -> Iterator[Any]:
        """Returns an iterator; the source is opened at the first batch."""
        return grouped(TrackedBatches(self), super_batch)

    def on_epoch_begin(self) -> None:
        """Forwards the start of an epoch; after a restart, with its original random state."""
        state, before = self.resuming, Draws.now()
        is_within = state is not None and state["is_within"]
        if state is not None:
            self._prepare(state)
            (Draws.from_json(state["began"]) if is_within else before).set()
        self.began, self.own = Draws.now(), self.own_state()
        self._call(self.adapter.on_epoch_begin)
        if is_within and not self.has_thread:
            before.set()

    def on_epoch_end(self) -> None:
        """Forwards the end of an epoch."""
        self._call(self.adapter.on_epoch_end)

    def _call(self, hook: Callable[[], object]) -> None:
        """Calls a hook, and stores the random state before it if the hook drew numbers."""
        if not self._keeps_hooks:
            hook()
            return
        before = Draws.now().as_json
        hook()
        self.hooks.append(before if before != Draws.now().as_json else None)

    @property
    def has_thread(self) -> bool:
        """True if a thread reads ahead, which draws the order at any time in the epoch."""
        return getattr(self.adapter, "enqueuer", None) is not None

    def own_state(self) -> Any:
        """Returns, as JSON, the other state that determines the next iterator's batches."""
        order = order_number(self.adapter)
        own = self._own_state_of_data()
        return own if order is None else {_ORDER: order, _OF_DATA: own}

    def _own_state_of_data(self) -> Any:
        if isinstance(self.adapter, DatasetAdapter):
            return self.adapter.opening
        if isinstance(self.adapter, PyDatasetAdapter):
            dataset = self.adapter.py_dataset
            return dataset.get_state() if isinstance(dataset, Stateful) else None
        loader = torch_loader(self.adapter)
        if loader is None or loader.generator is None:
            return None
        return to_json(loader.generator.get_state().numpy())

    def _set_own_state(self, state: Any, num_batches: int) -> None:
        own: Any = state
        if isinstance(own, dict) and own.keys() == {_ORDER, _OF_DATA}:  # saved under Keras 3.16
            set_order_number(self.adapter, own[_ORDER])
            state = own[_OF_DATA]
        if isinstance(self.adapter, DatasetAdapter):
            if self.adapter.can_go_to:
                self.adapter.go_to(state, num_batches)
        elif isinstance(self.adapter, PyDatasetAdapter):
            if isinstance(self.adapter.py_dataset, Stateful):
                self.adapter.py_dataset.set_state(state)
        elif state is not None and (loader := torch_loader(self.adapter)) is not None:
            loader.generator.set_state(sys.modules["torch"].from_numpy(from_json(state)))

    def _prepare(self, state: Mapping[str, Any]) -> None:
        """Repeats the hooks and reads before the epoch to resume."""
        self.hooks = list(state["hooks"])
        if self.hooks and state["is_within"]:
            self.hooks.pop()  # this epoch's, which Keras calls
        for index, before in enumerate(self.hooks):
            if before is not None:
                Draws.from_json(before).set()
            dataset = self.adapter.py_dataset
            (dataset.on_epoch_end if index % 2 else dataset.on_epoch_begin)()
        if self.has_thread:  # The batches read while Keras built the model would come first.
            self.adapter.enqueuer.ready_queue.queue.clear()
        self.earlier = [(count, to_end) for count, to_end in state["earlier"]]
        for count, to_end in self.earlier:
            self._read_again(count, to_end=to_end)
        self._set_own_state(state["own"], state["taken"])

    def _read_again(self, count: int, *, to_end: bool) -> None:
        """Reads an earlier iterator again, if the next one depends on it."""
        if isinstance(self.adapter, TFDatasetAdapter):
            count, to_end = min(count, 1), False  # each iteration reshuffles
        elif not _reads_once(self.adapter):
            return
        batches = iter(self.adapter.get_jax_iterator())
        _pass_over(batches, count)
        if to_end:
            next(batches, None)
        with contextlib.suppress(AttributeError):  # optional in iterators
            batches.close()  # pyright: ignore[reportAttributeAccessIssue]

    def open(self, batches: TrackedBatches) -> Iterator[Any]:
        """Returns an iterator for `batches`, from the resumed position if there is one."""
        previous, self.running = self.running, batches
        if previous is not None:
            self.earlier.append((previous.num_taken, previous.has_ended))
        state, self.resuming = self.resuming, None
        if state is None or not state["taken"]:
            return iter(self.adapter.get_jax_iterator())
        batches.opened, batches.own = Draws.from_json(state["opened"]), state["own"]
        if not self.has_thread:
            batches.opened.set()
        following = iter(self.adapter.get_jax_iterator())
        if not (isinstance(self.adapter, DatasetAdapter) and self.adapter.can_go_to):
            _pass_over(following, state["taken"])
        set_order_number(self.adapter, state.get(_ORDER))  # of the iterators after this one
        return following


class TrackedBatches:
    """Iterator over batches that counts those read from the source, in `num_taken`.

    `opened` and `own` are the random state and the data's state when the source was opened.
    """

    def __init__(self, data: TrackedAdapter) -> None:
        self._data = data
        self._batches: Iterator[Any] | None = None
        self._buffer: deque[Any] = deque()
        self._before: deque[tuple[int, Draws]] = deque(maxlen=data.max_ahead + 1)
        self._is_promised = False
        self.num_taken = 0
        self.has_ended = False
        self.opened: Draws | None = None
        self.own: Any = None

    @property
    def num_passed(self) -> int:
        """Number of batches skipped before the first."""
        state = self._data.resuming
        return 0 if self._batches is not None or state is None else state["taken"]

    def __iter__(self) -> TrackedBatches:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._begin()
        return self._buffer.popleft() if self._buffer else self._read()

    def has_more(self) -> bool:
        """Returns True if there is another batch; reads it if that is the only way to find out."""
        if not self._buffer and not self.has_ended:
            with contextlib.suppress(StopIteration):
                self._buffer.append(self._read())
        return bool(self._buffer) or not self.has_ended

    def close(self) -> None:
        """Stops reading, so that the source releases its threads and files."""
        if callable(close := getattr(self._batches, "close", None)):
            close()

    def draws_at(self, num_taken: int) -> Draws | None:
        """Returns the random state before batch `num_taken`; None if unread or no longer stored."""
        return dict(self._before).get(num_taken)

    def _begin(self) -> None:
        state = self._data.resuming
        before = self.opened = Draws.now()
        self.own = self._data.own
        self._batches = self._data.open(self)
        if state is None or not state["taken"]:
            return
        self.num_taken = state["taken"]
        self._is_promised = state["is_within"]
        if state["following"] is not None:
            Draws.from_json(state["following"]).set()
            for _ in range(state["ahead"]):
                self._buffer.append(self._read())
        (Draws.from_json(state["now"]) if self._data.has_thread else before).set()

    def _read(self) -> Any:
        assert self._batches is not None
        self._before.append((self.num_taken, Draws.now()))
        try:
            batch = next(self._batches)
        except StopIteration:
            self.has_ended = True
            if self._is_promised:  # Keras assumes that the first step has a batch.
                raise _ended(self.num_taken, self.num_taken + 1) from None
            raise
        self.num_taken += 1
        self._is_promised = False
        return batch


def _has_hooks(adapter: object) -> bool:
    """Returns True if epoch hooks of the user's dataset may determine its order."""
    if not isinstance(adapter, PyDatasetAdapter) or isinstance(adapter.py_dataset, Stateful):
        return False
    own, base = type(adapter.py_dataset), keras.utils.PyDataset
    hooks = ((own.on_epoch_begin, base.on_epoch_begin), (own.on_epoch_end, base.on_epoch_end))
    return any(hook is not default for hook, default in hooks)


def _reads_once(adapter: object) -> bool:
    """Returns True if earlier reads determine the next batches."""
    if isinstance(adapter, DatasetAdapter):
        return not adapter.can_go_to
    return isinstance(adapter, GeneratorDataAdapter)


def _pass_over(batches: Iterator[Any], count: int) -> None:
    for number in range(count):
        try:
            next(batches)
        except StopIteration:
            raise _ended(number, count) from None


def _ended(number: int, count: int) -> ValueError:
    return invalid(
        f"The data ended after {number} batches, but the backup needs {count}.",
        expected="the data of the run that saved the backup.",
        fix="pass the same data, or delete the backup to start over.",
        code="SG706",
    )


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
            raise invalid(
                f"The backup was saved at batch {batch} of {then}, but an epoch now has {here} "
                "batches.",
                expected="the data, batch size and steps_per_epoch of the run that saved it.",
                fix="pass the same arguments, or delete the backup to start over.",
                code="SG706",
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
