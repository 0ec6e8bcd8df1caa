"""Splits: together they are the source, and each can be read from any batch on."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator

import numpy as np
import pytest

import stratagem as sg
from stratagem.input.service.splits import (
    ShardingPolicy,
    checked_policy,
    facts_of,
    file_of_split,
    plan_splits,
    read_split,
)

_EPOCHS = (0, 2)


def _files_of_splits(num_files: int) -> sg.input.Dataset:
    return sg.input.Dataset.from_files(
        [f"file {number}" for number in range(num_files)],
        lambda files: [
            np.array([int(file.split()[1]), number]) for file in files for number in range(3)
        ],
    )


def _grain():
    grain = pytest.importorskip("grain")
    return sg.input.Dataset(grain.MapDataset.source(np.arange(7)).shuffle(seed=1).batch(2))


_DATASETS = {
    "arrays": lambda: sg.input.Dataset(np.arange(150), batch_size=2, shuffle=True),
    "many arrays": lambda: sg.input.Dataset(np.arange(700), batch_size=3),
    "short": lambda: sg.input.Dataset(np.arange(5), batch_size=2),
    "empty": lambda: sg.input.Dataset(np.arange(0), batch_size=2),
    "grain": _grain,
    "list": lambda: sg.input.Dataset([np.full(2, number) for number in range(7)]),
    "files": lambda: _files_of_splits(5),
    "generator": lambda: sg.input.Dataset.from_generator(
        lambda: (np.full(1, number) for number in range(6))
    ),
}


@pytest.mark.parametrize("name", _DATASETS)
@pytest.mark.parametrize(
    ("policy", "repeats"),
    [
        (ShardingPolicy.OFF, None),
        (ShardingPolicy.DYNAMIC, 3),
        (ShardingPolicy.DATA, (2, 2)),
        (ShardingPolicy.FILE_OR_DATA, (2, 2)),
        pytest.param(ShardingPolicy.DYNAMIC, None, marks=pytest.mark.slow),
        pytest.param(ShardingPolicy.DYNAMIC, (2, 2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_splits_are_the_source(name, policy, repeats) -> None:
    dataset = _DATASETS[name]()
    for count in repeats if isinstance(repeats, tuple) else [repeats] if repeats else []:
        dataset = dataset.repeat(count)
    source = dataset.as_source()
    plan = plan_splits(facts_of(source), policy, 3)
    assert plan.count is not None
    for epoch in _EPOCHS:
        expected = [batch.tolist() for batch in source.open(epoch)]
        splits = [_read(source, plan, epoch, split) for split in range(plan.count)]
        if policy is ShardingPolicy.OFF:
            assert splits == 3 * [expected]
        else:
            assert _counts([*itertools.chain.from_iterable(splits)]) == _counts(expected)
            assert plan.kind != "files" or policy is not ShardingPolicy.DATA
            if plan.kind == "ranges":
                assert [*itertools.chain.from_iterable(splits)] == expected
        for number in (0, len(splits) - 1) if splits else ():
            for first in (1, 2, len(splits[number])):
                assert _read(source, plan, epoch, number, first) == splits[number][first:]


def _read(source, plan, epoch, split, first=0):
    batches = read_split(source, plan, epoch=epoch, split=split, first=first)
    return [batch.tolist() for batch in batches]


def _counts(batches):
    return collections.Counter(map(str, batches))


def test_infinite_sources_have_splits_without_an_end() -> None:
    source = sg.input.Dataset(np.arange(6), batch_size=2, shuffle=True).repeat().as_source()
    plan = plan_splits(facts_of(source), ShardingPolicy.DYNAMIC, 3)
    assert plan.count is None
    plain = source.open(0)
    expected = [next(plain).tolist() for _ in range(9)]
    assert [batch for split in range(9) for batch in _read(source, plan, 0, split)] == expected
    files = _files_of_splits(2).repeat().as_source()
    plan = plan_splits(facts_of(files), ShardingPolicy.DYNAMIC, 3)
    assert plan.count is None
    assert _read(files, plan, 0, 7) == [[1, 0], [1, 1], [1, 2]]
    assert file_of_split(files, plan, 7) == "file 1"


def test_a_split_is_a_file() -> None:
    source = _files_of_splits(5).as_source()
    plan = plan_splits(facts_of(source), ShardingPolicy.FILE, 2)
    assert [row[0] for row in _read(source, plan, 0, 4)] == [4, 4, 4]
    assert file_of_split(source, plan, 4) == "file 4"
    whole = plan_splits(facts_of(source), ShardingPolicy.DATA, 2)
    assert file_of_split(source, whole, 0) is None
    single = _files_of_splits(1).as_source()
    assert file_of_split(single, plan_splits(facts_of(single), ShardingPolicy.DATA, 2), 0)


def test_shards_by_hint_are_the_source() -> None:
    hint = sg.input.SHARD_HINT
    source = sg.input.Dataset(np.arange(21), batch_size=2).shard(hint, hint).as_source()
    plan = plan_splits(facts_of(source), ShardingPolicy.HINT, 3)
    splits = [_read(source, plan, 0, split) for split in range(8)]
    assert splits[3] == [[3, 11], [19]]
    assert sorted(itertools.chain(*itertools.chain(*splits))) == list(range(21))


def test_policies_that_do_not_fit_the_source() -> None:
    plain = facts_of(sg.input.Dataset(np.arange(3), batch_size=1).as_source())
    words = (
        r"FILE was set for input workers and a dataset with no known files.\nExpected a dataset of"
    )
    with pytest.raises(sg.errors.InvalidArgumentError, match=words):
        plan_splits(plain, ShardingPolicy.FILE, 2)
    with pytest.raises(ValueError, match="HINT was set for a dataset without"):
        plan_splits(plain, ShardingPolicy.HINT, 2)


def test_batches_on_the_way_to_the_next_one_are_noted() -> None:
    closed: list[int] = []

    def batches() -> Iterator[np.ndarray]:
        try:
            yield from (np.array([number]) for number in range(12))
        finally:
            closed.append(1)

    source = sg.input.Dataset.from_generator(batches).as_source()
    plan = plan_splits(facts_of(source), ShardingPolicy.OFF, 3)
    noted: list[int] = []
    reading = read_split(
        source, plan, epoch=0, split=2, first=4, note_skipped=lambda: noted.append(1)
    )
    found = []
    for _ in range(3):
        next(reading)
        found.append(len(noted))
        noted.clear()
    reading.close()
    assert found == [4, 0, 0]
    assert closed == [1]


def test_coordinated_reads_have_ranges_of_whole_groups_and_one_copy() -> None:
    arrays = facts_of(sg.input.Dataset(np.arange(1000), batch_size=1).as_source())
    for policy in (ShardingPolicy.DYNAMIC, ShardingPolicy.OFF):
        plan = plan_splits(arrays, policy, 5, group=4)
        assert (plan.kind, plan.count, plan.size) == ("ranges", 63, 16)
    files = facts_of(_files_of_splits(3).as_source())
    assert plan_splits(files, ShardingPolicy.OFF, 5, group=4).count == 1
    assert plan_splits(files, ShardingPolicy.DYNAMIC, 5, group=4).count == 3


# Sharding policies: TensorFlow's names and numbers.


def test_policies_by_name_and_value() -> None:
    assert checked_policy("parallel_epochs") is ShardingPolicy.OFF
    assert checked_policy("distributed_epoch") is ShardingPolicy.DYNAMIC
    assert all(checked_policy(policy) is policy for policy in ShardingPolicy)
    for mode in ("dynamic", 1, None):
        with pytest.raises(ValueError, match="is no sharding policy"):
            checked_policy(mode)
