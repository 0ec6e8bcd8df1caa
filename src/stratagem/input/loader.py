"""Loads groups of batches from a source to the devices, with resume positions."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from stratagem.devices.mesh import Topology
from stratagem.input.batches import HostBatch
from stratagem.input.placement import HostSteps, PlacedBatches, are_small, place, put_steps
from stratagem.input.sources.source import BATCHES_PER_SNAPSHOT, Reader
from stratagem.variables.distributed import is_array

# After so many groups, others of the same shapes are likely to follow.
_MANY = 16
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
        is_repeated = self._num_loaded >= _MANY
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
