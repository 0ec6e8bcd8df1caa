"""Saving snapshots: every kind of dataset, interruptions, and datasets that cannot be saved."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stratagem as sg
from stratagem.input.service import snapshot
from tests.unit.input.service.servers import input_servers, values


@pytest.fixture(scope="module")
def servers():
    with input_servers(2, worker_timeout_ms=30_000) as servers:
        yield servers


def _read(files: list[int]) -> list[np.ndarray]:
    return [np.array([10 * file + number]) for file in files for number in range(file + 1)]


@pytest.mark.parametrize(
    "dataset",
    [
        sg.input.Dataset(np.arange(500), batch_size=3, shuffle=True),
        sg.input.Dataset(np.arange(7), batch_size=2).repeat(3),
        sg.input.Dataset(np.arange(0), batch_size=2),
        sg.input.Dataset.from_files(list(range(5)), _read),
        sg.input.Dataset.from_generator(lambda: (np.full(1, n) for n in range(9))),
    ],
    ids=["arrays", "repeated", "empty", "files", "generator"],
)
def test_snapshot_is_the_plain_iteration(servers, dataset, tmp_path) -> None:
    sg.input.service.save(dataset, tmp_path / "saved", servers.target)
    assert values(sg.input.Dataset.load(tmp_path / "saved")) == values(dataset.as_source().open(0))


def test_strategies_resume_a_snapshot_at_the_next_batch(servers, tmp_path) -> None:
    dataset = sg.input.Dataset(np.arange(21), batch_size=4, shuffle=True)
    sg.input.service.save(dataset, tmp_path / "saved", servers.target)
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])

    def sums(batches: Any) -> list[int]:
        return [
            sum(int(np.sum(part)) for part in strategy.experimental_local_results(batch))
            for batch in batches
        ]

    expected = [int(batch.sum()) for batch in dataset.as_source().open(0)]
    batches = iter(strategy.distribute_dataset(sg.input.Dataset.load(tmp_path / "saved")))
    assert sums(itertools.islice(batches, 3)) == expected[:3]
    state = batches.get_state()
    again = iter(strategy.distribute_dataset(sg.input.Dataset.load(tmp_path / "saved")))
    again.set_state(state)
    assert sums(again) == expected[3:]


def test_large_snapshots_have_several_files(servers, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(snapshot, "_MOST_FILE_BYTES", 3000)
    dataset = sg.input.Dataset(np.arange(4000), batch_size=100)
    sg.input.service.save(dataset, tmp_path, servers.target)
    assert len(sorted(tmp_path.glob("batches-*"))) > 5
    assert values(sg.input.Dataset.load(tmp_path)) == values(dataset)


class _InterruptionError(Exception):
    pass


def test_interrupted_save_continues(servers, tmp_path, monkeypatch) -> None:
    """Each try writes seven batches, and the last one is cut off."""
    dataset = sg.input.Dataset(np.arange(60), batch_size=2, shuffle=True)
    written: list[tuple[int, int]] = []
    add = snapshot._SnapshotWriter.add

    def interrupted(writer: Any, split: int, index: int, batch: Any) -> None:
        add(writer, split, index, batch)
        written.append((split, index))
        if len(written) % 7 == 0:
            raise _InterruptionError

    monkeypatch.setattr(snapshot._SnapshotWriter, "add", interrupted)
    for number in itertools.count():
        assert number < 10
        try:
            sg.input.service.save(dataset, tmp_path, servers.target)
            break
        except _InterruptionError:
            _cut_last(tmp_path)
            del written[-1]
            written.append((-1, number))
    real = [one for one in written if one[0] >= 0]
    assert len(set(real)) == len(real) == 30
    assert values(sg.input.Dataset.load(tmp_path)) == values(dataset.as_source().open(0))


def _cut_last(folder: Path) -> None:
    last = sorted(folder.glob("batches-*"))[-1]
    with last.open("r+b") as file:
        file.truncate(last.stat().st_size - 1)


def test_finished_and_other_snapshots_are_not_overwritten(servers, tmp_path) -> None:
    dataset = sg.input.Dataset(np.arange(6), batch_size=2)
    sg.input.service.save(dataset, tmp_path, servers.target)
    with pytest.raises(FileExistsError, match="has a finished snapshot"):
        sg.input.service.save(dataset, tmp_path, servers.target)
    (tmp_path / "manifest").unlink()
    other = sg.input.Dataset(np.arange(8), batch_size=2)
    with pytest.raises(ValueError, match="has an unfinished snapshot of a dataset with"):
        sg.input.service.save(other, tmp_path, servers.target)


def test_datasets_without_an_end_or_that_change_are_refused(servers, tmp_path) -> None:
    dataset = sg.input.Dataset(np.arange(6), batch_size=2)
    with pytest.raises(ValueError, match="save received a dataset without an end"):
        sg.input.service.save(dataset.repeat(), tmp_path, servers.target)
    with pytest.raises(ValueError, match="may have other batches when it is read again"):
        sg.input.service.save(iter([np.zeros(2)]), tmp_path, servers.target)
