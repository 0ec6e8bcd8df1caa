"""Which checkpoints of a folder are new and complete, look by look, without any file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from stratagem.keras.evaluation.checkpoint_loop import (
    PATIENCE_S,
    CheckpointFile,
    CheckpointFollower,
)

_FOLDER = Path("folder")


def _checkpoint(name: str, modified: int = 0, size: int = 1) -> CheckpointFile:
    return CheckpointFile(path=_FOLDER / f"{name}.keras", modified_ns=modified, size_bytes=size)


A, A_LONGER, A_LATER = _checkpoint("a"), _checkpoint("a", size=2), _checkpoint("a", modified=9)
B, C = _checkpoint("b", modified=1), _checkpoint("c", modified=2)


class _Shown:
    """A folder in which each look finds what the test says."""

    names = "*.keras"

    def __init__(self) -> None:
        self.now: Sequence[CheckpointFile] = ()

    def find(self, folder: Path) -> Sequence[CheckpointFile]:
        assert folder == _FOLDER
        return self.now


class _Follower(CheckpointFollower):
    def __init__(self) -> None:
        self.shown = _Shown()
        super().__init__(self.shown, _FOLDER, 100.0)

    def sees(
        self, *shown: CheckpointFile, at_s: float = 100.0, is_last: bool = False
    ) -> list[CheckpointFile]:
        self.shown.now = shown
        return self.look(at_s, is_last=is_last)


def test_checkpoint_is_complete_when_it_has_not_changed_since_the_look_before() -> None:
    follower = _Follower()
    assert follower.sees(A) == []
    assert follower.sees(A_LONGER) == []
    assert follower.sees(A_LATER) == []
    assert follower.sees(A_LATER, B) == [A_LATER]
    assert follower.sees(A_LATER, B, C) == [A_LATER, B]


def test_checkpoint_that_is_done_with_comes_again_only_when_it_is_written_again() -> None:
    follower = _Follower()
    follower.sees(A, B)
    assert follower.sees(A, B) == [A, B]
    follower.finish(A)
    assert follower.sees(A, B) == [B]
    assert follower.sees(A_LATER, B) == [B]
    assert follower.sees(A_LATER, B) == [A_LATER, B]


def test_checkpoint_that_went_and_came_back_has_to_be_complete_again() -> None:
    follower = _Follower()
    follower.sees(A)
    assert follower.sees() == []
    assert follower.sees(A) == []
    assert follower.sees(A) == [A]


def test_unreadable_one_is_left_alone_until_it_changes_or_patience_ends() -> None:
    follower = _Follower()
    follower.sees(A)
    assert follower.sees(A) == [A]
    assert follower.postpone(A, 100.0)
    assert follower.sees(A, at_s=100.0 + PATIENCE_S / 2) == []
    assert follower.sees(A, at_s=100.0 + PATIENCE_S / 2, is_last=True) == [A]
    assert follower.sees(A, at_s=100.0 + PATIENCE_S) == [A]
    assert not follower.postpone(A, 100.0 + PATIENCE_S)
    # It goes on.
    assert follower.sees(A_LONGER, at_s=100.0 + PATIENCE_S) == []
    assert follower.sees(A_LONGER, at_s=100.0 + PATIENCE_S) == [A_LONGER]
    assert follower.postpone(A_LONGER, 100.0 + PATIENCE_S)


@pytest.mark.parametrize(
    ("done", "count"),
    [
        ([], 0),
        ([A], 1),
        ([A, B, C], 3),
        # Training that starts again writes an epoch a second time.
        ([A, B, A_LATER], 2),
        # One name for all.
        ([A, A_LONGER, A_LATER], 3),
    ],
)
def test_names_are_counted_or_how_often_the_one_name_was_written(done, count) -> None:
    follower = _Follower()
    for checkpoint in done:
        follower.finish(checkpoint)
    assert follower.num_done == count


def test_newer_one_counts_before_it_is_complete() -> None:
    follower = _Follower()
    follower.sees(A, B)
    assert follower.has_newer(A)
    assert not follower.has_newer(B)
    follower.sees(A, B, C)
    assert follower.has_newer(B)


def test_time_of_the_last_change_is_known() -> None:
    follower = _Follower()
    times = []
    for at_s, shown in [(101.0, ()), (102.0, (A,)), (103.0, (A,)), (104.0, (A_LONGER,))]:
        follower.sees(*shown, at_s=at_s)
        times.append(follower.changed_at_s)
    assert times == [100.0, 102.0, 102.0, 104.0]
