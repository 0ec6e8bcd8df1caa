"""Summaries, profiles and slow workers of several processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stratagem.observe.events import read_run
from stratagem.observe.goodput import account_for
from stratagem.observe.profiling import read_profile
from stratagem.observe.stragglers import WorkerSummary, summaries_of
from tests.multiprocess.cluster import PROGRAMS, completed
from tests.unit.execution.summary.events import Read

pytestmark = pytest.mark.slow

_SUMMARIES = str(PROGRAMS / "summaries.py")


def test_chosen_worker_is_profiled_while_all_train(tmp_path: Path) -> None:
    ended = completed([str(PROGRAMS / "profiled.py"), str(tmp_path)], 2)
    assert [(tmp_path / f"process-{index}.txt").read_text() for index in (0, 1)] == ["0", "3"]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["worker-1"]
    summary = read_profile(tmp_path)
    assert (summary.num_devices, summary.num_steps) == (1, 3)
    assert summary.parts_s["collectives"] > 0
    assert sum(summary.parts_s.values()) == pytest.approx(summary.whole_s)
    assert "Worker 1, steps 2 to 4" in ended[1].output
    assert "Worker" not in ended[0].output


def _written_by_two(folder: Path, *arguments: str) -> None:
    """The chief writes, and it alone."""
    every = completed([_SUMMARIES, str(folder), *arguments], 2)
    assert [one.output.split("\n")[-2] for one in every] == ["written", "not written"]


def test_loop_is_written_by_the_chief(tmp_path: Path) -> None:
    _written_by_two(tmp_path, "loop")
    assert len(list((tmp_path / "loop").iterdir())) == 1
    found = Read(tmp_path / "loop")
    x = np.random.default_rng(0).random((32, 4), np.float32)
    own = [(step, x[8 * step : 8 * step + 4].sum()) for step in range(3)]
    assert found.numbers("rows") == [(step, pytest.approx(total)) for step, total in own]
    every_row = [(step + 1, x[8 * step : 8 * step + 8].sum()) for step in range(3)]
    assert found.numbers("total") == [(step, pytest.approx(total)) for step, total in every_row]


@pytest.mark.parametrize("shard_state", [[], ["all"]])
def test_chief_writes_what_one_process_does(shard_state: list[str], tmp_path: Path) -> None:
    completed([_SUMMARIES, str(tmp_path / "alone"), "fit", *shard_state], 0)
    _written_by_two(tmp_path / "cluster", "fit", *shard_state)
    for folder in ("fit/train", "fit/validation", "loop"):
        assert len(list((tmp_path / "cluster" / folder).iterdir())) == 1
        ours, wanted = (Read(tmp_path / place / folder) for place in ("cluster", "alone"))
        assert ours.tags == wanted.tags
        assert ours.tags
        for tag in ours.tags:
            assert ours.steps(tag) == wanted.steps(tag)
            if ours.plugin(tag) == "images":
                continue
            for (_, value), (_, other) in zip(ours.tensors(tag), wanted.tensors(tag), strict=True):
                if ours.plugin(tag) == "scalars":
                    np.testing.assert_allclose(value, other, rtol=1e-4)
                else:  # a last bit may put an element into the next bucket
                    np.testing.assert_allclose(value[:, :2], other[:, :2], rtol=1e-3, atol=1e-5)
                    assert value[:, 2].sum() == other[:, 2].sum()


# Workers that are slow: the report names them, and says why.


def _workers(folder: Path, *arguments: str, count: int = 3) -> tuple[WorkerSummary, ...]:
    """Returns the times of the workers in a run of the program."""
    command = [str(PROGRAMS / "stragglers.py"), *arguments]
    completed(command, count, STRATAGEM_RUN_DIR=str(folder))
    run = read_run(folder)
    return summaries_of(run.processes, account_for(run).whole_s)


def _found(workers: tuple[WorkerSummary, ...]) -> dict[str, str]:
    return {one.task: one.slow.cause.value for one in workers if one.slow is not None}


def test_elastic_workers_are_slow_in_input_and_in_computing(tmp_path: Path) -> None:
    slow = ["1:input:0:0.2", "2:compute:0:0.15"]
    workers = _workers(tmp_path, "elastic", "20", "16", *slow, count=4)
    assert _found(workers) == {"worker 1": "input", "worker 2": "compute"}
    first, one, two, _ = workers
    assert one.slow is not None
    assert two.slow is not None
    assert one.slow.late_s == pytest.approx(0.2, rel=0.3)
    assert two.slow.late_s == pytest.approx(0.15, rel=0.3)
    assert (one.times.input_s or 0.0) > (first.times.input_s or 0.0) + 0.1
    assert two.times.busy_s > first.times.busy_s + 0.1
    assert (first.times.peers_s or 0.0) > (one.times.peers_s or 0.0) + 0.1


@pytest.mark.parametrize("cause", ["input", "host"])
def test_mirrored_worker_is_slow(tmp_path: Path, cause: str) -> None:
    workers = _workers(tmp_path, "mirrored", "60", "16", f"1:{cause}:0:0.1")
    assert _found(workers) == {"worker 1": "input" if cause == "input" else "compute"}


@pytest.mark.parametrize("kind", ["elastic", "mirrored"])
def test_equal_workers_are_not_slow(tmp_path: Path, kind: str) -> None:
    """All sleep in their input, so that a busy machine does not make one of them slow."""
    slow = [f"{worker}:input:0:0.1" for worker in range(3)]
    assert _found(_workers(tmp_path, kind, "60", "16", *slow)) == {}
