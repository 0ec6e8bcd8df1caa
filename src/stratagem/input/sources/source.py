"""Base classes `Source` and `Reader`: batches read epoch by epoch, with resumable positions."""

from __future__ import annotations

import abc
import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from stratagem.errors import InvalidArgumentError, check_type, explain, invalid
from stratagem.options import AutoShardPolicy

# `ArraySpec`: shape and dtype of batches with an open batch size.


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of an array; None stands for an unknown size.

    `ShapeDtypeStruct` of JAX 0.12 and later rejects None.

    Args:
        shape: size of each axis, or None.
        dtype: dtype of the elements.

    Example:
        >>> sg.input.Dataset(np.zeros((5, 2), "float32"), batch_size=2).element_spec
        ArraySpec(shape=(None, 2), dtype=dtype('float32'))

    Source: TF 2.21 framework/tensor.py, TensorSpec.
    """

    shape: tuple[int | None, ...]
    dtype: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(self.dtype))


def spec_of(batch: object) -> Any:
    """Returns the `ArraySpec`s of a batch, with None as batch size."""

    def spec(leaf: Any) -> ArraySpec:
        array = leaf if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else np.asarray(leaf)
        return ArraySpec((None, *tuple(array.shape)[1:]), np.asarray(array[:0]).dtype)

    return jax.tree.map(spec, batch)


# Interval between reads of an expensive state; resuming reads the batches since then again.
BATCHES_PER_SNAPSHOT = 32
INFINITE_CARDINALITY = -1
UNKNOWN_CARDINALITY = -2


class Reader(abc.ABC):
    """Reads a source once from start to end, in one thread at a time.

    `num_read` counts batches, including skipped ones. `has_cheap_state` is True if the state may be
    read after every batch. `is_in_memory` is True if the next batch is
    ready at once, even if those before it were not used yet.
    """

    num_read: int = 0
    has_cheap_state: bool = True
    is_in_memory: bool = False
    _has_ended: bool = False

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> Any:
        if self._has_ended:  # Do not read past the end.
            raise StopIteration
        try:
            batch = self.read()
        except StopIteration:
            self._has_ended = True
            raise
        self.num_read += 1
        return batch

    @abc.abstractmethod
    def read(self) -> Any:
        """Returns the next batch, a pytree of arrays; raises StopIteration at the end."""

    def next_many(self, count: int, num_parts: int) -> tuple[Any, int] | None:
        """Returns the next batches of one shape at once, and their number, `count` or fewer.

        Arrays have shape (steps, B, ...), with B a multiple of `num_parts`. Returns None if the
        next batch has to be read on its own.
        """
        batches = self.read_many(count, num_parts)
        if batches is not None:
            self.num_read += batches[1]
        return batches

    def read_many(self, count: int, num_parts: int) -> tuple[Any, int] | None:
        """Reads for `next_many`; by default, batches are read one by one."""
        return None

    def state(self) -> Any:
        """Returns the position after the last batch as JSON, for `restore` of another reader.

        Raises NotImplementedError if the source cannot be resumed.
        """
        return {"num_read": self.num_read}

    def restore(self, state: Any) -> None:
        """Resumes from a state; by default, reads earlier batches again."""
        for _ in range(state["num_read"]):
            next(self)

    def close(self) -> None:  # noqa: B027 - most readers have no resources
        """Releases processes, threads and files."""


class Source(abc.ABC):
    """A dataset of batches.

    `can_seek` is True if `open_at` reads none of the batches before the first, and `has_shard_hint`
    if there is a shard hint to fill in. `num_files` is None without files, or if their number is
    unknown.
    """

    can_seek: bool = False
    has_shard_hint: bool = False
    num_files: int | None = None

    @property
    def order_follows_epoch(self) -> bool:
        """True if the epoch number determines the order of an epoch."""
        return False

    @property
    def is_repeatable(self) -> bool:
        """True if an epoch that is opened again has the same batches, in any process."""
        return self.order_follows_epoch

    @property
    def cardinality(self) -> int:
        """Number of batches, or `INFINITE_CARDINALITY` or `UNKNOWN_CARDINALITY`."""
        return UNKNOWN_CARDINALITY

    @property
    def auto_shard_policy(self) -> AutoShardPolicy:
        """Sharding policy that the dataset itself specifies."""
        return AutoShardPolicy.AUTO

    def shard(self, num_shards: int, index: int) -> Source:
        """Returns every `num_shards`th file from `index` on, or fills in a hint."""
        raise NotImplementedError  # Only file and hint sources are sharded.

    @abc.abstractmethod
    def open(self, epoch: int) -> Reader:
        """Opens an epoch, from 0; sources that shuffle by themselves ignore the number."""

    def open_at(self, epoch: int, first: int) -> Reader:
        """Opens an epoch at a batch number."""
        reader = self.open(epoch)
        reader.restore({"num_read": first})
        return reader

    def element_spec(self) -> Any:
        """Returns the `ArraySpec`s of a batch, or None without data. May read one batch."""
        reader = self.open(0)
        try:
            return spec_of(next(reader, None))
        finally:
            reader.close()


def not_resumable_error(kind: str, *, fix: str) -> NotImplementedError:
    """Returns the error for a source that cannot be resumed."""
    return NotImplementedError(
        explain(
            f"The position in {kind} cannot be saved.",
            expected="a source that can be resumed: sg.input.Dataset of arrays or files, Grain, "
            "tf.data, PyDataset, a list of batches, or an iterator with get_state and set_state.",
            fix=fix,
            code="SG310",
        )
    )


def checked_length(count: int, what: str) -> int:
    """Returns a cardinality as a length; raises TypeError if it is infinite or unknown."""
    if count < 0:
        length = "infinite" if count == INFINITE_CARDINALITY else "unknown"
        raise TypeError(
            explain(
                f"len() was called on {what} of {length} length.",
                expected="a source with a length.",
                fix="count batches yourself, or read .cardinality, which is negative here.",
                code="SG309",
            )
        )
    return count


class SourceOf(Source):
    """A source that is what another one is, but for what its subclass says."""

    @property
    @abc.abstractmethod
    def once(self) -> Source:
        """The other source."""

    @property
    def order_follows_epoch(self) -> bool:
        """Same as the other source."""
        return self.once.order_follows_epoch

    @property
    def is_repeatable(self) -> bool:
        """Same as the other source."""
        return self.once.is_repeatable

    @property
    def cardinality(self) -> int:
        """Number of batches of the other source."""
        return self.once.cardinality

    def open(self, epoch: int) -> Reader:
        """Opens the other source."""
        return self.once.open(epoch)


# Sources that can be sharded: files, and datasets with a shard hint.

SHARD_HINT = -1


def require_shards(
    policy: enum.Enum, count: int | None, *, num_files: int | None, has_shard_hint: bool
) -> None:
    """Raises an error if data cannot be divided into `count` shards by a policy, HINT or FILE.

    None is the number of input workers, which take one file after the other.
    """
    name = f"{type(policy).__name__}.{policy.name}"
    if policy.name == "HINT" and not has_shard_hint:
        raise invalid(
            f"{name} was set for a dataset without a shard hint.",
            expected="a dataset sharded with SHARD_HINT.",
            fix="call dataset.shard(sg.input.SHARD_HINT, sg.input.SHARD_HINT), or use "
            f"{type(policy).__name__}.DATA.",
            code="SG307",
        )
    if policy.name == "FILE" and (num_files is None or num_files < (count or 1)):
        found = "no known files" if num_files is None else f"{num_files} files"
        raise InvalidArgumentError(
            explain(
                f"{name} was set for {count or 'input'} workers and a dataset with {found}.",
                expected="a dataset of files." if count is None else f"{count} files or more.",
                fix="create the dataset with sg.input.Dataset.from_files, write more files, or "
                f"use {type(policy).__name__}.DATA.",
                code="SG307",
            )
        )


class FileSource(SourceOf):
    """A dataset that a function creates from a list of files."""

    def __init__(self, files: Sequence[Any], make: Callable[[list[Any]], Source]) -> None:
        if not files:
            raise invalid(
                "The list of files is empty.",
                expected="one or more files.",
                fix="check the glob pattern or folder that lists them.",
            )
        self.files = list(files)
        self.num_files = len(self.files)
        self._make = make
        self._source: Source | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the dataset of the files: it may hold all that they contain."""
        return {**vars(self), "_source": None}

    def shard(self, num_shards: int, index: int) -> Source:
        """Returns every `num_shards`th file from `index` on."""
        return FileSource(self.files[index::num_shards], self._make)

    @property
    def is_repeatable(self) -> bool:
        """True: files have the same contents each time, and a function must shuffle them alike."""
        return True

    @property
    def once(self) -> Source:
        """The dataset of the files."""
        if self._source is None:
            self._source = self._make(list(self.files))
        return self._source


