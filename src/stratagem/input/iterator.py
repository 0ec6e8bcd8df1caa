"""Iterators over distributed datasets, with prefetching and resumable positions."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from stratagem import contexts as stack
from stratagem.contexts import current_function_trace
from stratagem.devices.context_mesh import outside_context_mesh
from stratagem.devices.lockstep import waiting_for_input
from stratagem.devices.mesh import Topology
from stratagem.errors import OutOfRangeError
from stratagem.input.loader import BatchGroup
from stratagem.input.placement import PlacedBatches
from stratagem.input.prefetch import HANDOVER_S, Prefetcher
from stratagem.messages import explain
from stratagem.observe.profiling.marks import input_mark
from stratagem.observe.run_events.wait_clock import DataWait, wait_clock
from stratagem.tracebacks import filters_traceback

if TYPE_CHECKING:
    from stratagem.input.distributed import DistributedDataset


@dataclasses.dataclass(frozen=True)
class OptionalBatch:
    """A batch, or the end of the data.

    Args:
        batch: pytree with `PerReplica` leaves; None at the end.

    Example:
        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> batches = iter(strategy.distribute_dataset([np.arange(4)]))
        >>> batches.get_next_as_optional().get_value()
        PerReplica[[0 1] | [2 3]]
        >>> batches.get_next_as_optional().has_value()
        False

    Source: TF 2.21 optional_ops.py, Optional.
    """

    batch: Any

    def has_value(self) -> bool:
        """Returns True if there is a batch."""
        return self.batch is not None

    def get_value(self) -> Any:
        """Returns the batch.

        Returns:
            Pytree with `PerReplica` leaves.

        Raises:
            OutOfRangeError: the data has ended.
        """
        if self.batch is None:
            raise _end_of_data_error()
        return self.batch


class DistributedIterator:
    """Iterates over a distributed dataset once, and loads batches ahead.

    Use in cross-replica context. Each batch has the source's pytree structure with `PerReplica`
    leaves, or plain arrays with one replica. Arrays have shape (n, rows, ...), sharded over the
    replica axis. Dtypes are JAX's: with 64-bit types disabled, float64 becomes float32; uint8 stays
    uint8.

    Args:
        dataset: the distributed dataset.
        epoch: epoch number, from 0; shuffling sources reorder each epoch.

    Example:
        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> batches = iter(strategy.distribute_dataset([np.arange(4), np.arange(3)]))
        >>> isinstance(batches, sg.DistributedIterator), next(batches)
        (True, PerReplica[[0 1] | [2 3]])
        >>> position = batches.get_state()  # to save in a checkpoint
        >>> next(batches)
        PerReplica[[0 1] | [2]]

    Source: TF 2.21 input_lib.py, DistributedIterator.
    """

    def __init__(self, dataset: DistributedDataset, epoch: int) -> None:
        self._dataset = dataset
        self._topology: Topology = dataset.strategy.topology
        self._pending: list[BatchGroup] = []
        self._begin(epoch, None)

    def _begin(self, epoch: int, state: dict[str, Any] | None) -> None:
        self._epoch = epoch
        self._loader = self._dataset.make_loader(epoch, state)
        self._position = self._loader.position
        self._prefetcher = Prefetcher(
            self._loader.load,
            self._dataset.options.per_replica_buffer_size,
            self._loader.give_up,
            # A thread may wait for other processes longer than for the data.
            handover_s=0.0 if self._dataset.is_agreed_on else HANDOVER_S,
            # A transfer to a GPU waits for the steps that were started before it.
            loads_early=not self._topology.is_abstract and self._topology.platform != "cpu",
        )
        self._pending = []
        self._error: Exception | None = None

    def __iter__(self) -> DistributedIterator:
        return self

    @filters_traceback
    @outside_context_mesh
    def __next__(self) -> Any:
        with self.strategy.variables.explains_exhausted_memory():
            return self.take(1)[0].value()

    def get_next(self) -> Any:
        """Returns the next batch.

        Returns:
            Pytree with `PerReplica` leaves.

        Raises:
            OutOfRangeError: the data has ended.
            ValueError: called in a replica function.
        """
        try:
            return next(self)
        except StopIteration:
            raise _end_of_data_error() from None

    def get_next_as_optional(self) -> OptionalBatch:
        """Returns the next batch, or an empty value at the end of the data.

        Returns:
            An object with `has_value()` and `get_value()`.

        Raises:
            ValueError: called in a replica function.
        """
        return OptionalBatch(next(self, None))

    @property
    def element_spec(self) -> Any:
        """Shapes and dtypes per replica, as in the dataset."""
        return self._dataset.element_spec

    @property
    def strategy(self) -> Any:
        """Strategy whose replicas share the batches."""
        return self._dataset.strategy

    def take(self, num_steps: int) -> list[PlacedBatches]:
        """Returns the next `num_steps` batches on the devices, one entry per run of one signature.

        Returns fewer at the end of the data; raises StopIteration if none is left.
        """
        require_outside_replicas("Batches of a distributed iterator were taken")
        self._loader.group_size = num_steps
        runs: list[list[BatchGroup]] = []
        missing = num_steps
        while missing:
            try:
                with input_mark():
                    group = self._next_group()
            except StopIteration:
                if runs:
                    break
                self.close()
                raise
            except Exception as error:
                if not runs:
                    raise
                self._error = error  # Raised once the batches before it are returned.
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
        return [BatchGroup.join(run, self._topology).placed for run in runs]

    def _next_group(self) -> BatchGroup:
        if self._pending:
            return self._pending.pop(0)
        if self._error is None:
            with DataWait(wait_clock):
                if not self._dataset.is_agreed_on:
                    return self._prefetcher.take()
                with waiting_for_input("a distributed dataset"):
                    return self._prefetcher.take()
        error, self._error = self._error, None
        try:
            raise error
        finally:
            del error  # Breaks a reference cycle: error, frame, iterator.

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the last batch that was returned.

        Returns:
            A dict that JSON can store.

        Raises:
            NotImplementedError: the source cannot be resumed.

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
            self._loader.reader.state()  # Raises an error with the reason.
        return {"epoch": self._epoch, "position": self._position}

    def set_state(self, state: dict[str, Any]) -> None:
        """Resumes from the position of another iterator over the same data, in any process.

        The dataset's next epoch follows the restored one.

        Args:
            state: returned by `get_state`.
        """
        self.close()
        self._dataset.go_to_epoch(state["epoch"])
        self._begin(state["epoch"], state["position"])

    def close(self) -> None:
        """Stops loading ahead; automatic at the end of the data and on garbage collection."""
        self._prefetcher.close()
        self._loader.reader.close()


def require_outside_replicas(what: str) -> None:
    """Raises ValueError in replica functions and while an `sg.function` is traced.

    `what` describes the action, as the start of a sentence.
    """
    if current_function_trace() is not None:
        raise ValueError(
            explain(
                f"{what} inside an sg.function.",
                expected="data as an argument: a batch read during tracing becomes a constant of "
                "the program.",
                fix="read the batch outside: step(next(iterator)), or use strategy.run_steps.",
                code="SG305",
            )
        )
    frame = stack.current_frame()
    if frame is not None and frame.kind is stack.FrameKind.REPLICA:
        raise ValueError(
            explain(
                f"{what} inside a replica function.",
                expected="cross-replica context, where the global batch is read once.",
                fix="read it outside and pass it: strategy.run(step, args=(next(iterator),)).",
                code="SG305",
            )
        )


def _end_of_data_error() -> OutOfRangeError:
    return OutOfRangeError(
        explain(
            "The distributed dataset has no more batches.",
            expected="at least one more batch in this epoch.",
            fix="create a new iterator with iter(dataset), or loop with `for batch in dataset`.",
            code="SG304",
        )
    )
