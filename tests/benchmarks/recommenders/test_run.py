"""The benchmark on real servers; peers where their environments are."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.cases import Environments, whole_side
from benchmarks.recommenders import run, run_recommenders
from benchmarks.recommenders.cases import COMPARISONS, Comparison
from benchmarks.runner import Effort

_EFFORT = Effort(num_rounds=1, round_s=0.01)


def test_missing_peers_are_skipped_and_named(tmp_path: Path) -> None:
    nowhere = Environments(peers=tmp_path, tfra=tmp_path)
    console = Console(file=io.StringIO(), width=200)
    assert run_recommenders(nowhere, _EFFORT, console, tmp_path, is_quick=True)
    text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert text.count("makes it") == 3
    assert text.count("says how to make it") == 1
    assert json.loads((tmp_path / "recommenders.json").read_text())["rows"] == []


@pytest.mark.slow
def test_our_keyed_table_beside_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keyed = dataclasses.replace(COMPARISONS[0].options, is_keyed=True)
    one = Comparison("keys", keyed, whole_side("again", "stratagem_tables"))
    monkeypatch.setattr(run, "by_options", lambda only, is_quick: [one.quick()])
    console = Console(file=io.StringIO(), width=200)
    assert run_recommenders(Environments(), _EFFORT, console, tmp_path, is_quick=True)
    rows = json.loads((tmp_path / "recommenders.json").read_text())["rows"]
    assert [row["case"].partition(": ")[2] for row in rows] == [
        "pull, 1,000 ids",
        "pull and push, 1,000 ids",
    ]
    for row in rows:
        assert 0.1 < row["ratio"] < 10
        assert row["sent_bytes_per_id"] == row["reference_sent_bytes_per_id"] > 0
    assert (tmp_path / "recommenders.png").stat().st_size > 1000
