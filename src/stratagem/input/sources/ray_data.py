"""Sources of Ray Data: datasets that Ray's executor reads and prepares, without importing it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NoReturn, Protocol

from stratagem.input.sources.source import Reader, Source, not_resumable_error
from stratagem.messages import explain
from stratagem.options import AutoShardPolicy


class _RayDataset(Protocol):
    """A `ray.data.Dataset`, or a `DataIterator` of one process."""

    def iter_batches(self, **options: Any) -> Iterable[Any]: ...


class RayDataSource(Source):
    """Batches of a `ray.data.Dataset` or `ray.data.DataIterator`, as dicts of arrays by column.

    Ray decides on the order, which may change from epoch to epoch. `shuffle` reorders all rows.
    """

    def __init__(
        self,
        dataset: _RayDataset,
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        drop_remainder: bool,
    ) -> None:
        self._dataset = dataset
        self._is_split = not hasattr(dataset, "random_shuffle")
        self._batching = {"batch_size": batch_size, "drop_last": drop_remainder}
        self._seed = seed if shuffle else None
        if shuffle and self._is_split:
            raise ValueError(
                explain(
                    "shuffle=True was passed with a Ray DataIterator.",
                    expected="a Dataset, whose rows Ray can reorder.",
                    fix="call random_shuffle() of the Dataset before it is split.",
                )
            )

    @property
    def auto_shard_policy(self) -> AutoShardPolicy:
        """OFF for a `DataIterator`, which has the rows of one process.

        Raises ValueError for a `Dataset`: its order may differ between processes.
        """
        if self._is_split:
            return AutoShardPolicy.OFF
        raise ValueError(
            explain(
                "A ray.data.Dataset was passed to a strategy of several processes.",
                expected="an iterator for each process: Ray has no fixed order to divide by.",
                fix="pass ray.train.get_dataset_shard(name), or dataset.streaming_split(n)[index].",
            )
        )

    def open(self, epoch: int) -> Reader:
        """Opens an epoch; Ray executes the dataset again."""
        dataset: Any = self._dataset
        if self._seed is not None:
            dataset = dataset.random_shuffle(seed=self._seed + epoch)
        return _RayReader(iter(dataset.iter_batches(batch_format="numpy", **self._batching)))

    def __reduce__(self) -> NoReturn:
        raise TypeError("Ray's own executor reads a ray.data.Dataset on other machines")


class _RayReader(Reader):
    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def read(self) -> Any:
        return dict(next(self._batches))

    def state(self) -> NoReturn:
        raise not_resumable_error(
            "a dataset of Ray Data",
            fix="train whole epochs, or write the rows to files and use sg.input.Dataset of these.",
        )

    def restore(self, state: object) -> NoReturn:
        self.state()


def unbatched_ray_data(dataset: object) -> NoReturn:
    """Raises ValueError: a dataset of Ray Data has rows, not batches."""
    raise ValueError(
        explain(
            f"An object of type {type(dataset).__name__} of Ray Data was passed as a dataset.",
            expected="a dataset of batches.",
            fix="batch its rows: sg.input.Dataset(dataset, batch_size=64).",
            code="SG301",
        )
    )
