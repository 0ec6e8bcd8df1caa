"""Snapshots: the same batches, from any position, and errors that name what is wrong."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import stratagem as sg
from stratagem.group.transport.journal import write_all, write_record
from stratagem.group.transport.wire import Message, pack
from stratagem.input.snapshots import RecordFile, SnapshotBatches, SnapshotSource
from tests.unit.input.service.servers import input_servers

_NUM_BATCHES = 9


def _batch(number: int) -> dict[str, Any]:
    return {
        "x": np.arange(number * 1000, dtype=np.float32).reshape(-1, 10),
        "bf16": np.full(3, number, ml_dtypes.bfloat16),
        "text": np.array([f"é{number}", None, b"raw"], object),
        "empty": np.zeros((0, 2), np.int8),
        "number": np.array(number),
    }


def _batches() -> list[dict[str, Any]]:
    return [_batch(number) for number in range(_NUM_BATCHES)]


def _require_same(found: Any, expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        assert (found[name].dtype, found[name].shape) == (wanted.dtype, wanted.shape)
        assert found[name].tolist() == wanted.tolist()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("snapshots") / "saved"
    with input_servers(2, worker_timeout_ms=30_000) as servers:
        sg.input.service.save(_batches(), folder, servers.target)
    return folder


@pytest.fixture
def copied(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copied"))


def test_batches_are_those_of_the_dataset_in_their_order(saved) -> None:
    dataset = sg.input.Dataset.load(saved)
    assert len(dataset) == _NUM_BATCHES
    for _ in range(2):
        found = [*dataset]
        assert len(found) == _NUM_BATCHES
        for one, expected in zip(found, _batches(), strict=True):
            _require_same(one, expected)


def test_arrays_are_views_of_the_files_and_cannot_be_changed(saved) -> None:
    batch = next(iter(sg.input.Dataset.load(saved).repeat(2)))
    assert not batch["number"].flags.writeable
    found = SnapshotBatches(saved)[-1]
    assert not found["x"].flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        found["x"][0] = 1


def test_it_resumes_at_any_batch_and_reads_none_before(copied) -> None:
    batches = SnapshotSource(copied).open(0)
    for _ in range(4):
        next(batches)
    state = json.loads(json.dumps(batches.state()))
    # Reading one of the batches before would raise.
    _damage(copied, number=2)
    again = SnapshotSource(copied).open(0)
    again.restore(state)
    for number in range(4, _NUM_BATCHES):
        _require_same(next(again), _batch(number))
    source = SnapshotSource(copied)
    assert source.can_seek
    assert source.order_follows_epoch
    _require_same(next(source.open_at(1, 7)), _batch(7))


def test_input_workers_read_it_like_other_datasets(saved) -> None:
    dataset = sg.input.Dataset.load(saved)
    with input_servers(2, worker_timeout_ms=30_000) as servers:
        found = [*servers.distribute(dataset, exactly_once=True)]
    numbers = sorted(one["number"].item() for one in found)
    assert numbers == [*range(_NUM_BATCHES)]
    copy = pickle.loads(pickle.dumps(SnapshotSource(saved)))
    assert [one["number"].item() for one in copy.open(0)] == numbers


def _damage(folder: Path, *, number: int) -> None:
    file_number, place, end = SnapshotBatches(folder)._places[number].tolist()
    path = folder / SnapshotBatches(folder)._files[file_number].path.name
    data = bytearray(path.read_bytes())
    data[(place + end) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("number", [0, 5, _NUM_BATCHES - 1])
def test_damaged_batch_is_named_and_others_are_read(copied, number) -> None:
    _damage(copied, number=number)
    batches = SnapshotBatches(copied)
    for other in range(_NUM_BATCHES):
        if other != number:
            _require_same(batches[other], _batch(other))
    with pytest.raises(sg.errors.DataLossError, match=f"batch {number}, at byte .* fails its"):
        batches[number]


def test_damaged_manifest_and_files_are_errors(copied) -> None:
    manifest = copied / "manifest"
    intact = manifest.read_bytes()
    for damaged in (b"", intact[:-1], intact[:10], b"other" + intact, intact[:30] + b"x"):
        manifest.write_bytes(damaged)
        with pytest.raises(sg.errors.DataLossError, match="its manifest is incomplete"):
            sg.input.Dataset.load(copied)
    manifest.write_bytes(intact)
    (file, *_) = sorted(copied.glob("batches-*"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(sg.errors.DataLossError, match=f"the file {file.name} is incomplete"):
        sg.input.Dataset.load(copied)
    file.unlink()
    with pytest.raises(sg.errors.DataLossError, match=f"the file {file.name} is missing"):
        sg.input.Dataset.load(copied)


def test_unfinished_and_absent_snapshots_are_errors(copied, tmp_path) -> None:
    (copied / "manifest").unlink()
    with pytest.raises(sg.errors.DataLossError, match="is not finished: it has no manifest"):
        sg.input.Dataset.load(copied)
    with pytest.raises(sg.errors.NotFoundError, match="There is no snapshot at"):
        sg.input.Dataset.load(tmp_path / "nothing")


def test_records_end_where_they_are_damaged(tmp_path) -> None:
    path = tmp_path / "file"
    with path.open("wb", buffering=0) as file:
        write_all(file, b"stratagem snapshot 1\n")
        for number in range(3):
            write_record(file, pack(Message("x", {"number": number}, [np.arange(number * 9000)])))
    file = RecordFile(path)
    ends, place = [], 21
    while (end := file.record_at(place)) is not None:
        assert file.message(place, end).fields["number"] == len(ends)
        place = end
        ends.append(end)
    assert place == path.stat().st_size
    assert len(ends) == 3
