"""What each of several processes reads of a dataset, and which rows of it are its own."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from stratagem.errors import InvalidArgumentError
from stratagem.input.batches import HostBatch, join_parts, take_batch
from stratagem.input.sources import BATCHES_A_SNAPSHOT, Reader, Source
from stratagem.input.splitting import batch_sizes_for_worker
from stratagem.messages import explain
from stratagem.options import AutoShardPolicy, InputContext

__all__ = ["Shard"]


@dataclasses.dataclass(frozen=True)
class Shard:
    """The part of a dataset of global batches that one process has.

    Args:
        source: what the process reads.
        context: which process of how many, and how many replicas they have together.
        is_whole: whether it reads what all others read, and keeps its part of each batch.
    """

    source: Source
    context: InputContext
    is_whole: bool

    @classmethod
    def of(cls, source: Source, policy: AutoShardPolicy, context: InputContext) -> Shard:
        """Chooses what a process reads.

        Args:
            source: of global batches.
            policy: of the caller.
            context: which process of how many.

        Raises:
            ValueError: replicas that are not spread evenly, or a hint that is not there.
            InvalidArgumentError: fewer files than processes.
        """
        count, index = context.num_input_pipelines, context.input_pipeline_id
        if context.num_replicas_in_sync % count:
            raise ValueError(
                explain(
                    f"{context.num_replicas_in_sync} replicas are spread over {count} workers.",
                    expected="as many replicas on each.",
                    fix="give every worker the same number of devices.",
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
        """Replicas of this process."""
        return self.context.num_replicas_in_sync // self.context.num_input_pipelines

    @property
    def cardinality(self) -> int:
        """Steps of an epoch; negative where the source does not know."""
        count = self.source.cardinality
        return count if self.is_whole or count < 0 else count * self.context.num_input_pipelines

    def open(self, epoch: int) -> Reader:
        """Begins to read.

        Args:
            epoch: from 0.

        Returns:
            A reader of `HostBatch`es of this process's replicas.
        """
        return (_OwnParts if self.is_whole else _CutBatches)(self, self.source.open(epoch))


def _check_can_shard(source: Source, policy: AutoShardPolicy, count: int) -> None:
    if policy is AutoShardPolicy.HINT and not source.has_shard_hint:
        raise ValueError(
            explain(
                "AutoShardPolicy.HINT was given with a dataset that holds no place for a shard.",
                expected="sg.input.Dataset.shard(sg.input.SHARD_HINT, sg.input.SHARD_HINT).",
                fix="add it to the dataset, or choose AutoShardPolicy.DATA.",
            )
        )
    num_files = source.num_files
    if policy is AutoShardPolicy.FILE and (num_files is None or num_files < count):
        found = "no files that could be told apart" if num_files is None else f"{num_files} files"
        raise InvalidArgumentError(
            explain(
                f"AutoShardPolicy.FILE was given for {count} workers with a dataset of {found}.",
                expected=f"{count} files or more.",
                fix="make it with sg.input.Dataset.from_files, write more files, or choose "
                "AutoShardPolicy.DATA.",
            )
        )


class _OwnParts(Reader):
    """Splits each batch over all replicas and keeps the parts of this process."""

    def __init__(self, shard: Shard, reader: Reader) -> None:
        self._shard = shard
        self._reader = reader
        self.has_cheap_state = reader.has_cheap_state

    def read(self) -> HostBatch:
        context, count = self._shard.context, self._shard.num_local_replicas
        batch = take_batch(next(self._reader), context.num_replicas_in_sync)
        if context.num_input_pipelines == 1:
            return batch
        return batch.of_replicas(context.input_pipeline_id * count, count)

    def state(self) -> Any:
        return self._reader.state()

    def restore(self, state: Any) -> None:
        self._reader.restore(state)

    def close(self) -> None:
        self._reader.close()


class _CutBatches(Reader):
    """Cuts each batch of this process's own into the steps of all processes.

    A batch of B examples lasts for as many steps as there are processes; in each of them all
    together use B.
    """

    def __init__(self, shard: Shard, reader: Reader) -> None:
        self._shard = shard
        self._reader = reader
        self._steps: list[HostBatch] = []  # of the batch that is being cut
        self._snapshot: Any = None  # of the source, from where `_num_since` steps were read
        self._num_since = 0
        self._is_stateless = False
        self._take_snapshot()

    def read(self) -> HostBatch:
        if not self._steps:
            interval = 1 if self._reader.has_cheap_state else BATCHES_A_SNAPSHOT
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
            return self._reader.state()  # says why there is none
        return {"source": self._snapshot, "then_read": self._num_since}

    def restore(self, state: Any) -> None:
        self._reader.restore(state["source"])
        self._steps.clear()
        self._take_snapshot()
        for _ in range(state["then_read"]):
            self.read()

    def close(self) -> None:
        self._reader.close()
