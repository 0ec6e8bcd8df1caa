"""`DistributedDataset`: global batches split over replicas, padded, and loaded ahead."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from stratagem.devices.lockstep import waiting_for_input
from stratagem.devices.mesh import Topology
from stratagem.errors import InvalidArgumentError, explain, invalid
from stratagem.group.current import current_group
from stratagem.input.batches import (
    HostBatch,
    batch_sizes_for_worker,
    join_parts,
    split_again,
    take_batch,
)
from stratagem.input.iterator import DistributedIterator, Loader, require_outside_replicas
from stratagem.input.placement import HostSteps, PlacedBatches, place
from stratagem.input.sources.sequences import ArraySource
from stratagem.input.sources.source import (
    BATCHES_PER_SNAPSHOT,
    ArraySpec,
    Reader,
    RepeatedReader,
    Source,
    check_count,
    checked_length,
    repeated_cardinality,
    require_shards,
)
from stratagem.observe.wait_clock import PeerSizesWait, wait_clock
from stratagem.options import AutoShardPolicy, InputContext, InputOptions
from stratagem.variables.distributed import PerReplica

if TYPE_CHECKING:
    from stratagem.contexts import StrategyParts


# Exchange of batch sizes between processes that read different data.
#
# Batch sizes are part of the program that all processes run, so each needs the sizes of all. A
# process without further data continues with empty batches until all data has ended. Processes that
# have replicas together must read the same data; their sizes are compared.

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


class DistributedDataset:
    """A dataset whose batches are split over the replicas of a strategy.

    Created by `Strategy.distribute_dataset` and `distribute_datasets_from_function`. Each iteration
    is one epoch. Use in cross-replica context.

    Args:
        strategy: strategy whose replicas share the batches.
        source: source of global batches; or of per-replica batches, assigned to replicas in turn;
            or a list of one source per replica.
        is_global: True for a source of global batches.
        options: how batches reach the devices, and how processes share the data.
        context: index and number of input pipelines; None for a single process.

    Example:
        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> dataset = strategy.distribute_dataset([np.arange(4), np.arange(3)])
        >>> for batch in dataset:
        ...     print(batch)
        PerReplica[[0 1] | [2 3]]
        PerReplica[[0 1] | [2]]

    Raises:
        ValueError: iterated in the coordinator of parameter servers.

    Source: TF 2.21 input_lib.py, DistributedDataset.
    """

    def __init__(
        self,
        strategy: StrategyParts,
        source: Source | list[Source],
        *,
        is_global: bool,
        options: InputOptions,
        context: InputContext | None = None,
    ) -> None:
        self._strategy = strategy
        self._source = source
        self._options = options
        self._shard: InputShard | None = None
        context = context or InputContext(num_replicas_in_sync=strategy.num_replicas_in_sync)
        if is_global:
            assert isinstance(source, Source)
            self._shard = InputShard.of(source, options.auto_shard_policy, context)
        # Processes that read different data exchange their batch sizes.
        reads_same_data = self._shard is not None and self._shard.is_whole
        # Arrays that all processes read, which `fit` compares.
        self.arrays_of_all: Any = None
        if reads_same_data and isinstance(source, ArraySource):
            self.arrays_of_all = source.arrays
        self._size_exchange: SizeExchange | None = None
        if strategy.topology.spans_processes and not reads_same_data:
            self._size_exchange = SizeExchange(strategy.topology)
        self._epoch = -1  # of the last iterator
        self._repeats: tuple[int | None, ...] = ()  # counts of `repeat`, innermost first

    def __iter__(self) -> DistributedIterator:
        if self._strategy.executor.schedules:
            raise invalid(
                "A distributed dataset was iterated in the coordinator of parameter servers.",
                expected="a dataset that each worker iterates, in a scheduled function.",
                fix="pass it to ClusterCoordinator.create_per_worker_dataset, and pass iter() "
                "of the result to scheduled functions. `fit` accepts the dataset itself.",
                code="SG611",
            )
        return self.begin()

    def begin(self) -> DistributedIterator:
        """Returns an iterator, also in a coordinator, where `fit` reads batches for workers."""
        return self._begin_with(DistributedIterator)

    def _begin_with(self, kind: type[DistributedIterator]) -> DistributedIterator:
        require_outside_replicas("A distributed dataset was iterated")
        self._epoch += 1
        return kind(self, self._epoch)

    @property
    def strategy(self) -> Any:
        """Strategy whose replicas share the batches."""
        return self._strategy

    @property
    def options(self) -> InputOptions:
        """Options of the transfer of batches to the devices."""
        return self._options

    @property
    def is_agreed_on(self) -> bool:
        """True if several processes read different data and exchange their batch sizes."""
        return self._size_exchange is not None

    @property
    def cardinality(self) -> int:
        """Number of steps per epoch; -1 if infinite, -2 if unknown."""
        count = functools.reduce(repeated_cardinality, self._repeats, self._own_cardinality())
        return count if self._size_exchange is None else self._size_exchange.cardinality(count)

    @property
    def order_follows_epoch(self) -> bool:
        """True if an epoch can be read without reading earlier ones."""
        if self._shard is not None:
            return self._shard.source.order_follows_epoch
        sources = self._source if isinstance(self._source, list) else [self._source]
        return all(source.order_follows_epoch for source in sources)

    def _own_cardinality(self) -> int:
        if self._shard is not None:
            return self._shard.cardinality
        if isinstance(self._source, list):
            counts = [source.cardinality for source in self._source]
            return min(counts) if min(counts) < 0 else max(counts)
        count = self._source.cardinality
        if count < 0:
            return count
        return -(-count // self._strategy.topology.num_local_replicas)

    def __len__(self) -> int:
        return checked_length(self.cardinality, "a distributed dataset")

    @property
    def element_spec(self) -> Any:
        """Shapes and dtypes per replica: pytree of `sg.input.ArraySpec`, with None as batch size.

        May read the first batch.
        """
        source = self._source[0] if isinstance(self._source, list) else self._source
        spec = source.element_spec()
        return jax.tree.map(_as_on_devices, spec) if self._options.fetch_to_device else spec

    def reduce(self, initial_state: object, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Folds a function over the batches of one epoch.

        Args:
            initial_state: state passed to the first call.
            reduce_func: takes the state and a batch, and returns the next state.

        Returns:
            The last state.

        Example:
            >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> dataset = strategy.distribute_dataset([np.arange(4), np.arange(3)])
            >>> dataset.reduce(0, lambda n, batch: n + int(strategy.reduce("sum", batch, axis=0)))
            9

        Source: TF 2.21 input_lib.py, DistributedDataset.reduce.
        """
        state = initial_state
        for batch in self:
            state = reduce_func(state, batch)
        return state

    def repeat(self, count: int | None = None) -> DistributedDataset:
        """Returns a dataset of several consecutive epochs of this one. Call on every process.

        Its batches are those of repeated iteration. If processes read different data, each starts
        its next epoch as soon as its own data has ended.

        Args:
            count: number of epochs; None or -1 repeats forever.

        Returns:
            The dataset.

        Raises:
            TypeError: `count` is not an int.
            ValueError: `count` is below -1.

        Example:
            >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> dataset = strategy.distribute_dataset([np.arange(4), np.arange(3)])
            >>> len(dataset.repeat(3))
            6

        Source: TF 2.21 dataset_ops.py, Dataset.repeat.
        """
        repeated = copy.copy(self)
        repeated._repeats = (*self._repeats, check_count(count))
        repeated._epoch = -1
        if self._size_exchange is not None:
            repeated._size_exchange = SizeExchange(self._strategy.topology)
        return repeated

    def make_loader(self, epoch: int, state: dict[str, Any] | None) -> Loader:
        """Opens an epoch, from 0, and returns its loader.

        `state` is the position of an iterator to resume from; None starts at the beginning.
        """
        open_epoch = self._open
        for count in self._repeats:
            open_epoch = functools.partial(RepeatedReader, open_epoch, count=count)
        reader, read = open_epoch(epoch), next
        if state is not None:
            reader.restore(state["source"])
            for _ in range(state["then_read"]):
                next(reader)
        give_up: Callable[[], None] | None = None
        if self._size_exchange is not None:
            reading = self._size_exchange.reading(read)
            read, give_up = reading.next, reading.give_up
        return self._loader(reader, read=read, give_up=give_up)

    def _loader(self, reader: Reader, **arguments: Any) -> Loader:
        return Loader(
            reader,
            topology=self._strategy.topology,
            to_device=self._options.fetch_to_device,
            can_seek=self._shard is not None and self._size_exchange is None,
            looks_ahead=self._options.per_replica_buffer_size > 0,
            **arguments,
        )

    def _open(self, epoch: int) -> Reader:
        """Opens one epoch, with one batch of all local replicas per step."""
        if self._shard is not None:
            return self._shard.open(epoch)
        if isinstance(self._source, list):
            return _ParallelReader([source.open(epoch) for source in self._source])
        num_replicas = self._strategy.topology.num_local_replicas
        return _ConsecutiveReader(self._source.open(epoch), num_replicas)

    def go_to_epoch(self, epoch: int) -> None:
        """Sets the epoch of a restored iterator; the next iterator reads the epoch after it."""
        self._epoch = epoch


