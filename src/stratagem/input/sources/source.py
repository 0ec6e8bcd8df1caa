"""What a source of batches is: something that can be read from its beginning, epoch by epoch."""

from __future__ import annotations

import abc
from typing import Any

from stratagem.input.sources.spec import spec_of
from stratagem.messages import explain
from stratagem.options import AutoShardPolicy

__all__ = [
    "BATCHES_A_SNAPSHOT",
    "INFINITE_CARDINALITY",
    "Reader",
    "Source",
    "UNKNOWN_CARDINALITY",
    "stateless_reader",
]

# A state that costs something to ask for is asked for once in so many batches; whoever goes on
# from there reads the batches since then again.
BATCHES_A_SNAPSHOT = 32
INFINITE_CARDINALITY = -1
UNKNOWN_CARDINALITY = -2


class Reader(abc.ABC):
    """Reads a source once, from its beginning to its end, in one thread at a time.

    `num_read` batches were read so far, those passed over included. `has_cheap_state` tells whether
    the state may be asked for after every batch.
    """

    num_read: int = 0
    has_cheap_state: bool = True
    _has_ended: bool = False

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> Any:
        if self._has_ended:  # the end is met once, also by whoever asks again
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
        """Returns the next batch, a pytree of arrays.

        Raises:
            StopIteration: there is none.
        """

    def state(self) -> Any:
        """Returns what makes another reader of the same source go on after the last batch read.

        Returns:
            Dicts, lists, texts and numbers only, so that it can be written as JSON.

        Raises:
            NotImplementedError: this kind of source cannot go on from the middle.
        """
        return {"num_read": self.num_read}

    def restore(self, state: Any) -> None:
        """Goes to where another reader was. By default it reads what comes before once more.

        Args:
            state: what `state` returned.
        """
        for _ in range(state["num_read"]):
            next(self)

    def close(self) -> None:  # noqa: B027 - most readers hold nothing
        """Gives back what the reader holds: processes, threads, files."""


class Source(abc.ABC):
    """A dataset of batches."""

    @property
    def order_follows_epoch(self) -> bool:
        """Whether an epoch can be read without those before it: its number decides its order."""
        return False

    @property
    def cardinality(self) -> int:
        """Number of batches, or `INFINITE_CARDINALITY` or `UNKNOWN_CARDINALITY`."""
        return UNKNOWN_CARDINALITY

    @property
    def num_files(self) -> int | None:
        """Files that the source is made of; None if it is not, or nobody can tell."""
        return None

    @property
    def has_shard_hint(self) -> bool:
        """Whether the source holds a place for the number of shards and which one to read."""
        return False

    @property
    def auto_shard_policy(self) -> AutoShardPolicy:
        """What the dataset itself says about sharing."""
        return AutoShardPolicy.AUTO

    def shard(self, num_shards: int, index: int) -> Source:
        """Returns every `num_shards`th file from `index` on; of a hint, fills it in.

        Args:
            num_shards: 1 or more.
            index: 0 <= index < num_shards.

        Returns:
            The source of that part; batches keep their size.
        """
        raise NotImplementedError  # asked only of sources of files or with a hint

    @abc.abstractmethod
    def open(self, epoch: int) -> Reader:
        """Begins to read from the beginning.

        Args:
            epoch: from 0; a source that shuffles by itself does so anew in each.

        Returns:
            The reader.
        """

    def element_spec(self) -> Any:
        """Returns the shapes and dtypes of a batch, the batch axis None. May read one batch.

        Returns:
            Pytree of `ArraySpec`; None where there is no data at all.
        """
        reader = self.open(0)
        try:
            return spec_of(next(reader, None))
        finally:
            reader.close()


def stateless_reader(kind: str, *, fix: str) -> NotImplementedError:
    """Returns the error for a source whose position cannot be saved.

    Args:
        kind: what the source is.
        fix: what else could be used.

    Returns:
        The error, to be raised.
    """
    return NotImplementedError(
        explain(
            f"The state of reading {kind} was asked for.",
            expected="a source that can go on from the middle: sg.input.Dataset of arrays or "
            "files, Grain, tf.data, PyDataset, a list of batches, or an iterator with get_state "
            "and set_state.",
            fix=fix,
        )
    )
