"""Selects the adapter that reads a dataset, batches its examples, or shards them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, cast

import jax
import numpy as np

from stratagem.input.sources.arrays import ArraySource, RowSource
from stratagem.input.sources.iterables import IterableSource, OneShotSource
from stratagem.input.sources.libraries import (
    GrainIterSource,
    GrainMapSource,
    HuggingFaceStreamSource,
    TensorFlowSource,
    TorchLoaderSource,
    is_of,
)
from stratagem.input.sources.ray_data import RayDataSource, unbatched_ray_data
from stratagem.input.sources.sequences import PyDatasetSource, SequenceSource
from stratagem.input.sources.source import Source
from stratagem.messages import explain


def as_source(dataset: object) -> Source:
    """Returns the source that reads a dataset of batches.

    Supports Sources, tf.data, Grain and Hugging Face datasets, torch DataLoaders, Keras PyDatasets,
    and any iterable of batches. Raises TypeError for other objects and ValueError for unbatched
    arrays.
    """
    if isinstance(dataset, Source):
        return dataset
    if callable(own := getattr(dataset, "as_source", None)):  # An sg.input.Dataset.
        return cast("Source", own())
    if _is_arrays(dataset):
        raise ValueError(
            explain(
                f"Unbatched arrays were passed as a dataset, in {_kind(dataset)}.",
                expected="a dataset of batches.",
                fix="batch the arrays: sg.input.Dataset(arrays, batch_size=64, shuffle=True).",
                code="SG301",
            )
        )
    for fits, make in _ADAPTERS:
        if fits(dataset):
            return make(dataset)
    if callable(dataset):
        raise TypeError(
            explain(
                f"The function {dataset!r} was passed as a dataset.",
                expected="an iterable of batches.",
                fix="wrap the function, so that it is called in each epoch: "
                "sg.input.Dataset.from_generator(function).",
            )
        )
    raise TypeError(
        explain(
            f"{dataset!r} of type {type(dataset).__name__} was passed as a dataset.",
            expected="an iterable of batches: sg.input.Dataset, Grain, tf.data, a torch "
            "DataLoader, Hugging Face, Keras PyDataset, a generator or a list.",
            fix="convert the data to one of these.",
        )
    )


_RAY_DATA = ("Dataset", "DataIterator")

# The first match wins: objects of a library are often iterables too.
_ADAPTERS: tuple[tuple[Callable[[Any], bool], Callable[[Any], Source]], ...] = (
    (lambda d: is_of(d, "grain", "MapDataset"), GrainMapSource),
    (lambda d: is_of(d, "grain", "IterDataset"), GrainIterSource),
    (lambda d: is_of(d, "tensorflow", "DatasetV2"), TensorFlowSource),
    (
        lambda d: is_of(d, "torch", "DataLoader") and not hasattr(d, "state_dict"),
        TorchLoaderSource,
    ),
    (lambda d: is_of(d, "datasets", "Dataset"), lambda d: SequenceSource(d.with_format("numpy"))),
    (
        lambda d: is_of(d, "datasets", "IterableDataset"),
        lambda d: HuggingFaceStreamSource(d.with_format("numpy")),
    ),
    (lambda d: is_of(d, "ray", *_RAY_DATA), unbatched_ray_data),
    (
        lambda d: all(hasattr(d, name) for name in ("num_batches", "__getitem__", "on_epoch_end")),
        PyDatasetSource,
    ),
    (lambda d: isinstance(d, list), SequenceSource),
    (lambda d: isinstance(d, Iterator), OneShotSource),
    (lambda d: isinstance(d, Iterable), IterableSource),
)


def batched_source(
    examples: Any, *, batch_size: int, shuffle: bool, seed: int, drop_remainder: bool
) -> Source:
    """Returns a source that batches examples.

    `examples` is a pytree of arrays with examples on axis 0, a Grain, Hugging Face or Ray dataset,
    or an object with `len()` and `[]`; other objects raise TypeError.
    """
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "shuffle": shuffle,
        "seed": seed,
        "drop_remainder": drop_remainder,
    }
    if _is_arrays(examples):
        return ArraySource(examples, **options)
    if is_of(examples, "grain", "MapDataset"):
        dataset = examples.shuffle(seed) if shuffle else examples
        return GrainMapSource(dataset.batch(batch_size, drop_remainder=drop_remainder))
    if is_of(examples, "datasets", "Dataset"):
        formatted = examples.with_format("numpy")
        return RowSource(lambda rows: formatted[rows], len(examples), **options)
    if is_of(examples, "ray", *_RAY_DATA):
        return RayDataSource(examples, **options)
    if hasattr(examples, "__len__") and hasattr(examples, "__getitem__"):
        return RowSource(lambda rows: _stacked(examples, rows), len(examples), **options)
    raise TypeError(
        explain(
            f"batch_size={batch_size} was passed with {_kind(examples)}, which cannot be indexed.",
            expected="arrays, a Grain MapDataset, a Hugging Face or Ray Dataset, or an object "
            "with len() and [].",
            fix="batch it with its own library and omit batch_size.",
        )
    )


def every_nth(examples: Any, num_shards: int, index: int) -> Any:
    """Returns every `num_shards`th example from `index` on, for `batched_source`."""
    if num_shards < 1 or not 0 <= index < num_shards:
        raise ValueError(
            explain(
                f"shard received num_shards={num_shards} and index={index}.",
                expected="0 <= index < num_shards, or SHARD_HINT for both.",
                fix="pass an index from 0 to num_shards - 1.",
            )
        )
    if _is_arrays(examples):
        return jax.tree.map(lambda leaf: leaf[index::num_shards], examples)
    if is_of(examples, "grain", "MapDataset"):
        return examples[index::num_shards]
    if is_of(examples, "datasets", "Dataset"):
        return examples.shard(num_shards, index, contiguous=False)
    return _EveryNth(examples, num_shards, index)


class _Indexable(Protocol):
    """Examples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...


class _EveryNth:
    """A strided selection of the examples of an indexable object."""

    def __init__(self, examples: _Indexable, num_shards: int, index: int) -> None:
        self._examples = examples
        self._numbers = range(index, len(examples), num_shards)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: int) -> Any:
        return self._examples[self._numbers[number]]


def _kind(value: object) -> str:
    return f"an object of type {type(value).__name__}"


def _is_arrays(value: object) -> bool:
    """Returns True for an array or a pytree of arrays. A list contains batches or examples."""
    if isinstance(value, dict):
        return True
    if not isinstance(value, tuple):
        return isinstance(value, np.ndarray | jax.Array)
    leaves = jax.tree.leaves(value, is_leaf=_is_leaf)
    return bool(leaves) and all(
        isinstance(leaf, np.ndarray | np.generic | jax.Array) for leaf in leaves
    )


def _stacked(examples: _Indexable, rows: slice | np.ndarray) -> Any:
    numbers = range(*rows.indices(len(examples))) if isinstance(rows, slice) else rows.tolist()
    return jax.tree.map(lambda *parts: np.stack(parts), *[examples[number] for number in numbers])


def _is_leaf(value: object) -> bool:
    return not isinstance(value, dict | tuple | list)