def _as_on_devices(spec: ArraySpec) -> ArraySpec:
    return ArraySpec(spec.shape, jax.dtypes.canonicalize_dtype(spec.dtype))


class _StepReader(Reader):
    """Makes batches of those of another reader, and has its position."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.has_cheap_state = reader.has_cheap_state

    def state(self) -> Any:
        return self._reader.state()

    def restore(self, state: object) -> None:
        self._reader.restore(state)

    def close(self) -> None:
        self._reader.close()


class _ConsecutiveReader(_StepReader):
    """Joins one batch per replica; at the end of the data, the last replicas have none."""

    def __init__(self, reader: Reader, num_replicas: int) -> None:
        super().__init__(reader)
        self._num_replicas = num_replicas

    def read(self) -> HostBatch:
        parts = [next(self._reader)]
        parts += [next(self._reader, None) for _ in range(self._num_replicas - 1)]
        return join_parts(parts)


class _ParallelReader(Reader):
    """Joins the batches of one reader per replica; exhausted ones have none until all are."""

    def __init__(self, readers: list[Reader]) -> None:
        self._readers = readers
        self.has_cheap_state = all(reader.has_cheap_state for reader in readers)

    def read(self) -> Any:
        parts = [next(reader, None) for reader in self._readers]
        if all(part is None for part in parts):
            raise StopIteration
        return join_parts(parts)

    def state(self) -> Any:
        return [reader.state() for reader in self._readers]

    def restore(self, state: list[Any]) -> None:
        for reader, part in zip(self._readers, state, strict=True):
            reader.restore(part)

    def close(self) -> None:
        for reader in self._readers:
            reader.close()


# Datasets of an elastic group: read ahead on the host, and split where batches are used.

_ONE = Topology(None)


class ElasticDataset(DistributedDataset):
    """A dataset that all members read, of which each uses its rows of every batch."""

    def begin(self) -> DistributedIterator:
        """Returns an iterator over the next epoch."""
        return self._begin_with(_ElasticIterator)

    def _loader(self, reader: Reader, **arguments: Any) -> Loader:
        return Loader(reader, _undivided, _ONE, to_device=False, can_seek=True)


def _undivided(reader: Reader) -> HostBatch:
    batch: HostBatch = next(reader)
    whole = take_batch(batch.rows(0, batch.num_examples), 1)
    return dataclasses.replace(whole, is_undivided=True)


class _ElasticIterator(DistributedIterator):
    def take(self, num_steps: int) -> list[PlacedBatches]:
        """Returns the next batches, split over the present members; see `DistributedIterator`."""
        taken: list[PlacedBatches] = []
        while len(taken) < num_steps:
            try:
                [on_host] = super().take(1)
            except StopIteration:
                if taken:
                    break
                raise
            taken.append(_placed(take_batch(on_host.value(), 1), self.strategy))
        return taken


def _placed(batch: HostBatch, strategy: Any) -> PlacedBatches:
    own = split_again(batch, strategy.topology)
    placed = place([own], strategy.topology)
    fields: dict[str, Any] = vars(placed) | {"hosts": [own], "strategy": strategy}
    return _ElasticBatches(**fields)


@dataclasses.dataclass(frozen=True)
class _ElasticBatches(PlacedBatches):
    """Batches whose values can be split again."""

    strategy: Any = None

    def value(self) -> Any:
        """Returns the only batch; its leaves can be split over the members that are left."""
        value = super().value()
        paths, structure = jax.tree.flatten(value, is_leaf=_is_per_replica)
        leaves = [
            dataclasses.replace(leaf, split_again=lambda place=place: self._again(place))
            if isinstance(leaf, PerReplica)
            else leaf
            for place, leaf in enumerate(paths)
        ]
        return jax.tree.unflatten(structure, leaves)

    def _again(self, place: int) -> Any:
        value = _placed(self.hosts[0], self.strategy).value()
        return jax.tree.leaves(value, is_leaf=_is_per_replica)[place]


def _is_per_replica(leaf: object) -> bool:
    return isinstance(leaf, PerReplica)


# Sharding of a dataset over processes: by files, by hint, or by rows of each batch.


@dataclasses.dataclass(frozen=True)
class InputShard:
    """The part of a dataset of global batches that one process reads.

    `is_whole` is True if all processes read the same data and use their part of each batch.
    """

    source: Source
    context: InputContext
    is_whole: bool

    @classmethod
    def of(cls, source: Source, policy: AutoShardPolicy, context: InputContext) -> InputShard:
        """Selects a process's part of a dataset.

        Raises ValueError for an uneven number of replicas or a missing hint, and
        InvalidArgumentError for fewer files than processes.
        """
        count, index = context.num_input_pipelines, context.input_pipeline_id
        if context.num_replicas_in_sync % count:
            raise invalid(
                f"{context.num_replicas_in_sync} replicas do not divide evenly over {count} "
                "workers.",
                expected="the same number of replicas on each worker.",
                fix="give every worker the same number of devices.",
                code="SG510",
            )
        if count == 1:
            return cls(source, context, is_whole=True)
        if policy is AutoShardPolicy.AUTO:
            policy = source.auto_shard_policy
        if policy is AutoShardPolicy.AUTO:
            has_files = source.num_files is not None and source.num_files >= count
            policy = AutoShardPolicy.FILE if has_files else AutoShardPolicy.DATA
        if policy is AutoShardPolicy.DATA:
            return cls(source, context, is_whole=True)
        if policy is AutoShardPolicy.OFF:
            return cls(source, context, is_whole=False)
        hint = source.has_shard_hint
        require_shards(policy, count, num_files=source.num_files, has_shard_hint=hint)
        return cls(source.shard(count, index), context, is_whole=False)

    @property
    def num_local_replicas(self) -> int:
        """Number of replicas of this process."""
        return self.context.num_replicas_in_sync // self.context.num_input_pipelines

    @property
    def cardinality(self) -> int:
        """Number of steps per epoch; negative if infinite or unknown."""
        count = self.source.cardinality
        return count if self.is_whole or count < 0 else count * self.context.num_input_pipelines

    def open(self, epoch: int) -> Reader:
        """Opens an epoch; the reader returns a `HostBatch` of this process's replicas."""
        return (_OwnParts if self.is_whole else _CutBatches)(self, self.source.open(epoch))


