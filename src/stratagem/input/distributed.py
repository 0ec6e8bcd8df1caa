"""Distributed datasets: batches of all replicas, split, padded and moved ahead of time."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import jax

from stratagem.input.agreement import Agreement
from stratagem.input.batches import HostBatch, join_parts
from stratagem.input.iterator import DistributedIterator, require_outside_replicas
from stratagem.input.loader import Loader
from stratagem.input.sharding import Shard
from stratagem.input.sources import (
    INFINITE_CARDINALITY,
    ArraySpec,
    Reader,
    RepeatedReader,
    Source,
    check_count,
    repeated_cardinality,
)
from stratagem.messages import explain
from stratagem.options import InputContext, InputOptions

__all__ = ["DistributedDataset"]


class DistributedDataset:
    """A dataset whose batches are split over the replicas of a strategy.

    Made by `Strategy.distribute_dataset` and `distribute_datasets_from_function`. It can be
    iterated again and again; each time is an epoch. Use in cross-replica context.

    Args:
        strategy: whose replicas share the batches.
        source: of global batches; or of batches of one replica, which replicas take in turn; or,
            as a list, one source a replica.
        is_global: whether the batches of the source are of all replicas.
        options: how batches reach the devices, and how processes share them.
        context: which process of how many reads here; None for the only one.

    Example:
        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> dataset = strategy.distribute_dataset([np.arange(4), np.arange(3)])
        >>> for batch in dataset:
        ...     print(batch)
        PerReplica[[0 1] | [2 3]]
        PerReplica[[0 1] | [2]]

    Raises:
        ValueError: it is iterated in the coordinator of parameter servers.

    Source: TF 2.21 input_lib.py, DistributedDataset.
    """

    def __init__(
        self,
        strategy: Any,
        source: Source | list[Source],
        *,
        is_global: bool,
        options: InputOptions,
        context: InputContext | None = None,
    ) -> None:
        self._strategy = strategy
        self._source = source
        self._options = options
        self._shard: Shard | None = None
        context = context or InputContext(num_replicas_in_sync=strategy.num_replicas_in_sync)
        if is_global:
            assert isinstance(source, Source)
            self._shard = Shard.of(source, options.auto_shard_policy, context)
        # Where each process reads something else, they tell each other how much it was.
        reads_alike = self._shard is not None and self._shard.is_whole
        self._agreement: Agreement | None = None
        if strategy.topology.spans_processes and not reads_alike:
            self._agreement = Agreement(strategy.topology.num_local_replicas)
        self._epoch = -1  # of the iterator that was made last
        self._repeats: tuple[int | None, ...] = ()  # counts of `repeat`, the innermost first

    def __iter__(self) -> DistributedIterator:
        if self._strategy.executor.schedules:
            raise ValueError(
                explain(
                    "A distributed dataset was iterated in the coordinator of parameter servers.",
                    expected="a dataset that each worker iterates, in a scheduled function.",
                    fix="pass it to ClusterCoordinator.create_per_worker_dataset, and iter() of "
                    "the result to the functions; `fit` takes the dataset as it is.",
                )
            )
        return self.begin()

    def begin(self) -> DistributedIterator:
        """Returns an iterator, also in a coordinator: `fit` reads there, and sends batches."""
        require_outside_replicas("A distributed dataset was iterated")
        self._epoch += 1
        return DistributedIterator(self, self._epoch)

    @property
    def strategy(self) -> Any:
        """The strategy whose replicas share the batches."""
        return self._strategy

    @property
    def options(self) -> InputOptions:
        """How batches reach the devices."""
        return self._options

    @property
    def is_agreed_on(self) -> bool:
        """Whether several processes read different data and tell each other how much."""
        return self._agreement is not None

    @property
    def cardinality(self) -> int:
        """Steps of an epoch; -1 if it has no end, -2 if that is not known."""
        count = functools.reduce(repeated_cardinality, self._repeats, self._own_cardinality())
        return count if self._agreement is None else self._agreement.cardinality(count)

    @property
    def order_follows_epoch(self) -> bool:
        """Whether an epoch can be read that no others were read before."""
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
            known = "has no end" if count == INFINITE_CARDINALITY else "is not known"
            raise TypeError(
                explain(
                    f"len() of a distributed dataset whose length {known}.",
                    expected="a source that tells how many batches it has.",
                    fix="count steps yourself, or ask .cardinality, which is negative then.",
                )
            )
        return count

    @property
    def element_spec(self) -> Any:
        """Shapes and dtypes of the parts: pytree of `sg.input.ArraySpec`, batch axis None.

        The first batch may be read to find out.
        """
        source = self._source[0] if isinstance(self._source, list) else self._source
        spec = source.element_spec()
        return jax.tree.map(_as_on_devices, spec) if self._options.fetch_to_device else spec

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Folds a function over the batches of an epoch.

        Args:
            initial_state: what `reduce_func` is first called with.
            reduce_func: given the state and a batch, returns the next state.

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
        """Returns a dataset of several epochs of this one, one after the other.

        Its batches are those of iterating this one again and again. Where processes read
        different data, each begins its own anew as soon as it has ended. Call on every process.

        Args:
            count: how many epochs; None or -1 for a dataset without end.

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
        if self._agreement is not None:
            repeated._agreement = Agreement(self._strategy.topology.num_local_replicas)
        return repeated

    def make_loader(self, epoch: int, state: Any) -> Loader:
        """Opens the source.

        Args:
            epoch: from 0.
            state: of an iterator, to go on from; None for the beginning.

        Returns:
            What reads it and moves its batches.
        """
        open_epoch = self._open
        for count in self._repeats:
            open_epoch = functools.partial(RepeatedReader, open_epoch, count=count)
        reader, read = open_epoch(epoch), _as_is
        if state is not None:
            reader.restore(state["source"])
            for _ in range(state["then_read"]):
                next(reader)
        give_up: Callable[[], None] | None = None
        if self._agreement is not None:
            reading = self._agreement.reading(read)
            read, give_up = reading.next, reading.give_up
        return Loader(
            reader,
            read,
            self._strategy.topology,
            to_device=self._options.fetch_to_device,
            can_seek=self._shard is not None and self._agreement is None,
            give_up=give_up,
        )

    def _open(self, epoch: int) -> Reader:
        """Begins to read one epoch, step by step."""
        if self._shard is not None:
            return self._shard.open(epoch)
        if isinstance(self._source, list):
            return _Steps(
                _ParallelReader([source.open(epoch) for source in self._source]), _together
            )
        count = self._strategy.topology.num_local_replicas
        return _Steps(self._source.open(epoch), functools.partial(_in_turn, num_replicas=count))

    def go_to_epoch(self, epoch: int) -> None:
        """Says which epoch an iterator that was restored is in: the next one follows it.

        Args:
            epoch: from 0.
        """
        self._epoch = epoch


