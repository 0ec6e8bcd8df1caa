"""The benchmark with our real service; peers where their environments are."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks import input_work
from benchmarks.cases import Environments
from benchmarks.input_service import run, run_input_service
from benchmarks.input_service.cases import SIDES
from benchmarks.runner import Effort
from benchmarks.workers.starved_device import tree_cpu_s

_EFFORT = Effort(num_rounds=1)


def test_missing_peers_are_skipped_and_named(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    nowhere = Environments(peers=tmp_path)
    assert run_input_service(nowhere, _EFFORT, console, tmp_path, only="nothing")
    text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert text.count("`make .venv-peers/.complete` makes it") == 3
    assert json.loads((tmp_path / "input_service.json").read_text())["rows"] == []


def test_processor_time_is_that_of_this_process_at_least() -> None:
    before_s = tree_cpu_s()
    sum(number * number for number in range(2_000_000))
    assert tree_cpu_s() > before_s > 0


def test_batches_follow_from_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL")
    input_work._write_images(tmp_path)
    monkeypatch.setattr(input_work, "_folder", lambda: tmp_path)
    first, labels = input_work.make_batch("jpeg", 3)
    again, _ = input_work.make_batch("jpeg", 3)
    assert first.shape == (16, 224, 224, 3)
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(labels, np.arange(48, 64) % 10)
    assert not np.array_equal(first, input_work.make_batch("jpeg", 4)[0])


@pytest.mark.slow
def test_our_service_beside_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL")
    pytest.importorskip("tokenizers")
    ours = dataclasses.replace(SIDES[0], environment="ours")
    monkeypatch.setattr(run, "SIDES", (ours, dataclasses.replace(ours, name="again")))
    console = Console(file=io.StringIO(), width=200)
    here = Environments(ours=Path(sys.executable))
    assert run_input_service(here, _EFFORT, console, tmp_path, only="Objects", is_quick=True)
    rows = json.loads((tmp_path / "input_service.json").read_text())["rows"]
    assert [row["num_workers"] for row in rows] == [0, 1]
    for row in rows:
        assert 0 < row["ours"] < 0.2
        assert 0.3 < row["ratio"] < 3
    assert (tmp_path / "input_service.png").stat().st_size > 1000
