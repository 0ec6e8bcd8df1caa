"""Iterators over distributed datasets, with prefetching and resumable positions."""

from __future__ import annotations

import atexit
import collections
import dataclasses
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from stratagem import contexts as stack
from stratagem.config import filters_traceback
from stratagem.devices.lockstep import waiting_for_input
from stratagem.devices.mesh import Topology, outside_context_mesh
from stratagem.errors import OutOfRangeError, explain, invalid
from stratagem.input.batches import HostBatch
from stratagem.input.placement import (
    MANY_GROUPS,
    HostSteps,
    PlacedBatches,
    are_small,
    place,
    put_steps,
)
from stratagem.input.sources.source import BATCHES_PER_SNAPSHOT, Reader
from stratagem.observe.recorder import input_mark
from stratagem.observe.wait_clock import DataWait, wait_clock
from stratagem.variables.distributed import is_array
from stratagem.variables.exhausted_memory import explain_exhausted_memory

if TYPE_CHECKING:
    from stratagem.input.distributed import DistributedDataset


# `Prefetcher`: loads items ahead in a background thread, where that is faster.

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


@dataclasses.dataclass(frozen=True)
class OptionalBatch:
    """A batch, or the end of the data.

    Args:
        batch: pytree with `PerReplica` leaves; None at the end.

    Example:
        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> batches = iter(strategy.distribute_dataset([np.arange(4)]))
        >>> batches.get_next_as_optional().get_value()
        PerReplica[[0 1] | [2 3]]
        >>> batches.get_next_as_optional().has_value()
        False

    Source: TF 2.21 optional_ops.py, Optional.
    """

    batch: Any

    def has_value(self) -> bool:
        """Returns True if there is a batch."""
        return self.batch is not None

    def get_value(self) -> Any:
        """Returns the batch.

        Returns:
            Pytree with `PerReplica` leaves.

        Raises:
            OutOfRangeError: the data has ended.
        """
        if self.batch is None:
            raise _end_of_data_error()
        return self.batch