def _as_on_devices(spec: Any) -> Any:
    return ArraySpec(spec.shape, jax.dtypes.canonicalize_dtype(spec.dtype))


def _as_is(reader: Reader) -> HostBatch:
    """One batch that is split already."""
    return next(reader)


def _together(reader: Reader) -> HostBatch:
    """One batch of each replica's own reader."""
    return join_parts(next(reader))


def _in_turn(reader: Reader, num_replicas: int) -> HostBatch:
    """One batch a replica; the last replicas have none when the data ends."""
    parts = [next(reader)]
    while len(parts) < num_replicas:
        parts.append(next(reader, None))
    return join_parts(parts)


class _Steps(Reader):
    """Reads the batches of all replicas of this process from those of single replicas."""

    def __init__(self, reader: Reader, read: Callable[[Reader], HostBatch]) -> None:
        self._reader = reader
        self._read = read
        self.has_cheap_state = reader.has_cheap_state

    def read(self) -> HostBatch:
        return self._read(self._reader)

    def state(self) -> Any:
        return self._reader.state()

    def restore(self, state: Any) -> None:
        self._reader.restore(state)

    def close(self) -> None:
        self._reader.close()


class _ParallelReader(Reader):
    """One reader a replica; those that have ended give None until all have."""

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

    def restore(self, state: Any) -> None:
        for reader, part in zip(self._readers, state, strict=True):
            reader.restore(part)

    def close(self) -> None:
        for reader in self._readers:
            reader.close()
