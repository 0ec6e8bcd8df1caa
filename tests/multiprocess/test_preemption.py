"""A notice to any worker: all save after the same step and leave, or go on where they left."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.cluster import PROGRAMS, Ended, run_cluster

pytestmark = pytest.mark.slow

_PROGRAM = str(PROGRAMS / "preempted.py")
_NUM_STEPS = 8 * 15


def _run(
    folder: Path, how: str, notices: list[list[Any]], *, num_workers: int = 2, culprit: int = -1
) -> list[Ended]:
    texts = {"NOTICES": json.dumps(notices), "CULPRIT": str(culprit)}
    return run_cluster([_PROGRAM, str(folder), how], num_workers, **texts)


def _saved(folder: Path, index: int) -> list[Any]:
    """What a worker saved, one list for each save: steps, and what the replicas counted."""
    path = folder / f"saved-{index}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _check_left_together(folder: Path, every: list[Ended], at_step: int) -> None:
    """All have saved once after one step, that of the notice or a later one, and left."""
    for one in every:
        assert one.code == 42, one.errors
    (steps, counted) = _saved(folder, 0)[0]
    assert at_step <= steps < _NUM_STEPS
    assert counted == len(every) * steps
    for index in range(len(every)):
        assert _saved(folder, index) == [[steps, counted]]


def test_all_save_after_one_step_and_leave(tmp_path: Path) -> None:
    every = _run(tmp_path, "save", [[1, 20, "after"]])
    _check_left_together(tmp_path, every, at_step=20)
    assert "saved after step 2" in every[0].errors
    assert "another process was notified" in every[0].errors
    assert "SIGTERM was sent to process" in every[1].errors


@pytest.mark.parametrize(
    "notices",
    [
        [[0, 20, "after"], [1, 20, "after"], [2, 20, "after"]],
        [[0, 20, "inside"], [1, 20, "after"]],
        [[0, 20, "after"], [2, 21, "after"]],
        [[2, 20, "inside"], [2, 20, "inside"]],
        [[0, 0, "after"]],
        [[1, 0, "inside"], [2, 0, "after"]],
        [[1, 14, "inside"]],
        [[1, _NUM_STEPS - 20, "after"]],
    ],
    ids=str,
)
def test_several_notices_and_early_and_late_ones_are_one(tmp_path: Path, notices) -> None:
    every = _run(tmp_path, "save", notices, num_workers=3)
    _check_left_together(tmp_path, every, at_step=min(step for _, step, _ in notices))


def test_notice_after_the_last_step_changes_nothing(tmp_path: Path) -> None:
    every = _run(tmp_path, "save", [[1, _NUM_STEPS, "after"]])
    for index, one in enumerate(every):
        assert one.code == 0, one.errors
        assert f"done {2 * _NUM_STEPS}" in one.output
        assert _saved(tmp_path, index) == []


def test_grace_is_trained_through_between_two_saves_of_all(tmp_path: Path) -> None:
    every = _run(tmp_path, "grace", [[1, 20, "after"]], num_workers=3)
    assert [one.code for one in every] == [42] * 3, every[0].errors
    (first, last) = _saved(tmp_path, 0)
    assert 20 <= first[0] < last[0]
    assert last[1] == 3 * last[0]
    assert [_saved(tmp_path, index) for index in (1, 2)] == [[first, last]] * 2


@pytest.mark.parametrize("culprit", [0, 1])
def test_worker_that_dies_while_it_saves_is_named(tmp_path: Path, culprit: int) -> None:
    every = _run(tmp_path, "die in save", [[0, 20, "after"]], num_workers=3, culprit=culprit)
    for index, one in enumerate(every):
        if index != culprit:
            assert one.code == 1, one.errors
            assert f"UnavailableError: worker {culprit} (127.0.0.1:" in one.errors
            assert "died" in one.errors


@pytest.mark.parametrize("culprit", [0, 1])
def test_others_keep_their_exit_code_where_one_dies_after_all_have_saved(
    tmp_path: Path, culprit: int
) -> None:
    every = _run(tmp_path, "die at exit", [[1, 20, "after"]], num_workers=3, culprit=culprit)
    codes = [one.code for one in every]
    assert codes == [-signal.SIGKILL if index == culprit else 42 for index in range(3)]


def test_error_of_one_is_raised_in_all(tmp_path: Path) -> None:
    every = _run(tmp_path, "error", [], num_workers=3, culprit=1)
    assert [one.code for one in every] == [1] * 3
    for index in (0, 2):
        message = every[index].errors.split("UnavailableError: ")[-1]
        assert "worker 1 (127.0.0.1:" in message
        assert "ValueError: a bug of one worker" in message


@pytest.mark.parametrize("number", range(5))
def test_counted_once_by_every_replica_through_a_notice_at_any_moment(
    tmp_path: Path, number: int
) -> None:
    """Show 2: 4 workers, 8 epochs of 15 steps, one SIGTERM, restart, one checkpoint."""
    chance = random.Random(f"preempted {number}")
    culprit, at_step = chance.randrange(4), chance.randrange(_NUM_STEPS - 20)
    for one in _run(tmp_path, "checkpoint", [[culprit, at_step, "inside"]], num_workers=4):
        assert one.code == 42, one.errors
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    assert checkpoint.name == "ckpt-1"
    for one in _run(tmp_path, "checkpoint", [], num_workers=4):
        assert one.code == 0, one.errors
        assert f"done {4 * _NUM_STEPS}\n" in one.output
        assert f"step {at_step + 1}\n" not in one.output
        assert f"step {_NUM_STEPS}\n" in one.output
    assert list((tmp_path / "checkpoints").iterdir()) == [checkpoint]
