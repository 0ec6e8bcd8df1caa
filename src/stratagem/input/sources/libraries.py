"""Sources for datasets of Grain, tf.data, PyTorch and Hugging Face, without importing these."""

from __future__ import annotations

import base64
import importlib
import pathlib
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import jax
import numpy as np

from stratagem.input.sources.array_spec import ArraySpec
from stratagem.input.sources.iterables import IterableSource
from stratagem.input.sources.source import UNKNOWN_CARDINALITY, Reader, Source, not_resumable_error
from stratagem.options import AutoShardPolicy


class _GrainMapDataset(Protocol):
    """A `grain.MapDataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, batches: slice, /) -> Any: ...

    def repeat(self, num_epochs: int, /) -> Any: ...

    def to_iter_dataset(self) -> Iterable[Any]: ...


class _GrainIterator(Protocol):
    """A `grain.DatasetIterator`."""

    def __next__(self) -> Any: ...

    def get_state(self) -> Any: ...

    def set_state(self, state: Any, /) -> None: ...


class _TensorFlowDataset(Protocol):
    """A `tf.data.Dataset`."""

    @property
    def element_spec(self) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...

    def cardinality(self) -> Any: ...

    def options(self) -> Any: ...


class _HuggingFaceStream(Protocol):
    """A `datasets.IterableDataset`."""

    @property
    def num_shards(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...

    def shard(self, num_shards: int, index: int, *, contiguous: bool) -> _HuggingFaceStream: ...


class _TorchLoader(Protocol):
    """A `torch.utils.data.DataLoader`."""

    generator: Any
    sampler: Any

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...


def is_of(dataset: object, package: str, *names: str) -> bool:
    """Returns True if an object's class or a base class has one of these names in a package."""
    return any(
        cls.__module__.split(".")[0] == package and cls.__name__ in names
        for cls in type(dataset).__mro__
    )


class GrainMapSource(Source):
    """A `grain.MapDataset` of batches, reshuffled in each epoch."""

    @property
    def order_follows_epoch(self) -> bool:
        """True."""
        return True

    @property
    def can_seek(self) -> bool:
        """True."""
        return True

    def __init__(self, dataset: _GrainMapDataset) -> None:
        self._dataset = dataset

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


class GrainIterSource(Source):
    """A `grain.IterDataset` of batches, with its worker processes."""

    @property
    def order_follows_epoch(self) -> bool:
        """True."""
        return True

    def __init__(self, dataset: Iterable[Any]) -> None:
        self._dataset = dataset

    def open(self, epoch: int) -> Reader:
        """Opens the dataset, which shuffles by itself."""
        return _GrainReader(_open_iterator(self._dataset))


def _open_iterator(dataset: Iterable[Any]) -> Any:
    """Returns an iterator; marks absl's flags as parsed, which Grain's workers require."""
    flags = importlib.import_module("absl.flags").FLAGS
    if not flags.is_parsed():
        flags.mark_as_parsed()
    return iter(dataset)


class _GrainReader(Reader):
    has_cheap_state = False

    def __init__(self, iterator: _GrainIterator) -> None:
        self._iterator = iterator

    def read(self) -> Any:
        return next(self._iterator)

    def state(self) -> Any:
        return self._iterator.get_state()

    def restore(self, state: object) -> None:
        self._iterator.set_state(state)

    def close(self) -> None:
        close = getattr(self._iterator, "close", None)
        if callable(close):
            close()


class TensorFlowSource(Source):
    """A `tf.data.Dataset` of batches."""

    def __init__(self, dataset: _TensorFlowDataset) -> None:
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

    def __init__(self, dataset: _TensorFlowDataset) -> None:
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

    def __init__(self, dataset: _HuggingFaceStream) -> None:
        super().__init__(dataset)
        self._dataset = dataset

    @property
    def num_files(self) -> int:
        """Number of files or other shards of the dataset."""
        return self._dataset.num_shards

    def shard(self, num_shards: int, index: int) -> Source:
        """Returns every `num_shards`th file from `index` on."""
        return HuggingFaceStreamSource(self._dataset.shard(num_shards, index, contiguous=False))


class TorchLoaderSource(Source):
    """A `torch.utils.data.DataLoader`."""

    def __init__(self, loader: _TorchLoader) -> None:
        self._loader = loader

    @property
    def cardinality(self) -> int:
        """Number of batches; unknown for an iterable-style dataset without a length."""
        try:
            return len(self._loader)
        except TypeError:
            return UNKNOWN_CARDINALITY

    def open(self, epoch: int) -> Reader:
        """Opens the loader, which shuffles by itself."""
        return _TorchReader(self._loader)


class _TorchReader(Reader):
    """Reads a loader; resumes by reading earlier batches again, in the order of its generator."""

    def __init__(self, loader: _TorchLoader) -> None:
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
