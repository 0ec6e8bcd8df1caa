"""Selects the adapter that reads a dataset, batches its examples, or shards them."""

from __future__ import annotations

import base64
import importlib
import itertools
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, cast

import jax
import numpy as np

from stratagem.errors import explain, invalid
from stratagem.input.sources.sequences import (
    ArraySource,
    PyDatasetSource,
    RowSource,
    SequenceSource,
)
from stratagem.input.sources.source import (
    UNKNOWN_CARDINALITY,
    ArraySpec,
    Reader,
    Source,
    not_resumable_error,
    spec_of,
)
from stratagem.options import AutoShardPolicy

# Sources of iterables: generators, stateful iterators, iterable objects.


# State methods of iterators of other libraries.
_STATE_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


class IterableSource(Source):
    """An object that returns a new iterator over batches each time."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches
        self._latest: _IteratorReader | None = None

    @property
    def cardinality(self) -> int:
        """Number of batches if the object has a length, else unknown."""
        try:
            return len(self._batches)  # pyright: ignore[reportArgumentType]
        except TypeError:
            return UNKNOWN_CARDINALITY

    def open(self, epoch: int) -> Reader:
        """Opens an iterator; raises ValueError for the same, exhausted iterator."""
        iterator, before = iter(self._batches), self._latest
        is_continued = before is not None and before.iterator is iterator
        self._latest = _IteratorReader(iterator, self._batches, before if is_continued else None)
        return self._latest


class GeneratorSource(Source):
    """A function that returns an iterable of batches, called once per epoch."""

    @property
    def is_repeatable(self) -> bool:
        """True: `from_generator` asks for a function that yields the same batches again."""
        return True

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self._make = make

    def open(self, epoch: int) -> Reader:
        """Calls the function."""
        return _GeneratorReader(iter(self._make()))


class _BatchReader(Reader):
    """Reads an iterator over batches, and closes it if it can be."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator

    def read(self) -> Any:
        return next(self._iterator)

    def close(self) -> None:
        if callable(close := getattr(self._iterator, "close", None)):
            close()


class _GeneratorReader(_BatchReader):
    """Reads a generator; resumes by reading earlier batches again."""

    def read(self) -> Any:
        return _copied(next(self._iterator))


class OneShotSource(Source):
    """An iterator or generator, which cannot be rewound: each epoch continues the last."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._iterator = batches
        self._batches = batches
        self._latest: _IteratorReader | None = None

    def element_spec(self) -> Any:
        """Returns the `ArraySpec`s of the first batch, without consuming it; None if empty."""
        for first in self._batches:
            self._batches = itertools.chain([_copied(first)], self._batches)
            return spec_of(first)
        return None

    def open(self, epoch: int) -> Reader:
        """Continues reading; raises ValueError at the first batch if none is left."""
        self._latest = _IteratorReader(self._batches, self._iterator, before=self._latest)
        return self._latest


class _IteratorReader(Reader):
    """Reads an iterator.

    `origin` returned the iterator and may have the state methods that the iterator lacks. `before`
    is the reader of the same iterator in an earlier epoch.
    """

    has_cheap_state = False

    def __init__(
        self, iterator: Iterator[Any], origin: Iterable[Any], before: _IteratorReader | None = None
    ) -> None:
        self.iterator = iterator
        self._origin = origin
        # Only the count: a chain of readers would grow by one per epoch.
        self._num_before = 0 if before is None else before.num_taken
        self.num_taken = self._num_before

    def read(self) -> Any:
        try:
            batch = next(self.iterator)
        except StopIteration:
            if self.num_taken == self._num_before > 0:
                raise _used_up(self._origin, self._num_before) from None
            raise
        self.num_taken += 1
        return _copied(batch)

    def state(self) -> Any:
        owner, names = self._stateful()
        return getattr(owner, names[0])()

    def restore(self, state: object) -> None:
        owner, names = self._stateful()
        getattr(owner, names[1])(state)
        if owner is not self.iterator and owner is self._origin:
            self.iterator = iter(self._origin)
        self.num_taken = self._num_before = 0  # A state may also rewind the iterator.

    def _stateful(self) -> tuple[Any, tuple[str, str]]:
        for owner in (self.iterator, self._origin):
            for names in _STATE_METHODS:
                if all(callable(getattr(owner, name, None)) for name in names):
                    return owner, names
        raise not_resumable_error(
            f"an object of type {type(self._origin).__name__}",
            fix="give it get_state() and set_state(state), or use one of these sources.",
        )

    def close(self) -> None:
        close = getattr(self.iterator, "close", None)  # Runs a generator's `finally`.
        if callable(close) and self.iterator is not self._origin:
            close()


def _used_up(origin: object, num_taken: int) -> ValueError:
    return invalid(
        f"The dataset cannot be read again: it is an object of type "
        f"{type(origin).__name__}, which ended after {num_taken} batches.",
        expected="data that can be read from the start in each epoch; generators and "
        "iterators can be read only once.",
        fix="pass the function that creates it: sg.input.Dataset.from_generator(function).",
        code="SG303",
    )


def _copied(batch: object) -> Any:
    """Copies a batch, because its source may reuse the arrays."""
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, batch)


# Sources of Ray Data: datasets that Ray's executor reads and prepares, without importing it.


class RayDataSource(Source):
    """Batches of a `ray.data.Dataset` or `ray.data.DataIterator`, as dicts of arrays by column.

    Ray decides on the order, which may change from epoch to epoch. `shuffle` reorders all rows.
    """

    def __init__(
        self,
        dataset: Any,
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
            raise invalid(
                "shuffle=True was passed with a Ray DataIterator.",
                expected="a Dataset, whose rows Ray can reorder.",
                fix="call random_shuffle() of the Dataset before it is split.",
            )

    @property
    def auto_shard_policy(self) -> AutoShardPolicy:
        """OFF for a `DataIterator`, which has the rows of one process.

        Raises ValueError for a `Dataset`: its order may differ between processes.
        """
        if self._is_split:
            return AutoShardPolicy.OFF
        raise invalid(
            "A ray.data.Dataset was passed to a strategy of several processes.",
            expected="an iterator for each process: Ray has no fixed order to divide by.",
            fix="pass ray.train.get_dataset_shard(name), or dataset.streaming_split(n)[index].",
        )

    def open(self, epoch: int) -> Reader:
        """Opens an epoch; Ray executes the dataset again."""
        dataset: Any = self._dataset
        if self._seed is not None:
            dataset = dataset.random_shuffle(seed=self._seed + epoch)
        return _RayReader(iter(dataset.iter_batches(batch_format="numpy", **self._batching)))

    def __reduce__(self) -> NoReturn:
        raise TypeError("Ray's own executor reads a ray.data.Dataset on other machines")


class _RayReader(_BatchReader):
    def read(self) -> Any:
        return dict(next(self._iterator))

    def state(self) -> NoReturn:
        raise not_resumable_error(
            "a dataset of Ray Data",
            fix="train whole epochs, or write the rows to files and use sg.input.Dataset of these.",
        )

    def restore(self, state: object) -> NoReturn:
        self.state()


def unbatched_ray_data(dataset: object) -> NoReturn:
    """Raises ValueError: a dataset of Ray Data has rows, not batches."""
    raise invalid(
        f"An object of type {type(dataset).__name__} of Ray Data was passed as a dataset.",
        expected="a dataset of batches.",
        fix="batch its rows: sg.input.Dataset(dataset, batch_size=64).",
        code="SG301",
    )


# Sources for datasets of Grain, tf.data, PyTorch and Hugging Face, without importing these.


def is_of(dataset: object, package: str, *names: str) -> bool:
    """Returns True if an object's class or a base class has one of these names in a package."""
    return any(
        cls.__module__.split(".")[0] == package and cls.__name__ in names
        for cls in type(dataset).__mro__
    )


