"""`sg.input.Dataset`: batches of any source, distributed when iterated in a strategy's scope."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from stratagem import contexts as stack
from stratagem.errors import check_type, invalid
from stratagem.input.sources.adapters import GeneratorSource, as_source, batched_source, every_nth
from stratagem.input.sources.source import (
    SHARD_HINT,
    FileSource,
    HintSource,
    RepeatedSource,
    Source,
    check_count,
    checked_length,
)


class Dataset:
    """Batches of any source; within a strategy's scope, batches for all its replicas.

    Iterated in cross-replica context under a strategy, it yields the batches of that strategy's
    `distribute_dataset`. Elsewhere it yields plain batches as NumPy arrays.

    Args:
        source: with `batch_size`, examples: a pytree of arrays with examples on axis 0, a Grain
            `MapDataset`, a Hugging Face or Ray `Dataset`, or an object with `len()` and `[]` that
            returns one example. Without it, batches: anything `distribute_dataset` accepts.
        batch_size: global batch size, in examples of all replicas per step.
        shuffle: reorders the examples in each epoch.
        seed: seed of the order; equal seeds give equal orders in all processes.
        drop_remainder: drops a short last batch. Not required: every batch size works.

    Raises:
        TypeError: the source is not supported.
        ValueError: batching options without `batch_size`, `batch_size` below 1, arrays of
            different lengths, or unbatched arrays.

    Example:
        >>> dataset = sg.input.Dataset(np.arange(5), batch_size=2)
        >>> [batch.tolist() for batch in dataset]
        [[0, 1], [2, 3], [4]]
        >>> with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        ...     print(next(iter(dataset)))
        PerReplica[[0] | [1]]

    Source: TF 2.0's roadmap for tf.distribute, "datasets distributed when iterated in scope".
    """

    def __init__(
        self,
        source: object,
        *,
        batch_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_remainder: bool = False,
    ) -> None:
        self._batching: dict[str, Any] | None = None
        if batch_size is None:
            if shuffle or drop_remainder:
                raise invalid(
                    f"shuffle={shuffle} and drop_remainder={drop_remainder} were passed "
                    "without batch_size.",
                    expected="batch_size with them, or a source that shuffles and batches.",
                    fix="pass batch_size and a source of examples.",
                )
            self._source = as_source(source)
        else:
            self._batching = {
                "batch_size": batch_size,
                "shuffle": shuffle,
                "seed": seed,
                "drop_remainder": drop_remainder,
            }
            self._source = batched_source(source, **self._batching)
        self._examples = source
        self._epoch = -1
        self._distributed: tuple[Any, Any] | None = None

    @classmethod
    def from_files(cls, files: Sequence[Any], make: Callable[[list[Any]], Any]) -> Dataset:
        """Creates a dataset from files, which processes can shard by file (AutoShardPolicy.FILE).

        Args:
            files: file names, in the same order in every process.
            make: takes a list of files and returns a dataset of global batches, of any kind that
                `distribute_dataset` accepts, such as a Grain pipeline.

        Returns:
            The dataset. A single process passes all files to `make`.

        Raises:
            ValueError: `files` is empty.

        Example:
            >>> lines = {"a": [1, 2, 3], "b": [4, 5]}
            >>> dataset = sg.input.Dataset.from_files(
            ...     ["a", "b"], lambda files: [np.array(lines[file]) for file in files]
            ... )
            >>> [batch.tolist() for batch in dataset]
            [[1, 2, 3], [4, 5]]

        Source: TF 2.21 data/ops/options.py, AutoShardPolicy.FILE.
        """
        return cls(FileSource(files, lambda some: as_source(make(some))))

    @classmethod
    def from_generator(
        cls, generator: Callable[..., Iterable[Any]], args: Iterable[Any] = ()
    ) -> Dataset:
        """Creates a dataset from a generator function, called once per epoch.

        To resume within an epoch, the function is called and earlier batches are skipped, so it
        must yield the same batches again.

        Args:
            generator: returns an iterable of global batches.
            args: positional arguments of the function.

        Returns:
            The dataset, of unknown length.

        Raises:
            TypeError: `generator` is not callable, such as a generator object.

        Example:
            >>> def batches(count):
            ...     for i in range(count):
            ...         yield np.full(2, i)
            >>> dataset = sg.input.Dataset.from_generator(batches, args=(2,))
            >>> [batch.tolist() for batch in dataset], [batch.tolist() for batch in dataset]
            ([[0, 0], [1, 1]], [[0, 0], [1, 1]])

        Source: TF 2.21 dataset_ops.py, Dataset.from_generator.
        """
        wanted = "a function that returns an iterable of batches"
        how = "pass the function, not its result: from_generator(batches)."
        check_type("generator", generator, callable, wanted, how, owner="from_generator")
        return cls(GeneratorSource(lambda: generator(*args)))

    def repeat(self, count: int | None = None) -> Dataset:
        """Returns a dataset of several consecutive epochs of this one.

        A shuffling source reorders each epoch. A short last batch of an epoch stays short.

        Args:
            count: number of epochs; None or -1 repeats forever.

        Returns:
            The dataset.

        Raises:
            TypeError: `count` is not an int.
            ValueError: `count` is below -1.

        Example:
            >>> dataset = sg.input.Dataset(np.arange(3), batch_size=2)
            >>> [batch.tolist() for batch in dataset.repeat(2)]
            [[0, 1], [2], [0, 1], [2]]

        Source: TF 2.21 dataset_ops.py, Dataset.repeat.
        """
        return Dataset(RepeatedSource(self._source, check_count(count)))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Returns a dataset of every `num_shards`th example, taken before shuffling and batching.

        Args:
            num_shards: number of shards.
            index: index of the shard, from 0. If both are `sg.input.SHARD_HINT`, the strategy
                fills them in (AutoShardPolicy.HINT).

        Returns:
            The dataset.

        Raises:
            ValueError: a number is out of range, or the dataset was made from batches.

        Example:
            >>> dataset = sg.input.Dataset(np.arange(6), batch_size=2)
            >>> [batch.tolist() for batch in dataset.shard(2, index=1)]
            [[1, 3], [5]]

        Source: TF 2.21 dataset_ops.py, Dataset.shard.
        """
        if self._batching is None:
            raise invalid(
                "shard was called on a dataset made from batches, or already sharded by hint.",
                expected="a dataset made from examples, with batch_size.",
                fix="shard the examples before batching them.",
            )
        examples, batching = self._examples, self._batching
        if num_shards == index == SHARD_HINT:
            return Dataset(
                HintSource(lambda n, i: batched_source(every_nth(examples, n, i), **batching))
            )
        return Dataset(every_nth(examples, num_shards, index), **batching)

    def apply(self, transformation_func: Callable[[Dataset], Dataset]) -> Dataset:
        """Returns what a function makes of this dataset, so that calls can be chained.

        Args:
            transformation_func: takes the dataset and returns another one.

        Returns:
            The other dataset.

        Raises:
            TypeError: the function returns something else.

        Example:
            >>> dataset = sg.input.Dataset(np.arange(3), batch_size=2)
            >>> [batch.tolist() for batch in dataset.apply(lambda dataset: dataset.repeat(2))]
            [[0, 1], [2], [0, 1], [2]]

        Source: TF 2.21 dataset_ops.py, Dataset.apply.
        """
        dataset = transformation_func(self)
        check_type("the result of transformation_func", dataset, Dataset)
        return dataset

    def as_source(self) -> Source:
        """Returns the source of the batches."""
        return self._source

    @property
    def cardinality(self) -> int:
        """Number of batches per epoch; -1 (infinite) or -2 (unknown) as in TensorFlow."""
        return self._source.cardinality

    def __len__(self) -> int:
        return checked_length(self.cardinality, "a dataset")

    @property
    def element_spec(self) -> Any:
        """Shapes and dtypes of a batch: pytree of `sg.input.ArraySpec`, with None as batch size."""
        return self._source.element_spec()

    def __iter__(self) -> Iterator[Any]:
        frame = stack.current_frame()
        if frame is None:
            self._epoch += 1
            return self._source.open(self._epoch)
        if self._distributed is None or self._distributed[0] is not frame.strategy:
            self._distributed = frame.strategy, frame.strategy.distribute_dataset(self)
        return iter(self._distributed[1])
