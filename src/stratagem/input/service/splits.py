"""Splits: parts of a source that can be opened again, in any process, from any batch on.

A batch is identified by its epoch, its split, and its index in the split.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Generator, Iterator
from typing import Any

from stratagem.errors import invalid
from stratagem.input.sources.source import FileSource, RepeatedSource, Source, require_shards


class ShardingPolicy(enum.IntEnum):
    """The way in which input workers share the data of an epoch.

    OFF: each worker reads all data, so each batch comes once per worker that is there when the
    epoch begins; in coordinated reads once. With all others, each batch comes once, and workers
    take turns. DYNAMIC and FILE_OR_DATA: with files, or with ranges of batches. FILE: with files.
    DATA: with ranges of batches. HINT: with eight shards, by `Dataset.shard` with `SHARD_HINT`.

    Example:
        >>> sg.input.service.ShardingPolicy.DYNAMIC.name
        'DYNAMIC'

    Source: TF 2.21 data_service_ops.py, ShardingPolicy.
    """

    OFF = 0
    DYNAMIC = 1
    FILE = 2
    DATA = 3
    FILE_OR_DATA = 4
    HINT = 5


# TensorFlow's earlier names.
_MODES = {
    "parallel_epochs": ShardingPolicy.OFF,
    "distributed_epoch": ShardingPolicy.DYNAMIC,
}


def checked_policy(processing_mode: object) -> ShardingPolicy:
    """Returns a valid policy: a `ShardingPolicy`, "parallel_epochs" or "distributed_epoch"."""
    if isinstance(processing_mode, ShardingPolicy):
        return processing_mode
    if isinstance(processing_mode, str) and processing_mode in _MODES:
        return _MODES[processing_mode]
    raise invalid(
        f"processing_mode={processing_mode!r} is no sharding policy.",
        expected='a ShardingPolicy, "parallel_epochs" or "distributed_epoch".',
        fix="pass sg.input.service.ShardingPolicy.DYNAMIC, which reads each batch once.",
    )


# A range of batches has at most so many, and at most this part of all batches: small enough for
# workers to finish at about the same time, large enough to open the data seldom.
_MOST_BATCHES, _LEAST_SPLITS = 64, 64


@dataclasses.dataclass(frozen=True)
class SourceFacts:
    """Facts about a source that decide its splits, as JSON.

    `cardinality`, `num_files` and `can_seek` are those of one repetition. `num_repetitions` is None
    for a source that repeats forever.
    """

    cardinality: int
    num_files: int | None
    num_repetitions: int | None
    can_seek: bool
    is_repeatable: bool
    has_shard_hint: bool

    @property
    def num_batches(self) -> int | None:
        """Number of batches of all repetitions, None if infinite; for a source that can seek."""
        if self.num_repetitions is None:
            return None if self.cardinality else 0
        return self.cardinality * self.num_repetitions


def _once(source: Source, epoch: int) -> tuple[Source, int, int | None]:
    """Returns the source without its repetitions, the first of its epochs, and their number."""
    count: int | None = 1
    while isinstance(source, RepeatedSource):
        epoch *= 1 if source.count is None else source.count
        count = None if count is None or source.count is None else count * source.count
        source = source.once
    return source, epoch, count


def facts_of(source: Source) -> SourceFacts:
    """Returns the facts about a source."""
    once, _, count = _once(source, 0)
    return SourceFacts(
        cardinality=once.cardinality,
        num_files=once.num_files,
        num_repetitions=count,
        can_seek=once.can_seek and once.cardinality >= 0,
        is_repeatable=source.is_repeatable,
        has_shard_hint=once.has_shard_hint,
    )


@dataclasses.dataclass(frozen=True)
class SplitPlan:
    """The splits of a source, as JSON.

    `kind` is "copies" (each split is the whole source), "files", "ranges" (of `size` batches), or
    "shards" (by hint). `count` is the number of splits; None if there is no end.
    """

    kind: str
    count: int | None
    size: int = 0


# Shards of a dataset with a hint. Consumers agree on them without talking.
_NUM_SHARDS = 8


def plan_splits(
    facts: SourceFacts, policy: ShardingPolicy, num_copies: int, *, group: int | None = None
) -> SplitPlan:
    """Returns the splits of a source; OFF has `num_copies` of it.

    In coordinated reads, ranges consist of groups of `group` batches, and OFF is one copy. Raises
    ValueError if the source does not fit the policy.
    """
    if policy is ShardingPolicy.OFF and group is None:
        return SplitPlan("copies", num_copies)
    hint = facts.has_shard_hint
    require_shards(policy, None, num_files=facts.num_files, has_shard_hint=hint)
    if policy is ShardingPolicy.HINT:
        return SplitPlan("shards", _NUM_SHARDS)
    if facts.num_files and policy not in (ShardingPolicy.OFF, ShardingPolicy.DATA):
        repetitions = facts.num_repetitions
        return SplitPlan("files", None if repetitions is None else facts.num_files * repetitions)
    if not facts.can_seek:
        return SplitPlan("copies", 1)
    size = min(_MOST_BATCHES, max(1, facts.cardinality // _LEAST_SPLITS))
    size += -size % (group or 1)
    total = facts.num_batches
    return SplitPlan("ranges", None if total is None else -(-total // size), size)


def require_repeatable(facts: SourceFacts) -> None:
    """Raises ValueError if the source may have other batches when it is read again."""
    if not facts.is_repeatable:
        raise invalid(
            "exactly_once=True was passed for a dataset that may have other batches when it "
            "is read again.",
            expected="sg.input.Dataset of arrays, files or a function, or a Grain dataset.",
            fix="make the dataset of one of these, or pass exactly_once=False.",
        )


def read_split(
    source: Source,
    plan: SplitPlan,
    *,
    epoch: int,
    split: int,
    first: int = 0,
    note_skipped: Callable[[], None] = lambda: None,
) -> Generator[Any]:
    """Yields the batches of a split from the index `first` on.

    `note_skipped` is called for each batch that is read only to get to a later one.
    """
    if plan.kind == "copies":
        return _read(source, epoch, first, None, note_skipped)
    if plan.kind == "ranges":
        start, stop = split * plan.size + first, (split + 1) * plan.size
        return _read(source, epoch, start, stop, note_skipped)
    if plan.kind == "shards":
        assert plan.count is not None
        return _read(source.shard(plan.count, split), epoch, first, None, note_skipped)
    once, begin, _ = _once(source, epoch)
    count = once.num_files
    assert plan.kind == "files"
    assert count
    shard = once.shard(count, split % count)
    return _read(shard, begin + split // count, first, None, note_skipped)


def file_of_split(source: Source, plan: SplitPlan, split: int) -> Any:
    """Returns the file of a split, None if it is not the only one, or not known."""
    once = _once(source, 0)[0]
    if not isinstance(once, FileSource):
        return None
    files = once.files
    if plan.kind == "files":
        return files[split % len(files)]
    return files[0] if len(files) == 1 else None


def _read(
    source: Source, epoch: int, start: int, stop: int | None, note_skipped: Callable[[], None]
) -> Generator[Any]:
    """Yields the batches [start, stop) of an epoch; None reads to the end."""
    facts = facts_of(source)
    if not facts.can_seek:
        yield from _read_through(source, epoch, start, stop, note_skipped)
        return
    once, begin, _ = _once(source, epoch)
    total = facts.num_batches
    ends = [end for end in (stop, total) if end is not None]
    while not ends or start < min(ends):
        repetition, number = divmod(start, facts.cardinality)
        until = min([(repetition + 1) * facts.cardinality, *ends])
        reader = once.open_at(begin + repetition, number)
        try:
            for _ in range(until - start):
                yield next(reader)
        finally:
            reader.close()
        start = until


def _read_through(
    source: Source, epoch: int, start: int, stop: int | None, note_skipped: Callable[[], None]
) -> Iterator[Any]:
    reader = source.open(epoch)
    try:
        for number, batch in enumerate(reader):
            if stop is not None and number >= stop:
                return
            if number >= start:
                yield batch
            else:
                note_skipped()
    finally:
        reader.close()
