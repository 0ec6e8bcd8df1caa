"""sg.input.Dataset: a dataset that distributes itself when it is iterated in a scope."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stratagem.context import stack
from stratagem.input.sources import Source, as_source, batched_source
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
            self._source = batched_source(
                source,
                batch_size=batch_size,
                shuffle=shuffle,
                seed=seed,
                drop_remainder=drop_remainder,
            )
        self._epoch = -1
        self._distributed: tuple[Any, Any] | None = None

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
        """Shapes and dtypes of a batch: pytree of `jax.ShapeDtypeStruct`, batch axis None."""
        return self._source.element_spec()

    def __iter__(self) -> Iterator[Any]:
        frame = stack.current_frame()
        if frame is None:
            self._epoch += 1
            return self._source.open(self._epoch)
        if self._distributed is None or self._distributed[0] is not frame.strategy:
            self._distributed = frame.strategy, frame.strategy.distribute_dataset(self)
        return iter(self._distributed[1])