class DistributedIterator:
    """Iterates over a distributed dataset once, and loads batches ahead.

    Use in cross-replica context. Each batch has the source's pytree structure with `PerReplica`
    leaves, or plain arrays with one replica. Arrays have shape (n, rows, ...), sharded over the
    replica axis. Dtypes are JAX's: with 64-bit types disabled, float64 becomes float32; uint8 stays
    uint8.

    Args:
        dataset: the distributed dataset.
        epoch: epoch number, from 0; shuffling sources reorder each epoch.

    Example:
        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> batches = iter(strategy.distribute_dataset([np.arange(4), np.arange(3)]))
        >>> isinstance(batches, sg.DistributedIterator), next(batches)
        (True, PerReplica[[0 1] | [2 3]])
        >>> position = batches.get_state()  # to save in a checkpoint
        >>> next(batches)
        PerReplica[[0 1] | [2]]

    Source: TF 2.21 input_lib.py, DistributedIterator.
    """

    def __init__(self, dataset: DistributedDataset, epoch: int) -> None:
        self._dataset = dataset
        self._topology: Topology = dataset.strategy.topology
        self._pending: list[BatchGroup] = []
        self._begin(epoch, None)

    def _begin(self, epoch: int, state: dict[str, Any] | None) -> None:
        self._epoch = epoch
        self._loader = self._dataset.make_loader(epoch, state)
        self._position = self._loader.position
        self._prefetcher = Prefetcher(
            self._loader.load,
            self._dataset.options.per_replica_buffer_size,
            self._loader.give_up,
            # A thread may wait for other processes longer than for the data.
            handover_s=0.0 if self._dataset.is_agreed_on else HANDOVER_S,
            # A transfer to a GPU waits for the steps that were started before it.
            loads_early=not self._topology.is_abstract and self._topology.platform != "cpu",
        )
        self._pending = []
        self._error: Exception | None = None

    def __iter__(self) -> DistributedIterator:
        return self

    @filters_traceback
    @outside_context_mesh
    def __next__(self) -> Any:
        try:
            return self.take(1)[0].value()
        except Exception as error:
            explain_exhausted_memory(error, self.strategy.variables.live)
            raise

    def get_next(self) -> Any:
        """Returns the next batch.

        Returns:
            Pytree with `PerReplica` leaves.

        Raises:
            OutOfRangeError: the data has ended.
            ValueError: called in a replica function.
        """
        try:
            return next(self)
        except StopIteration:
            raise _end_of_data_error() from None

    def get_next_as_optional(self) -> OptionalBatch:
        """Returns the next batch, or an empty value at the end of the data.

        Returns:
            An object with `has_value()` and `get_value()`.

        Raises:
            ValueError: called in a replica function.
        """
        return OptionalBatch(next(self, None))

    @property
    def element_spec(self) -> Any:
        """Shapes and dtypes per replica, as in the dataset."""
        return self._dataset.element_spec

    @property
    def strategy(self) -> Any:
        """Strategy whose replicas share the batches."""
        return self._dataset.strategy

    def take(self, num_steps: int) -> list[PlacedBatches]:
        """Returns the next `num_steps` batches on the devices, one entry per run of one signature.

        Returns fewer at the end of the data; raises StopIteration if none is left.
        """
        require_outside_replicas("Batches of a distributed iterator were taken")
        self._loader.group_size = num_steps
        runs: list[list[BatchGroup]] = []
        missing = num_steps
        while missing:
            try:
                with input_mark():
                    group = self._next_group()
            except StopIteration:
                if runs:
                    break
                self.close()
                raise
            except Exception as error:
                if not runs:
                    raise
                self._error = error  # Raised once the batches before it are returned.
                break
            if group.placed.num_steps > missing:
                group, rest = group.split(missing)
                self._pending.insert(0, rest)
            missing -= group.placed.num_steps
            self._position = group.positions[-1]
            if runs and runs[-1][0].placed.signature == group.placed.signature:
                runs[-1].append(group)
            else:
                runs.append([group])
        return [BatchGroup.join(run, self._topology).placed for run in runs]

    def _next_group(self) -> BatchGroup:
        if self._pending:
            return self._pending.pop(0)
        if self._error is None:
            with DataWait(wait_clock):
                if not self._dataset.is_agreed_on:
                    return self._prefetcher.take()
                with waiting_for_input("a distributed dataset"):
                    return self._prefetcher.take()
        error, self._error = self._error, None
        try:
            raise error
        finally:
            del error  # Breaks a reference cycle: error, frame, iterator.

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the last batch that was returned.

        Returns:
            A dict that JSON can store.

        Raises:
            NotImplementedError: the source cannot be resumed.

        Example:
            >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> dataset = strategy.distribute_dataset([np.arange(4), np.arange(3)])
            >>> iterator = iter(dataset)
            >>> _ = next(iterator)
            >>> again = iter(dataset)
            >>> again.set_state(iterator.get_state())
            >>> next(again)
            PerReplica[[0 1] | [2]]

        Source: Grain, DatasetIterator.get_state.
        """
        if self._position is None:
            self._loader.reader.state()  # Raises an error with the reason.
        return {"epoch": self._epoch, "position": self._position}

    def set_state(self, state: dict[str, Any]) -> None:
        """Resumes from the position of another iterator over the same data, in any process.

        The dataset's next epoch follows the restored one.

        Args:
            state: returned by `get_state`.
        """
        self.close()
        self._dataset.go_to_epoch(state["epoch"])
        self._begin(state["epoch"], state["position"])

    def close(self) -> None:
        """Stops loading ahead; automatic at the end of the data and on garbage collection."""
        self._prefetcher.close()
        self._loader.reader.close()


def require_outside_replicas(what: str) -> None:
    """Raises ValueError in replica functions; `what` is the action, as the start of a sentence."""
    stack.note_use()
    frame = stack.current_frame()
    if frame is not None and frame.kind is stack.FrameKind.REPLICA:
        raise invalid(
            f"{what} inside a replica function.",
            expected="cross-replica context, where the global batch is read once.",
            fix="read it outside and pass it: strategy.run(step, args=(next(iterator),)).",
            code="SG305",
        )


def _end_of_data_error() -> OutOfRangeError:
    return OutOfRangeError(
        explain(
            "The distributed dataset has no more batches.",
            expected="at least one more batch in this epoch.",
            fix="create a new iterator with iter(dataset), or loop with `for batch in dataset`.",
            code="SG304",
        )
    )


# Loads groups of batches from a source to the devices, with resume positions.


# Small batches are transferred in groups of so many: a transfer costs more than a copy.
_MOST_AHEAD = 16
# Start position of a reader whose only state is the number of batches read.
_BEGINNING = {"source": {"num_read": 0}, "then_read": 0}


@dataclasses.dataclass(frozen=True)
class BatchGroup:
    """Batches of one signature that were transferred together.

    `positions` has the resume position after each batch; None if the source has none.
    """

    placed: PlacedBatches
    positions: list[Any]

    def split(self, num_steps: int) -> tuple[BatchGroup, BatchGroup]:
        """Splits the group after `num_steps` steps; neither part may be empty."""
        return self._slice(0, num_steps), self._slice(num_steps, self.placed.num_steps)

    def _slice(self, start: int, stop: int) -> BatchGroup:
        rows = start if stop - start == 1 else slice(start, stop)
        arrays = [array[rows] for array in self.placed.arrays]
        placed = dataclasses.replace(self.placed, arrays=arrays, num_steps=stop - start)
        return BatchGroup(placed, self.positions[start:stop])

    def put_each(self, topology: Topology) -> list[BatchGroup]:
        """Returns the batches of a group on the host, each on the devices."""
        steps = put_steps(self.placed.arrays, topology, self.placed.name_of)
        return [
            BatchGroup(dataclasses.replace(self.placed, arrays=arrays, num_steps=1), [position])
            for arrays, position in zip(steps, self.positions, strict=True)
        ]

    @staticmethod
    def join(groups: list[BatchGroup], topology: Topology) -> BatchGroup:
        """Joins one or more consecutive groups of one signature."""
        if len(groups) == 1:
            return groups[0]
        columns = zip(*(group._stepped_arrays() for group in groups), strict=True)
        arrays = [jnp.concatenate(list(column)) for column in columns]
        if topology.num_replicas > 1 and not topology.spans_processes:
            arrays = jax.device_put(arrays, topology.stacked_steps)
        num_steps = sum(group.placed.num_steps for group in groups)
        placed = dataclasses.replace(groups[0].placed, arrays=arrays, num_steps=num_steps)
        return BatchGroup(placed, [position for group in groups for position in group.positions])

    def _stepped_arrays(self) -> list[Any]:
        arrays = self.placed.arrays
        return arrays if self.placed.num_steps > 1 else [array[None] for array in arrays]


class Loader:
    """Reads groups of `group_size` batches and transfers them to the devices.

    If it `looks_ahead`, small batches that are in memory are transferred before they are asked for.
    `position` is where reading began. `read` returns the next batch of all replicas. `can_seek` is
    True if each batch is one of the reader's and independent of other processes. `give_up`
    permanently cancels a `read` that waits for other processes; call it from any thread.
    """

    def __init__(
        self,
        reader: Reader,
        read: Callable[[Reader], HostBatch],
        topology: Topology,
        *,
        to_device: bool,
        can_seek: bool = False,
        looks_ahead: bool = False,
        give_up: Callable[[], None] | None = None,
    ) -> None:
        self.reader = reader
        self._can_seek = can_seek
        self.give_up = give_up
        self._read = read
        self._topology = topology
        self._to_device = to_device
        self._looks_ahead = looks_ahead and to_device and reader.is_in_memory
        self._are_small = False  # The last batches may be transferred ahead.
        self._ahead: tuple[HostBatch, Any] | None = None
        self._placed: collections.deque[BatchGroup] = collections.deque()
        self._error: Exception | None = None
        self._positions = _Positions(reader)
        self.position = self._positions.current()
        self.group_size = 1
        self._num_loaded = 0

    def host_batches(self, num_to_pass: int = 0) -> Iterator[HostBatch]:
        """Yields all remaining batches without transfer, then closes the reader.

        Skips `num_to_pass` batches, without reading them if the source supports it.
        """
        try:
            if num_to_pass and self._can_seek and self.position == _BEGINNING:
                self.reader.restore({"num_read": num_to_pass})
                num_to_pass = 0
            while True:
                try:
                    batch = self._read(self.reader)
                except StopIteration:
                    return
                if num_to_pass:
                    num_to_pass -= 1
                    continue
                yield batch
        finally:
            if self.give_up is not None:
                self.give_up()
            self.reader.close()

    def load(self) -> BatchGroup:
        """Returns the next group, shorter than `group_size` if the signature changes.

        Raises StopIteration at the end. An error of the source is raised after the batches before
        it were returned.
        """
        if self._placed:
            return self._placed.popleft()
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # It refers to this frame.
        is_repeated = self._num_loaded >= MANY_GROUPS
        self._num_loaded += 1
        is_ahead = is_repeated and self.group_size == 1 and self._are_small
        size = _MOST_AHEAD if is_ahead else self.group_size
        batches, positions = self._read_group(size)
        is_ahead = len(positions) > self.group_size
        to_device = self._to_device and not is_ahead
        placed = place(batches, self._topology, to_device=to_device, is_repeated=is_repeated)
        group = BatchGroup(placed, positions)
        self._are_small = self._looks_ahead and _are_small(batches, self._topology)
        if not is_ahead:
            return group
        self._placed.extend(group.put_each(self._topology))
        return self._placed.popleft()

    def _read_group(self, size: int) -> tuple[list[HostBatch] | HostSteps, list[Any]]:
        """Returns up to `size` batches of one signature, and the position after each."""
        taken: list[tuple[HostBatch, Any]] = []
        if size > 1 and self._can_seek and self._ahead is None:
            found = self.reader.next_many(size, 1)
            if found is not None:
                steps, number = found
                positions = self._positions.of_last(number)
                if number == size:
                    return steps, positions
                taken.extend(zip(steps.batches(), positions, strict=True))
        if not taken:
            taken.append(self._next())
        while len(taken) < size:
            try:
                following = self._next()
            except StopIteration:
                break
            except Exception as error:  # noqa: BLE001 - raised with the next group
                self._error = error
                break
            if following[0].signature != taken[0][0].signature:
                self._ahead = following
                break
            taken.append(following)
        return [batch for batch, _ in taken], [position for _, position in taken]

    def _next(self) -> tuple[HostBatch, Any]:
        if self._ahead is not None:
            taken, self._ahead = self._ahead, None
            return taken
        batch = self._read(self.reader)
        return batch, self._positions.current()


def _are_small(batches: list[HostBatch] | HostSteps, topology: Topology) -> bool:
    first = batches.first if isinstance(batches, HostSteps) else batches[0]
    return are_small(first.arrays, topology) and all(map(is_array, first.arrays))


class _Positions:
    """Resume positions of a reader. Expensive snapshots are taken every few batches."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._interval = 1 if reader.has_cheap_state else BATCHES_PER_SNAPSHOT
        self._snapshot: Any = None
        self._is_stateless = False
        self._snapshot_read = 0
        self._take_snapshot()

    def _take_snapshot(self) -> None:
        try:
            self._snapshot = self._reader.state()
            self._snapshot_read = self._reader.num_read
        except NotImplementedError:
            self._is_stateless = True

    def of_last(self, count: int) -> list[Any]:
        """Returns the position after each of the last `count` batches, which were read at once."""
        if self._is_stateless:
            return [None] * count
        first = self._reader.num_read - count + 1 - self._snapshot_read
        earlier = [
            {"source": self._snapshot, "then_read": first + number} for number in range(count - 1)
        ]
        return [*earlier, self.current()]

    def current(self) -> Any:
        if self._is_stateless:
            return None
        if self._reader.num_read - self._snapshot_read >= self._interval:
            self._take_snapshot()
        return {
            "source": self._snapshot,
            "then_read": self._reader.num_read - self._snapshot_read,
        }