class _OwnParts(_StepReader):
    """Splits each batch over all replicas and returns the parts of this process."""

    def __init__(self, shard: InputShard, reader: Reader) -> None:
        super().__init__(reader)
        self._shard = shard
        self.is_in_memory = reader.is_in_memory

    def read(self) -> HostBatch:
        return self._own_part(next(self._reader))

    def read_many(self, count: int, num_parts: int) -> tuple[HostSteps, int] | None:
        found = self._reader.next_many(count, self._shard.context.num_replicas_in_sync)
        if found is None:
            return None
        batches, number = found
        first = self._own_part(jax.tree.map(lambda array: array[0], batches))
        start = self._first_replica * first.size
        stop = start + self._shard.num_local_replicas * first.size
        arrays = [array[:, start:stop] for array in jax.tree.leaves(batches)]
        return HostSteps(first, arrays, number), number

    @property
    def _first_replica(self) -> int:
        return self._shard.context.input_pipeline_id * self._shard.num_local_replicas

    def _own_part(self, data: object) -> HostBatch:
        context = self._shard.context
        batch = take_batch(data, context.num_replicas_in_sync)
        if context.num_input_pipelines == 1:
            return batch
        return batch.of_replicas(self._first_replica, self._shard.num_local_replicas)


class _CutBatches(Reader):
    """Cuts each of this process's batches into steps of all processes.

    A batch of B examples lasts for as many steps as there are processes, which together use B
    examples per step.
    """

    def __init__(self, shard: InputShard, reader: Reader) -> None:
        self._shard = shard
        self._reader = reader
        self._steps: list[HostBatch] = []  # remaining steps of the current batch
        self._snapshot: Any = None  # Source state, `_num_since` steps ago.
        self._num_since = 0
        self._is_stateless = False
        self._take_snapshot()

    def read(self) -> HostBatch:
        if not self._steps:
            interval = 1 if self._reader.has_cheap_state else BATCHES_PER_SNAPSHOT
            if self._num_since >= interval * self._shard.context.num_input_pipelines:
                self._take_snapshot()
            self._steps = self._cut(take_batch(next(self._reader), 1))
        self._num_since += 1
        return self._steps.pop(0)

    def _take_snapshot(self) -> None:
        if self._is_stateless:
            return
        try:
            self._snapshot, self._num_since = self._reader.state(), 0
        except NotImplementedError:
            self._is_stateless = True

    def _cut(self, batch: HostBatch) -> list[HostBatch]:
        context, count = self._shard.context, self._shard.num_local_replicas
        sizes = batch_sizes_for_worker(
            batch.num_examples, context.num_input_pipelines, count, context.input_pipeline_id
        )
        starts = itertools.accumulate(sizes, initial=0)
        parts = [
            batch.rows(start, start + size) for start, size in zip(starts, sizes, strict=False)
        ]
        return [
            join_parts(parts[first : first + count], size=max(sizes))
            for first in range(0, len(parts), count)
        ]

    def state(self) -> Any:
        if self._is_stateless:
            return self._reader.state()  # Raises an error with the reason.
        return {"source": self._snapshot, "then_read": self._num_since}

    def restore(self, state: dict[str, Any]) -> None:
        self._reader.restore(state["source"])
        self._steps.clear()
        self._take_snapshot()
        for _ in range(state["then_read"]):
            self.read()

    def close(self) -> None:
        self._reader.close()
