"""The benchmark on two real processes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.allreduce import run_allreduce
from benchmarks.allreduce.run import CLUSTERS, SIZES_BYTES
from benchmarks.cases import Environments
from benchmarks.runner import Effort


@pytest.mark.slow
def test_two_processes_sum_and_tell(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_CACHE_DIR", str(tmp_path / "cache"))
    console = Console(width=150, record=True, file=io.StringIO())
    went_well = run_allreduce(
        Environments(peers=Path("nowhere")),
        Effort(num_rounds=1),
        console,
        tmp_path,
        only="2 processes",
        is_quick=True,
    )
    written = json.loads((tmp_path / "allreduce.json").read_text(encoding="utf-8"))
    assert went_well, written["failures"]
    assert [row["size_bytes"] for row in written["rows"]] == [2**12, 2**14] * 2
    for row in written["rows"]:
        has_groups = "devices" in row["cluster"]
        names = {"compiler", "ring", "to one device"} | ({"hierarchical"} if has_groups else set())
        assert set(row["times_s"]) == names
        assert row["chosen"] in names
    assert "Skipped: PyTorch Gloo" in console.export_text()


def test_sizes_and_clusters_are_those_that_were_asked_for() -> None:
    assert (SIZES_BYTES[0], SIZES_BYTES[-1]) == (4 * 2**10, 256 * 2**20)
    assert {cluster.num_processes for cluster in CLUSTERS} == {2, 4}
