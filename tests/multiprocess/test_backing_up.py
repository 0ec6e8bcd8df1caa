"""Several workers go on at the next batch after one of them was killed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.multiprocess.cluster import PROGRAMS, run_cluster, started

_PROGRAM = str(PROGRAMS / "backing_up.py")


def _results(folder: Path, **variables: str) -> list[dict[str, Any]]:
    victim = "-2" if folder.name == "undisturbed" else "-1"
    every = run_cluster([_PROGRAM, str(folder), victim], 2, **variables)
    for one in every:
        assert one.code == 0, one.errors
    return [dict(np.load(folder / f"process-{rank}.npz")) for rank in range(2)]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("alone") / "undisturbed"
    folder.mkdir()
    return _results(folder)


def _assert_same(got: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            np.testing.assert_array_equal(one[name], value, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_group_that_lost_a_worker_ends_with_the_weights_of_one_that_did_not(
    victim: int, wanted: Any, tmp_path: Path
) -> None:
    with started([_PROGRAM, str(tmp_path), str(victim)], 2) as processes:
        assert processes[victim].wait(timeout=300) == -signal.SIGKILL
    assert [path.name for path in (tmp_path / "backup").glob("backup-?")] == ["backup-5"]
    _assert_same(_results(tmp_path), wanted)
    assert (tmp_path / "first").read_text() == "10"
    assert not (tmp_path / "backup").exists()


@pytest.mark.slow
@pytest.mark.parametrize("in_memory", [False, True])
def test_state_in_parts_is_found_again(in_memory: bool, tmp_path: Path) -> None:
    variables = {"STRATAGEM_TEST_SHARD_STATE": "all"}
    if in_memory:
        variables["STRATAGEM_MEMORY_DIR"] = str(tmp_path / "memory")
    undisturbed, folder = tmp_path / "undisturbed", tmp_path / "killed"
    undisturbed.mkdir(), folder.mkdir()
    wanted = _results(undisturbed, **variables)
    with started([_PROGRAM, str(folder), "1"], 2, **variables) as processes:
        assert processes[1].wait(timeout=300) == -signal.SIGKILL
    got = _results(folder, **variables)
    assert (folder / "first").read_text() in (("10", "11") if in_memory else ("10",))
    _assert_same(got, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_state_of_each_step_is_found_in_memory(victim: int, wanted: Any, tmp_path: Path) -> None:
    memory = {"STRATAGEM_MEMORY_DIR": str(tmp_path / "memory")}
    with started([_PROGRAM, str(tmp_path), str(victim)], 2, **memory) as processes:
        assert processes[victim].wait(timeout=300) == -signal.SIGKILL
    _assert_same(_results(tmp_path, **memory), wanted)
    # The other one may have heard of the loss before it has kept its own step 11.
    assert (tmp_path / "first").read_text() in ("10", "11")


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_all_save_and_leave_when_one_got_notice(victim: int, wanted: Any, tmp_path: Path) -> None:
    every = run_cluster([_PROGRAM, str(tmp_path), str(victim), "SIGTERM"], 2)
    assert [one.code for one in every] == [42, 42], every
    assert len(list((tmp_path / "backup").glob("backup-?"))) == 1
    _assert_same(_results(tmp_path), wanted)
    assert int((tmp_path / "first").read_text()) in (11, 12)
