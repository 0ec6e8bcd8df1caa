"""Rows in memory: which have a frame, and which lose it."""

from __future__ import annotations

import numpy as np
import pytest

from stratagem.parameter_server.server.tables.tiered_shard import RowFrames


@pytest.fixture
def dirty() -> set[int]:
    return set()


@pytest.fixture
def frames(dirty) -> RowFrames:
    made = RowFrames(1000, 1000, lambda slots: ~np.isin(slots, [*dirty]))
    made.grow(1000)
    return made


def in_memory(frames: RowFrames) -> list[int]:
    return np.flatnonzero(frames.find(np.arange(1000)) >= 0).tolist()


def test_frames_are_found_freed_and_used_again(frames) -> None:
    assert not in_memory(frames)
    places = frames.add(np.array([5, 900, 7]))
    assert places.tolist() == frames.find(np.array([5, 900, 7])).tolist() == [0, 1, 2]
    assert frames.make_room(1, 3) == 1
    assert (frames.num_used, frames.num_drops) == (2, 1)
    frames.add(np.array([8]))
    assert frames.num_frames == 3
    assert len(in_memory(frames)) == 3
    assert frames.make_room(2, 10) == 2
    assert frames.num_drops == 1


def test_frames_that_were_used_stay(frames) -> None:
    frames.add(np.arange(100))
    frames.make_room(1, 100)  # the hand passes over all frames once
    frames.add(np.array([100]))
    frames.use(frames.find(np.arange(50, 100)))
    frames.make_room(40, 100)
    assert {*range(50, 100)} <= {*in_memory(frames)}
    assert frames.num_used == 60


def test_frames_of_changed_pinned_and_kept_rows_stay(frames, dirty) -> None:
    frames.add(np.arange(30))
    dirty |= {*range(10)}
    frames.pin(frames.find(np.arange(10, 20)))
    kept = frames.find(np.arange(20, 25))
    assert frames.make_room(100, 30, kept) == 5
    assert in_memory(frames) == [*range(25)]
    assert frames.make_room(1, 10) == 0  # those that were kept go, and no others
    assert in_memory(frames) == [*range(20)]
    frames.pin(np.empty(0, np.int64))
    frames.make_room(1, 10)
    assert in_memory(frames) == [*range(10)]
    dirty.clear()
    assert frames.make_room(10, 10) == 10
    assert not in_memory(frames)


def test_more_frames_than_fit_are_refused(dirty) -> None:
    frames = RowFrames(1000, 20, lambda slots: slots >= 0)
    frames.grow(1000)
    with pytest.raises(MemoryError, match="needs memory for 21 rows"):
        frames.reserve(21)
    assert frames.slot_bytes == 4
    assert frames.frame_bytes == 10