class GrainIterSource(Source):
    """A `grain.IterDataset` of batches, with its worker processes."""

    @property
    def order_follows_epoch(self) -> bool:
        """True."""
        return True

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def open(self, epoch: int) -> Reader:
        """Opens the dataset, which shuffles by itself."""
        return _GrainReader(_open_iterator(self._dataset))


class GrainMapSource(GrainIterSource):
    """A `grain.MapDataset` of batches, reshuffled in each epoch."""

    can_seek = True

    @property
    def cardinality(self) -> int:
        """Number of batches."""
        return len(self._dataset)

    def open(self, epoch: int) -> Reader:
        """Opens an epoch."""
        return self.open_at(epoch, 0)

    def open_at(self, epoch: int, first: int) -> Reader:
        """Opens an epoch at a batch number."""
        # Grain reseeds its shuffles only for repetitions.
        dataset = self._dataset.repeat(epoch + 1) if epoch else self._dataset
        if begin := len(self._dataset) * epoch + first:
            dataset = dataset[begin:]
        return _GrainReader(_open_iterator(dataset.to_iter_dataset()))


def _open_iterator(dataset: Iterable[Any]) -> Any:
    """Returns an iterator; marks absl's flags as parsed, which Grain's workers require."""
    flags = importlib.import_module("absl.flags").FLAGS
    if not flags.is_parsed():
        flags.mark_as_parsed()
    return iter(dataset)


class _GrainReader(_BatchReader):
    has_cheap_state = False

    def state(self) -> Any:
        iterator: Any = self._iterator
        return iterator.get_state()

    def restore(self, state: object) -> None:
        iterator: Any = self._iterator
        iterator.set_state(state)


class TensorFlowSource(Source):
    """A `tf.data.Dataset` of batches."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    @property
    def cardinality(self) -> int:
        """Number of batches; TensorFlow uses the same numbers for infinite and unknown."""
        return int(self._dataset.cardinality())

    @property
    def auto_shard_policy(self) -> AutoShardPolicy:
        """Policy in the dataset's `tf.data.Options`."""
        policy = self._dataset.options().experimental_distribute.auto_shard_policy
        return AutoShardPolicy(int(policy))

    def element_spec(self) -> Any:
        """Returns the `ArraySpec`s of a batch without reading data."""

        def spec(leaf: Any) -> Any:
            return ArraySpec((None, *leaf.shape.as_list()[1:]), leaf.dtype.as_numpy_dtype)

        return jax.tree.map(spec, self._dataset.element_spec)

    def open(self, epoch: int) -> Reader:
        """Opens the dataset, which shuffles by itself."""
        return _TensorFlowReader(self._dataset)


