"""Exchange of batch sizes between processes that read different data.

Batch sizes are part of the program that all processes run, so each needs the sizes of all. A
process without further data continues with empty batches until all data has ended. Processes that
have replicas together must read the same data; their sizes are compared.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from stratagem.devices.lockstep import waiting_for_input
from stratagem.devices.mesh import Topology
from stratagem.errors import InvalidArgumentError
from stratagem.group.current import current_group
from stratagem.input.batches import HostBatch, join_parts
from stratagem.input.sources.source import Reader
from stratagem.messages import explain
from stratagem.observe.run_events.wait_clock import PeerSizesWait, wait_clock

_numbers = itertools.count()  # All processes create their datasets in the same order.


class SizeExchange:
    """Exchanges lengths and batch sizes of one distributed dataset."""

    def __init__(self, topology: Topology) -> None:
        self._name = f"dataset {next(_numbers)}"
        self._topology = topology
        self._num_readings = 0
        self._cardinalities: dict[int, int] = {}

    def cardinality(self, own: int) -> int:
        """Returns the most steps of any process, or a negative number if one is unknown."""
        if own not in self._cardinalities:
            group = current_group()
            assert group is not None
            counts = group.exchange(f"the length of {self._name}", own)
            self._cardinalities[own] = min(counts) if min(counts) < 0 else max(counts)
        return self._cardinalities[own]

    def reading(self, read: Callable[[Reader], HostBatch]) -> SynchronizedReading:
        """Starts another pass over the dataset; `read` returns this process's next batch."""
        self._num_readings += 1
        return SynchronizedReading(f"{self._name} ({self._num_readings})", self._topology, read)


class SynchronizedReading:
    """One pass over a dataset; `name` is the same on all processes."""

    def __init__(self, name: str, topology: Topology, read: Callable[[Reader], HostBatch]) -> None:
        group = current_group()
        assert group is not None
        self._name = name
        self._label = group.identity.label
        self._labels = group.identity.labels
        self._stream = group.stream(name)
        self._count = topology.num_local_replicas
        self._feeding = topology.processes_of_inputs
        self._read = read
        self._pattern: HostBatch | None = None  # Template for empty batches.
        self._has_ended = False

    def next(self, reader: Reader) -> HostBatch:
        """Returns the next batch with the lengths of all replicas.

        Raises StopIteration when all data has ended or this reading was closed here, RuntimeError
        if another process closed it, and InvalidArgumentError if this process has no data at all.
        """
        batch = None
        if not self._has_ended:
            try:
                batch = self._read(reader)
            except StopIteration:
                self._has_ended = True
        own = None if batch is None else (batch.size, batch.lengths)
        # A prefetching thread must not change the reported position of the main thread.
        is_main = threading.current_thread() is threading.main_thread()
        mark = waiting_for_input(self._name) if is_main else contextlib.nullcontext()
        with PeerSizesWait(wait_clock), mark:
            sizes = self._stream.exchange(own)
        if sizes is None or all(theirs is None for theirs in sizes):
            raise StopIteration
        self._require_same(sizes)
        sizes = [sizes[processes[0]] for processes in self._feeding]
        size = max(theirs[0] for theirs in sizes if theirs is not None)
        lengths: list[int] = []
        for theirs in sizes:
            none = (0,) * self._count
            lengths += none if theirs is None else theirs[1] or (theirs[0],) * self._count
        self._pattern = batch or self._pattern
        if self._pattern is None:
            raise self._no_data_error()
        parts: list[Any] = [None] * self._count if batch is None else batch.parts(self._count)
        if batch is None:
            parts[0] = self._pattern.rows(0, 0)
        return join_parts(parts, size=size, all_lengths=tuple(lengths))

    def give_up(self) -> None:
        """Closes the reading and wakes threads in `next`. Call from any thread, repeatedly."""
        self._stream.close()

    def _require_same(self, sizes: Sequence[Any]) -> None:
        """Raises InvalidArgumentError if processes that feed the same replicas read other data."""
        for first, *others in self._feeding:
            for other in others:
                if sizes[other] != sizes[first]:
                    raise InvalidArgumentError(
                        explain(
                            f"{self._labels[first]} read {_described(sizes[first])} of "
                            f"{self._name}, and {self._labels[other]} {_described(sizes[other])}.",
                            expected="the same data on both: their devices belong to one replica.",
                            fix="shard the data by the input_pipeline_id of the InputContext, "
                            "which is equal on both, and not by the number of the process.",
                        )
                    )

    def _no_data_error(self) -> InvalidArgumentError:
        return InvalidArgumentError(
            explain(
                f"{self._label} has no data in {self._name}, but other workers do.",
                expected="at least one batch on each worker: it defines the structure of its empty "
                "batches.",
                fix="give each worker some of the data, or use AutoShardPolicy.DATA.",
                code="SG308",
            )
        )


def _described(size: Any) -> str:
    return "no batch" if size is None else f"a batch of {size[0]} examples a replica"
