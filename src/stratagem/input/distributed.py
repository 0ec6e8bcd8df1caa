"""`DistributedDataset`: global batches split over replicas, padded, and loaded ahead."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from stratagem.input.batches import HostBatch, join_parts
from stratagem.input.iterator import DistributedIterator, require_outside_replicas
from stratagem.input.loader import Loader
from stratagem.input.sharding import InputShard
from stratagem.input.size_exchange import SizeExchange
from stratagem.input.sources.array_spec import ArraySpec
from stratagem.input.sources.arrays import ArraySource
from stratagem.input.sources.repeated import RepeatedReader, check_count, repeated_cardinality
from stratagem.input.sources.source import INFINITE_CARDINALITY, Reader, Source
from stratagem.messages import explain
from stratagem.options import InputContext, InputOptions

if TYPE_CHECKING:
    from stratagem.contexts import StrategyParts


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
            raise ValueError(
                explain(
                    "A distributed dataset was iterated in the coordinator of parameter servers.",
                    expected="a dataset that each worker iterates, in a scheduled function.",
                    fix="pass it to ClusterCoordinator.create_per_worker_dataset, and pass iter() "
                    "of the result to scheduled functions. `fit` accepts the dataset itself.",
                    code="SG611",
                )
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
        count = self.cardinality
        if count < 0:
            length = "infinite" if count == INFINITE_CARDINALITY else "unknown"
            raise TypeError(
                explain(
                    f"len() was called on a distributed dataset of {length} length.",
                    expected="a source with a length.",
                    fix="count steps yourself, or read .cardinality, which is negative here.",
                    code="SG309",
                )
            )
        return count

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
        reader, read = open_epoch(epoch), _next_batch
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
            return _StepReader(
                _ParallelReader([source.open(epoch) for source in self._source]), _join_next
            )
        count = self._strategy.topology.num_local_replicas
        return _StepReader(
            self._source.open(epoch), functools.partial(_join_consecutive, num_replicas=count)
        )

    def go_to_epoch(self, epoch: int) -> None:
        """Sets the epoch of a restored iterator; the next iterator reads the epoch after it."""
        self._epoch = epoch


def _as_on_devices(spec: ArraySpec) -> ArraySpec:
    return ArraySpec(spec.shape, jax.dtypes.canonicalize_dtype(spec.dtype))


def _next_batch(reader: Reader) -> HostBatch:
    """Returns the next batch, which is already split."""
    return next(reader)


def _join_next(reader: Reader) -> HostBatch:
    """Joins the next batch of each replica's reader."""
    return join_parts(next(reader))


def _join_consecutive(reader: Reader, num_replicas: int) -> HostBatch:
    """Joins one batch per replica; at the end of the data, the last replicas have none."""
    parts = [next(reader)]
    while len(parts) < num_replicas:
        parts.append(next(reader, None))
    return join_parts(parts)


class _StepReader(Reader):
    """Reads per-replica batches and joins them into steps."""

    def __init__(self, reader: Reader, read: Callable[[Reader], HostBatch]) -> None:
        self._reader = reader
        self._read = read
        self.has_cheap_state = reader.has_cheap_state

    def read(self) -> HostBatch:
        return self._read(self._reader)

    def state(self) -> Any:
        return self._reader.state()

    def restore(self, state: object) -> None:
        self._reader.restore(state)

    def close(self) -> None:
        self._reader.close()


class _ParallelReader(Reader):
    """One reader per replica; exhausted ones yield None until all are exhausted."""

    def __init__(self, readers: list[Reader]) -> None:
        self._readers = readers
        self.has_cheap_state = all(reader.has_cheap_state for reader in readers)

    def read(self) -> Any:
        parts = [next(reader, None) for reader in self._readers]
        if all(part is None for part in parts):
            raise StopIteration
        return parts

    def state(self) -> Any:
        return [reader.state() for reader in self._readers]

    def restore(self, state: list[Any]) -> None:
        for reader, part in zip(self._readers, state, strict=True):
            reader.restore(part)

    def close(self) -> None:
        for reader in self._readers:
            reader.close()
