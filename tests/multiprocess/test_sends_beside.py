"""Sends beside the steps, of several processes: the numbers of sends in a step's program."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.multiprocess.cluster import PROGRAMS, ended, run_cluster, started

_PROGRAM = str(PROGRAMS / "sends_beside.py")


@pytest.mark.slow
@pytest.mark.parametrize(("count", "size"), [(2, 1), (4, 2)])
def test_processes_train_to_what_sends_in_the_step_do(tmp_path: Path, count, size) -> None:
    for process in run_cluster([_PROGRAM, str(size), str(tmp_path)], count):
        assert process.code == 0, process.errors
    for rank in range(count):
        found = np.load(tmp_path / f"process-{rank}.npz")
        beside = [name for name in found.files if " True " in name]
        assert len(beside) == len(found.files) / 2 > 20
        for name in beside:
            wanted = found[name.replace(" True ", " False ")]
            np.testing.assert_allclose(found[name], wanted, rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"), [("kill", "died"), ("stop", "has not answered for")], ids=str
)
def test_lost_process_in_a_send_is_named(how: str, words: str) -> None:
    program = str(PROGRAMS / "sends_lost.py")
    with started([program, how], 2, STRATAGEM_PEER_TIMEOUT_S="4") as processes:
        survivor = ended(processes[0])
        processes[1].kill()  # nothing else ends one that is stopped
    assert survivor.code == 1, survivor.errors
    message = survivor.errors.split("UnavailableError: ")[-1]
    assert "worker 1 (127.0.0.1:" in message, survivor.errors
    assert words in message
    assert "done" not in survivor.output


@pytest.mark.slow
def test_a_step_ends_while_a_fragment_is_under_way(tmp_path: Path) -> None:
    program = str(PROGRAMS / "sends_overlap.py")
    processes = run_cluster([program, str(tmp_path)], 2, STRATAGEM_STUCK_TIMEOUT_S="30")
    lines = [one.output.splitlines()[-1] for one in processes if one.code == 0]
    assert len(lines) == 2, processes
    assert lines[0] == lines[1]
    assert lines[0].startswith("done")
