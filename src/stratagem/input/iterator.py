"""Iterators over distributed datasets: once through, with the next batches on their way."""

from __future__ import annotations

import dataclasses
from typing import Any

from stratagem.context import stack
from stratagem.context.function_trace import current_function_trace
from stratagem.errors import OutOfRangeError
from stratagem.input.batches import PlacedBatches
from stratagem.input.loader import Group
from stratagem.input.prefetch import Prefetcher
from stratagem.messages import explain
from stratagem.topology import Topology
from stratagem.topology.lockstep import waiting_for_input
from stratagem.tracebacks import filters_traceback

__all__ = ["DistributedIterator", "OptionalBatch", "require_outside_replicas"]


@dataclasses.dataclass(frozen=True)
class OptionalBatch:
    """A batch, or the end of the data.

    Args:
        batch: pytree with `PerReplica` leaves; None at the end.

    Source: TF 2.21 optional_ops.py, Optional.
    """

    batch: Any

    def has_value(self) -> bool:
        """Tells whether there was a batch."""
        return self.batch is not None

    def get_value(self) -> Any:
        """Returns the batch.

        Raises:
            OutOfRangeError: the data has ended.
        """
        if self.batch is None:
            raise _ended()
        return self.batch


class DistributedIterator:
    """Iterates over a distributed dataset once, with the next batches on their way.

    Use in cross-replica context. Each batch is the pytree of the source with `PerReplica` leaves
    (plain ones with one replica): arrays of shape (n, rows, ...) sharded over the replica axis,
    dtypes as JAX has them, uint8 as uint8.

    Args:
        dataset: the dataset.
        epoch: from 0; sources that shuffle do so anew in each.

    Source: TF 2.21 input_lib.py, DistributedIterator.
    """

    def __init__(self, dataset: Any, epoch: int) -> None:
        self._dataset = dataset
        self._topology: Topology = dataset.strategy.topology
        self._pending: list[Group] = []
        self._begin(epoch, None)

    def _begin(self, epoch: int, state: Any) -> None:
        self._epoch = epoch
        self._loader = self._dataset.make_loader(epoch, state)
        self._position = self._loader.position
        self._prefetcher = Prefetcher(
            self._loader.load,
            self._dataset.options.per_replica_buffer_size,
            self._loader.give_up,
        )
        self._pending = []
        self._error: Exception | None = None

    def __iter__(self) -> DistributedIterator:
        return self

    @filters_traceback
    def __next__(self) -> Any:
        return self.take(1)[0].value()

    def get_next(self) -> Any:
        """Returns the next batch.

        Raises:
            OutOfRangeError: the data has ended.
            ValueError: called in a replica function.
        """
        try:
            return next(self)
        except StopIteration:
            raise _ended() from None

    def get_next_as_optional(self) -> OptionalBatch:
        """Returns the next batch, or the news that there is none.

        Returns:
            An object with `has_value()` and `get_value()`.

        Raises:
            ValueError: called in a replica function.
        """
        return OptionalBatch(next(self, None))

    @property
    def element_spec(self) -> Any:
        """Shapes and dtypes of the parts, as of the dataset."""
        return self._dataset.element_spec

    @property
    def strategy(self) -> Any:
        """The strategy whose replicas share the batches."""
        return self._dataset.strategy

    def take(self, num_steps: int) -> list[PlacedBatches]:
        """Returns the next batches as they lie on the devices.

        Args:
            num_steps: how many at most.

        Returns:
            One entry for each run of batches of one signature; the last entry is short where the
            data ends.

        Raises:
            StopIteration: the data has ended before the first.
        """
        require_outside_replicas("Batches of a distributed iterator were taken")
        self._loader.group_size = num_steps
        runs: list[list[Group]] = []
        missing = num_steps
        while missing:
            try:
                group = self._next_group()
            except StopIteration:
                if runs:
                    break
                self.close()
                raise
            except Exception as error:
                if not runs:
                    raise
                self._error = error  # comes out once what was before it is handed out
                break
            if group.placed.num_steps > missing:
                group, rest = group.split(missing)
                self._pending.insert(0, rest)
            missing -= group.placed.num_steps
            self._position = group.positions[-1]
            if runs and runs[-1][0].placed.signature == group.placed.signature:
                runs[-1].append(group)
            else:
                runs.append([group])
        return [Group.join(run, self._topology).placed for run in runs]

    def _next_group(self) -> Group:
        if self._pending:
            return self._pending.pop(0)
        if self._error is None:
            if not self._dataset.is_agreed_on:
                return self._prefetcher.take()
            with waiting_for_input("a distributed dataset"):
                return self._prefetcher.take()
        error, self._error = self._error, None
        try:
            raise error
        finally:
            del error  # it refers to this frame, and this frame to us

    def get_state(self) -> dict[str, Any]:
        """Returns where this iterator stands, after the last batch that it handed out.

        Returns:
            A dict of what JSON can hold.

        Raises:
            NotImplementedError: the source cannot go on from the middle.

        Example:
            >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> dataset = strategy.distribute_dataset([np.arange(4), np.arange(3)])
            >>> iterator = iter(dataset)
            >>> _ = next(iterator)
            >>> again = iter(dataset)
            >>> again.set_state(iterator.get_state())
            >>> next(again)
            PerReplica[[0 1] | [2]]

        Source: Grain, DatasetIterator.get_state.
        """
        if self._position is None:
            self._loader.reader.state()  # raises the error that says why
        return {"epoch": self._epoch, "position": self._position}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to where another iterator over the same data was, also in another process.

        The next epoch of the dataset follows the one of the state.

        Args:
            state: what `get_state` returned.
        """
        self.close()
        self._dataset.go_to_epoch(state["epoch"])
        self._begin(state["epoch"], state["position"])

    def close(self) -> None:
        """Ends reading ahead; done by itself when the iterator is left or no longer referred to."""
        self._prefetcher.close()
        self._loader.reader.close()


def require_outside_replicas(what: str) -> None:
    """Refuses to read data in a replica function, and while an `sg.function` is traced.

    Args:
        what: what was done, as the beginning of a sentence.

    Raises:
        ValueError: one of these is running.
    """
    if current_function_trace() is not None:
        raise ValueError(
            explain(
                f"{what} in an sg.function.",
                expected="data that is handed over: what is read while a function is traced would "
                "be read once and for all.",
                fix="take it outside: step(next(iterator)); or call strategy.run_steps for many.",
            )
        )
    frame = stack.current_frame()
    if frame is not None and frame.kind is stack.FrameKind.REPLICA:
        raise ValueError(
            explain(
                f"{what} in a replica function.",
                expected="cross-replica context: the batch of all replicas is taken once.",
                fix="take it outside and hand it over: strategy.run(step, args=(next(iterator),)).",
            )
        )


def _ended() -> OutOfRangeError:
    return OutOfRangeError(
        explain(
            "The distributed dataset has ended.",
            expected="a batch that is still to come.",
            fix="make a new iterator with iter(dataset), or loop with `for batch in dataset`.",
        )
    )