class HintSource(SourceOf):
    """A dataset with a shard hint, created from the number of shards and the index."""

    has_shard_hint = True

    def __init__(self, make: Callable[[int, int], Source]) -> None:
        self._make = make
        self._whole: Source | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the unsharded dataset."""
        return {**vars(self), "_whole": None}

    def shard(self, num_shards: int, index: int) -> Source:
        """Fills in the hint."""
        return self._make(num_shards, index)

    @property
    def once(self) -> Source:
        """The unsharded dataset."""
        if self._whole is None:
            self._whole = self._make(1, 0)
        return self._whole


# Sources that repeat another source, one epoch after the other.


def check_count(count: Any) -> int | None:
    """Returns a valid repeat count, or None to repeat forever."""
    how = "pass the number of epochs."
    check_type("count", count, int | None, "an int, or None to repeat forever", how, owner="repeat")
    if count is None:
        return None
    if count < -1:
        raise invalid(
            f"repeat received count={count}.",
            expected="0 or more; None or -1 to repeat forever.",
            fix=how,
        )
    return None if count == -1 else count


def repeated_cardinality(cardinality: int, count: int | None) -> int:
    """Returns the length of a repeated dataset, with TensorFlow's rules for unknown lengths.

    Source: TF 2.21 core/kernels/data/repeat_dataset_op.cc, CardinalityInternal.
    """
    if count is None:
        return INFINITE_CARDINALITY if cardinality else 0
    return cardinality if count and cardinality < 0 else cardinality * count


class RepeatedSource(SourceOf):
    """A source repeated `count` times, or forever if None.

    Its epoch e starts at epoch e * count of the source.
    """

    def __init__(self, source: Source, count: int | None) -> None:
        self._source = source
        self.count = count
        self.has_shard_hint, self.num_files = source.has_shard_hint, source.num_files

    @property
    def once(self) -> Source:
        """The source that is repeated."""
        return self._source

    @property
    def cardinality(self) -> int:
        """Number of batches of all repetitions."""
        return repeated_cardinality(self._source.cardinality, self.count)

    @property
    def auto_shard_policy(self) -> AutoShardPolicy:
        """Same as the source."""
        return self._source.auto_shard_policy

    def shard(self, num_shards: int, index: int) -> Source:
        """Returns the repeated shard of the source."""
        return RepeatedSource(self._source.shard(num_shards, index), self.count)

    def element_spec(self) -> Any:
        """Same as the source."""
        return self._source.element_spec()

    def open(self, epoch: int) -> Reader:
        """Opens the first repetition."""
        return RepeatedReader(self._source.open, epoch, self.count)


class RepeatedReader(Reader):
    """Reads `count` epochs of a source in a row; None repeats forever.

    `epoch` is the epoch of the repeated dataset.
    """

    def __init__(self, open_epoch: Callable[[int], Reader], epoch: int, count: int | None) -> None:
        self._open = open_epoch
        self._first = epoch * (1 if count is None else count)
        self._count = count
        self._num_ended = 0
        self._reader = open_epoch(self._first)
        self._is_empty = True  # No batch of the current epoch was read yet.
        self.has_cheap_state = self._reader.has_cheap_state
        self.is_in_memory = self._reader.is_in_memory

    def read(self) -> Any:
        """Returns the next batch, from the next epoch if one has ended."""
        while self._count is None or self._num_ended < self._count:
            try:
                batch = next(self._reader)
            except StopIteration:
                if self._is_empty and self._count is None:
                    raise  # Otherwise an empty source would loop forever.
                self._go_to(self._num_ended + 1)
                continue
            self._is_empty = False
            return batch
        raise StopIteration

    def read_many(self, count: int, num_parts: int) -> tuple[Any, int] | None:
        """Returns batches of the current epoch; None at its end."""
        batches = self._reader.next_many(count, num_parts)
        if batches is not None:
            self._is_empty = False
        return batches

    def _go_to(self, num_ended: int) -> None:
        self._num_ended, self._is_empty = num_ended, True
        self._reader.close()
        if self._count is None or num_ended < self._count:
            self._reader = self._open(self._first + num_ended)

    def state(self) -> Any:
        """Returns the epoch and the position in it."""
        return {"num_ended": self._num_ended, "source": self._reader.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores the epoch and the position in it."""
        self._go_to(state["num_ended"])
        if self._count is None or self._num_ended < self._count:
            self._reader.restore(state["source"])
            self._is_empty = False  # The state may be at the end of an epoch.

    def close(self) -> None:
        """Closes the reader of the current epoch."""
        self._reader.close()
