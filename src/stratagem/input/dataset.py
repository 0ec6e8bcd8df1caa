"""sg.input.Dataset: a dataset that distributes itself when it is iterated in a scope."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from stratagem.context import stack
from stratagem.input.sources import (
    SHARD_HINT,
    FileSource,
    GeneratorSource,
    HintSource,
    RepeatedSource,
    Source,
    as_source,
    batched_source,
    check_count,
    every_nth,
)
from stratagem.messages import explain

__all__ = ["Dataset"]


class Dataset:
    """Batches of any source; in the scope of a strategy, of all its replicas.

    Iterated in cross-replica context under a strategy it yields what `distribute_dataset` of that
    strategy yields; elsewhere plain batches, as NumPy arrays.

    Args:
        source: with `batch_size`, examples: a pytree of arrays with the examples on axis 0, a Grain
            `MapDataset`, a Hugging Face `Dataset`, or an object with `len()` and `[]` that gives
            one example. Without, batches: whatever `distribute_dataset` takes.
        batch_size: examples of all replicas in a step.
        shuffle: a new order of the examples in each epoch.
        seed: of the order; the same seed gives the same orders in every process.
        drop_remainder: leave out a last batch that is short. There is no need to.

    Raises:
        TypeError: a source of another kind.
        ValueError: options of batching without `batch_size`, or one below 1; arrays that do not
            agree in length, or that are not batched.

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
        source: Any,
        *,
        batch_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_remainder: bool = False,
    ) -> None:
        self._batching: dict[str, Any] | None = None
        if batch_size is None:
            if shuffle or drop_remainder:
                raise ValueError(
                    explain(
                        f"shuffle={shuffle} and drop_remainder={drop_remainder} were given without "
                        "batch_size.",
                        expected="batch_size beside them, or a source that shuffles and batches.",
                        fix="pass batch_size and a source of examples.",
                    )
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
        """Makes a dataset of files that several processes can share (AutoShardPolicy.FILE).

        Args:
            files: their names, in the same order in every process.
            make: given some of the files, returns a dataset of batches of the global batch size,
                whatever `distribute_dataset` takes: a Grain pipeline, for example.

        Returns:
            The dataset. In one process `make` gets all files.

        Raises:
            ValueError: no files.

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
    def from_generator(cls, generator: Callable[..., Iterable[Any]], args: Any = ()) -> Dataset:
        """Makes a dataset of the batches of a generator function, called for each epoch.

        A loop that goes on from the middle calls the function and passes over the batches before,
        so that it has to yield the same ones.

        Args:
            generator: returns an iterable of batches of the global batch size.
            args: positional arguments of the function.

        Returns:
            The dataset. Its length is not known.

        Raises:
            TypeError: a generator itself, or anything else that cannot be called.

        Example:
            >>> def batches(count):
            ...     for i in range(count):
            ...         yield np.full(2, i)
            >>> dataset = sg.input.Dataset.from_generator(batches, args=(2,))
            >>> [batch.tolist() for batch in dataset], [batch.tolist() for batch in dataset]
            ([[0, 0], [1, 1]], [[0, 0], [1, 1]])

        Source: TF 2.21 dataset_ops.py, Dataset.from_generator.
        """
        if not callable(generator):
            raise TypeError(
                explain(
                    f"from_generator received {generator!r} of type {type(generator).__name__}.",
                    expected="a function that returns an iterable of batches.",
                    fix="pass the function and not what it returns: from_generator(batches).",
                )
            )
        return cls(GeneratorSource(lambda: generator(*args)))

    def repeat(self, count: int | None = None) -> Dataset:
        """Returns a dataset of several epochs of this one, one after the other.

        A source that shuffles does so anew in each. The last batch of an epoch stays as short as
        it is.

        Args:
            count: how many epochs; None or -1 for a dataset without end.

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
        """Returns a dataset of every `num_shards`th example, before they are shuffled and batched.

        Args:
            num_shards: how many parts.
            index: which of them, from 0. `sg.input.SHARD_HINT` for both lets whoever distributes
                the dataset choose (AutoShardPolicy.HINT).

        Returns:
            The dataset.

        Raises:
            ValueError: numbers out of range, or a dataset that was made of batches.

        Example:
            >>> dataset = sg.input.Dataset(np.arange(6), batch_size=2)
            >>> [batch.tolist() for batch in dataset.shard(2, index=1)]
            [[1, 3], [5]]

        Source: TF 2.21 dataset_ops.py, Dataset.shard.
        """
        if self._batching is None:
            raise ValueError(
                explain(
                    "shard was called on a dataset that was made of batches, or has its hint.",
                    expected="one that was made of examples, with batch_size.",
                    fix="shard the examples before they are batched.",
                )
            )
        examples, batching = self._examples, self._batching
        if num_shards == index == SHARD_HINT:
            return Dataset(
                HintSource(lambda n, i: batched_source(every_nth(examples, n, i), **batching))
            )
        return Dataset(every_nth(examples, num_shards, index), **batching)

    def as_source(self) -> Source:
        """Returns the source of the batches."""
        return self._source

    @property
    def cardinality(self) -> int:
        """Batches of an epoch; -1 if it has no end, -2 if that is not known."""
        return self._source.cardinality

    def __len__(self) -> int:
        count = self.cardinality
        if count < 0:
            raise TypeError(
                explain(
                    "len() of a dataset whose length is not known.",
                    expected="a source that tells how many batches it has.",
                    fix="count batches yourself, or ask .cardinality, which is negative then.",
                )
            )
        return count

    @property
    def element_spec(self) -> Any:
        """Shapes and dtypes of a batch: pytree of `sg.input.ArraySpec`, batch axis None."""
        return self._source.element_spec()

    def __iter__(self) -> Iterator[Any]:
        frame = stack.current_frame()
        if frame is None:
            self._epoch += 1
            return self._source.open(self._epoch)
        if self._distributed is None or self._distributed[0] is not frame.strategy:
            self._distributed = frame.strategy, frame.strategy.distribute_dataset(self)
        return iter(self._distributed[1])