class _TensorFlowReader(Reader):
    """Reads batches as NumPy arrays.

    The state is TensorFlow's iterator state at the start plus a count: later iterator states
    include whole buffers of examples.
    """

    def __init__(self, dataset: Any) -> None:
        self._tf = importlib.import_module("tensorflow")
        self._iterator = iter(dataset)
        self._beginning: dict[str, str] | None = None

    def read(self) -> Any:
        if self._beginning is None:
            self._beginning = self._save()
        return jax.tree.map(np.asarray, next(self._iterator))

    def _save(self) -> dict[str, str]:
        with tempfile.TemporaryDirectory() as folder:
            self._tf.train.Checkpoint(iterator=self._iterator).write(f"{folder}/iterator")
            return {
                file.name: base64.b64encode(file.read_bytes()).decode()
                for file in pathlib.Path(folder).iterdir()
            }

    def state(self) -> Any:
        if self._beginning is None:
            self._beginning = self._save()
        return {"num_read": self.num_read, "beginning": self._beginning}

    def restore(self, state: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for name, text in state["beginning"].items():
                pathlib.Path(folder, name).write_bytes(base64.b64decode(text))
            self._tf.train.Checkpoint(iterator=self._iterator).read(f"{folder}/iterator")
        self._beginning = state["beginning"]
        super().restore(state)


class HuggingFaceStreamSource(IterableSource):
    """A `datasets.IterableDataset` of batches, with a known number of files."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        self._dataset = dataset
        self.num_files = dataset.num_shards

    def shard(self, num_shards: int, index: int) -> Source:
        """Returns every `num_shards`th file from `index` on."""
        return HuggingFaceStreamSource(self._dataset.shard(num_shards, index, contiguous=False))


class TorchLoaderSource(IterableSource):
    """A `torch.utils.data.DataLoader`; without a length, if its dataset has none."""

    def open(self, epoch: int) -> Reader:
        """Opens the loader, which shuffles by itself."""
        return _TorchReader(self._batches)


class _TorchReader(Reader):
    """Reads a loader; resumes by reading earlier batches again, in the order of its generator."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._beginning = self._generator_state()
        self._iterator = iter(loader)

    def _generator_state(self) -> str | None:
        generator = self._loader.generator
        if generator is None:
            return None
        return base64.b64encode(np.asarray(generator.get_state()).tobytes()).decode()

    def read(self) -> Any:
        return jax.tree.map(np.asarray, next(self._iterator))

    def state(self) -> Any:
        if self._beginning is None and not is_of(
            self._loader.sampler, "torch", "SequentialSampler"
        ):
            raise not_resumable_error(
                "a torch DataLoader that draws its order from PyTorch's global random state",
                fix="give it a generator: DataLoader(..., generator=torch.Generator()), or use "
                "torchdata's StatefulDataLoader.",
            )
        return {"num_read": self.num_read, "generator": self._beginning}

    def restore(self, state: dict[str, Any]) -> None:
        if state["generator"] is not None:
            torch = importlib.import_module("torch")
            raw = np.frombuffer(base64.b64decode(state["generator"]), np.uint8).copy()
            self._loader.generator.set_state(torch.from_numpy(raw))
            self._iterator = iter(self._loader)
            self._beginning = state["generator"]
        super().restore(state)


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
        raise invalid(
            f"Unbatched arrays were passed as a dataset, in {_kind(dataset)}.",
            expected="a dataset of batches.",
            fix="batch the arrays: sg.input.Dataset(arrays, batch_size=64, shuffle=True).",
            code="SG301",
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
        raise invalid(
            f"shard received num_shards={num_shards} and index={index}.",
            expected="0 <= index < num_shards, or SHARD_HINT for both.",
            fix="pass an index from 0 to num_shards - 1.",
        )
    if _is_arrays(examples):
        return jax.tree.map(lambda leaf: leaf[index::num_shards], examples)
    if is_of(examples, "grain", "MapDataset"):
        return examples[index::num_shards]
    if is_of(examples, "datasets", "Dataset"):
        return examples.shard(num_shards, index, contiguous=False)
    return _EveryNth(examples, num_shards, index)


class _EveryNth:
    """A strided selection of the examples of an indexable object."""

    def __init__(self, examples: Any, num_shards: int, index: int) -> None:
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


def _stacked(examples: Any, rows: slice | np.ndarray) -> Any:
    numbers = range(*rows.indices(len(examples))) if isinstance(rows, slice) else rows.tolist()
    return jax.tree.map(lambda *parts: np.stack(parts), *[examples[number] for number in numbers])


def _is_leaf(value: object) -> bool:
    return not isinstance(value, dict | tuple | list)
