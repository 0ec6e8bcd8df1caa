"""Sharding of a dataset over processes: by files, by hint, or by rows of each batch."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax

from stratagem.errors import InvalidArgumentError, explain
from stratagem.input.batches import HostBatch, batch_sizes_for_worker, join_parts, take_batch
from stratagem.input.placement import HostSteps
from stratagem.input.sources.source import BATCHES_PER_SNAPSHOT, Reader, Source
from stratagem.options import AutoShardPolicy, InputContext


@dataclasses.dataclass(frozen=True)
class InputShard:
    """The part of a dataset of global batches that one process reads.

    `is_whole` is True if all processes read the same data and use their part of each batch.
    """

    source: Source
    context: InputContext
    is_whole: bool

    @classmethod
    def of(cls, source: Source, policy: AutoShardPolicy, context: InputContext) -> InputShard:
        """Selects a process's part of a dataset.

        Raises ValueError for an uneven number of replicas or a missing hint, and
        InvalidArgumentError for fewer files than processes.
        """
        count, index = context.num_input_pipelines, context.input_pipeline_id
        if context.num_replicas_in_sync % count:
            raise ValueError(
                explain(
                    f"{context.num_replicas_in_sync} replicas do not divide evenly over {count} "
                    "workers.",
                    expected="the same number of replicas on each worker.",
                    fix="give every worker the same number of devices.",
                    code="SG510",
                )
            )
        if count == 1:
            return cls(source, context, is_whole=True)
        if policy is AutoShardPolicy.AUTO:
            policy = source.auto_shard_policy
        if policy is AutoShardPolicy.AUTO:
            has_files = source.num_files is not None and source.num_files >= count
            policy = AutoShardPolicy.FILE if has_files else AutoShardPolicy.DATA
        if policy is AutoShardPolicy.DATA:
            return cls(source, context, is_whole=True)
        if policy is AutoShardPolicy.OFF:
            return cls(source, context, is_whole=False)
        _check_can_shard(source, policy, count)
        return cls(source.shard(count, index), context, is_whole=False)

    @property
    def num_local_replicas(self) -> int:
        """Number of replicas of this process."""
        return self.context.num_replicas_in_sync // self.context.num_input_pipelines

    @property
    def cardinality(self) -> int:
        """Number of steps per epoch; negative if infinite or unknown."""
        count = self.source.cardinality
        return count if self.is_whole or count < 0 else count * self.context.num_input_pipelines

    def open(self, epoch: int) -> Reader:
        """Opens an epoch; the reader returns a `HostBatch` of this process's replicas."""
        return (_OwnParts if self.is_whole else _CutBatches)(self, self.source.open(epoch))


def _check_can_shard(source: Source, policy: AutoShardPolicy, count: int) -> None:
    if policy is AutoShardPolicy.HINT and not source.has_shard_hint:
        raise ValueError(
            explain(
                "AutoShardPolicy.HINT was set for a dataset without a shard hint.",
                expected="a dataset sharded with SHARD_HINT.",
                fix="call dataset.shard(sg.input.SHARD_HINT, sg.input.SHARD_HINT), or use "
                "AutoShardPolicy.DATA.",
                code="SG307",
            )
        )
    num_files = source.num_files
    if policy is AutoShardPolicy.FILE and (num_files is None or num_files < count):
        found = "no known files" if num_files is None else f"{num_files} files"
        raise InvalidArgumentError(
            explain(
                f"AutoShardPolicy.FILE was set for {count} workers and a dataset with {found}.",
                expected=f"{count} files or more.",
                fix="create the dataset with sg.input.Dataset.from_files, write more files, or "
                "use AutoShardPolicy.DATA.",
                code="SG307",
            )
        )


class _OwnParts(Reader):
    """Splits each batch over all replicas and returns the parts of this process."""

    def __init__(self, shard: InputShard, reader: Reader) -> None:
        self._shard = shard
        self._reader = reader
        self.has_cheap_state = reader.has_cheap_state
        self.is_in_memory = reader.is_in_memory

    def read(self) -> HostBatch:
        return self._own_part(next(self._reader))

    def read_many(self, count: int, num_parts: int) -> tuple[HostSteps, int] | None:
        found = self._reader.next_many(count, self._shard.context.num_replicas_in_sync)
        if found is None:
            return None
        batches, number = found
        first = self._own_part(jax.tree.map(lambda array: array[0], batches))
        start = self._first_replica * first.size
        stop = start + self._shard.num_local_replicas * first.size
        arrays = [array[:, start:stop] for array in jax.tree.leaves(batches)]
        return HostSteps(first, arrays, number), number

    @property
    def _first_replica(self) -> int:
        return self._shard.context.input_pipeline_id * self._shard.num_local_replicas

    def _own_part(self, data: object) -> HostBatch:
        context = self._shard.context
        batch = take_batch(data, context.num_replicas_in_sync)
        if context.num_input_pipelines == 1:
            return batch
        return batch.of_replicas(self._first_replica, self._shard.num_local_replicas)

    def state(self) -> Any:
        return self._reader.state()

    def restore(self, state: object) -> None:
        self._reader.restore(state)

    def close(self) -> None:
        self._reader.close()


class _CutBatches(Reader):
    """Cuts each of this process's batches into steps of all processes.

    A batch of B examples lasts for as many steps as there are processes, which together use B
    examples per step.
    """

    def __init__(self, shard: InputShard, reader: Reader) -> None:
        self._shard = shard
        self._reader = reader
        self._steps: list[HostBatch] = []  # remaining steps of the current batch
        self._snapshot: Any = None  # Source state, `_num_since` steps ago.
        self._num_since = 0
        self._is_stateless = False
        self._take_snapshot()

    def read(self) -> HostBatch:
        if not self._steps:
            interval = 1 if self._reader.has_cheap_state else BATCHES_PER_SNAPSHOT
            if self._num_since >= interval * self._shard.context.num_input_pipelines:
                self._take_snapshot()
            self._steps = self._cut(take_batch(next(self._reader), 1))
        self._num_since += 1
        return self._steps.pop(0)

    def _take_snapshot(self) -> None:
        if self._is_stateless:
            return
        try:
            self._snapshot, self._num_since = self._reader.state(), 0
        except NotImplementedError:
            self._is_stateless = True

    def _cut(self, batch: HostBatch) -> list[HostBatch]:
        context, count = self._shard.context, self._shard.num_local_replicas
        sizes = batch_sizes_for_worker(
            batch.num_examples, context.num_input_pipelines, count, context.input_pipeline_id
        )
        starts = itertools.accumulate(sizes, initial=0)
        parts = [
            batch.rows(start, start + size) for start, size in zip(starts, sizes, strict=False)
        ]
        return [
            join_parts(parts[first : first + count], size=max(sizes))
            for first in range(0, len(parts), count)
        ]

    def state(self) -> Any:
        if self._is_stateless:
            return self._reader.state()  # Raises an error with the reason.
        return {"source": self._snapshot, "then_read": self._num_since}

    def restore(self, state: dict[str, Any]) -> None:
        self._reader.restore(state["source"])
        self._steps.clear()
        self._take_snapshot()
        for _ in range(state["then_read"]):
            self.read()

    def close(self) -> None:
        self._reader.close()
