"""The benchmark: what is asked of workers, and the benchmark on real ones with a small table."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmarks.cases import Environments
from benchmarks.placement import measuring, run_placement
from benchmarks.placement.cases import CASES, case_on_gpu
from benchmarks.placement.measuring import largest_difference, measure
from benchmarks.runner import Effort
from benchmarks.worker_process import WorkerError

CASE = dataclasses.replace(CASES[0], sides=CASES[0].sides[:2])
EFFORT = Effort(num_rounds=2, round_s=1.0)


class FakeWorker:
    """Answers at once; each epoch takes it 0.25 s, and ten steps."""

    trained: dict[str, float]
    asked: list[tuple[str, int]]
    ended: list[str]

    def __init__(self, name: str, command: list[str], variables: dict[str, str]) -> None:
        self.name = name
        self.options = json.loads(command[3])
        self.flags = variables.get("XLA_FLAGS", "")

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *error: object) -> None:
        self.ended.append(self.name)

    def read_answer(self, limit_s: float) -> dict[str, Any]:
        return {"versions": {"python": "3"}}

    def ask(self, question: dict[str, Any], limit_s: float) -> dict[str, Any]:
        if question["kind"] == "train":
            self.asked.append((self.name, question["epochs"]))
            return {"steps": 10 * question["epochs"], "seconds": 0.25 * question["epochs"]}
        if question["kind"] == "weights":
            np.savez(question["path"], table=np.full(3, self.trained.get(self.name, 1.0)))
            return {}
        if question["kind"] == "held":
            return {"held": {"cpu:0": 4}, "peak": {}}
        assert self.options["dump"] in self.flags
        assert bool(self.flags) == bool(self.options["dump"])
        return {"exchanged": {"step: all-reduce": 20}, "sent": {}, "fed": {}, "steps": 10}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeWorker]:
    FakeWorker.trained, FakeWorker.asked, FakeWorker.ended = {}, [], []
    monkeypatch.setattr(measuring, "WorkerProcess", FakeWorker)
    return FakeWorker


def test_sides_take_turns_for_as_long(fake: type[FakeWorker]) -> None:
    figures, versions = measure(CASE, Environments(), EFFORT)
    assert versions == {"python": "3"}
    assert [one.steps_per_s for one in figures] == [(40.0, 40.0)] * 2
    assert figures[1].exchanged_bytes == {"step: all-reduce": 2.0}
    first, second = (one.name for one in CASE.sides)
    rounds = [(first, 4), (second, 4), (second, 4), (first, 4)]
    assert fake.asked == [(first, 1), (second, 1), (first, 1), (second, 1), *rounds]
    assert fake.ended == [second, first]


def test_large_sides_are_not_there_at_once(fake: type[FakeWorker]) -> None:
    figures, _ = measure(dataclasses.replace(CASE, together=False), Environments(), EFFORT)
    assert [one.steps_per_s for one in figures] == [(40.0, 40.0)] * 2
    first, second = (one.name for one in CASE.sides)
    assert fake.asked == [(name, count) for name in (first, second) for count in (1, 1, 4, 4)]
    assert fake.ended == [first, second]


def test_other_weights_are_refused(fake: type[FakeWorker]) -> None:
    fake.trained["shard_state=all"] = 1.0001
    with pytest.raises(WorkerError, match="trains to other weights than Mirrored"):
        measure(CASE, Environments(), EFFORT)
    assert len(fake.ended) == 2


def test_difference_is_relative_to_large_numbers(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", small=np.array([0.0, 0.5]), large=np.array([1000.0]))
    np.savez(tmp_path / "b.npz", small=np.array([0.0, 0.6]), large=np.array([1200.0]))
    assert largest_difference(tmp_path / "a.npz", tmp_path / "b.npz") == pytest.approx(0.2)
    assert largest_difference(tmp_path / "a.npz", tmp_path / "a.npz") == 0.0


@pytest.mark.slow
def test_sides_train_the_same_and_tell(tmp_path: Path) -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    effort = Effort(num_rounds=1, round_s=0.1)
    went_well = run_placement(
        Environments(), effort, console, tmp_path, only="Adagrad", is_quick=True
    )
    written = json.loads((tmp_path / "placement.json").read_text(encoding="utf-8"))
    assert went_well, written["failures"]
    rows = {row["name"]: row for row in written["rows"]}
    assert len(rows) == 6
    mirrored, central = rows["Mirrored"], rows["CentralStorage"]
    # Each replica has the table, what Adagrad keeps of it, and as much of the dense layers.
    dense = 4 * (512 * 128 + 128 + 128 * 64 + 64 + 64 + 1)
    state = 2 * (4 * 4_000 * 64 + dense)
    assert mirrored["held_bytes"] == pytest.approx(state, abs=64)
    assert rows["shard_state=all"]["held_bytes"] == pytest.approx(state / 2, rel=0.01)
    assert rows["Hybrid, sharded"]["held_bytes"] == pytest.approx(state / 2 + dense, rel=0.01)
    assert rows["Hybrid, central"]["held_bytes"] == pytest.approx(2 * dense, abs=64)
    assert central["held_bytes"] < 64
    assert central["other_held_bytes"] == pytest.approx(state, abs=64)
    pinned = rows["Hybrid, pinned_host"]
    assert pinned["held_bytes"] < 4096  # what has less than 1,024 elements
    assert pinned["held_bytes"] + pinned["pinned_bytes"] == pytest.approx(state, rel=0.01)
    # Rows to 64 examples of 8 ids, and all dense weights to both.
    assert central["to_replicas_bytes"] == pytest.approx(64 * 8 * 256 + 2 * dense, abs=64)
    assert mirrored["to_replicas_bytes"] == mirrored["to_other_bytes"] == 0
    assert mirrored["exchanged_bytes"]["jit__one_step: all-reduce"] == 2 * dense
    assert all(row["difference"] <= 1e-5 for row in rows.values())


@pytest.mark.slow
def test_table_on_the_host_trains_beside_all_on_one_device() -> None:
    """As on a GPU, with a CPU device in its place."""
    case = case_on_gpu(4_096_000, gpu_bytes=10**9, compute="cpu:1")
    variables = {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    figures, _ = measure(
        dataclasses.replace(case, variables=variables),
        Environments(),
        Effort(num_rounds=1, round_s=0.1),
    )
    rows, central, hybrid, mirrored = figures
    assert rows.held_bytes == pytest.approx(mirrored.held_bytes, abs=64)
    assert rows.other_held_bytes < 64
    assert central.held_bytes < 64
    assert central.other_held_bytes == pytest.approx(rows.held_bytes, abs=64)
    assert hybrid.other_held_bytes == 2 * 4_096_000
    # The rows, and for all but the hybrid the dense layers.
    assert hybrid.to_replicas_bytes == pytest.approx(4096 * 8 * 256, abs=64)
    assert central.to_replicas_bytes > hybrid.to_replicas_bytes
    assert rows.to_replicas_bytes < 64
