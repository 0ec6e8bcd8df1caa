"""Summary of a record of tests, and what a record says of a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from validation.on_gpu.recording import NOT_REACHED, missing_library
from validation.on_gpu.summary import read_record, results, summarize, to_text, write_summary

_FILE = "tests/unit/strategies/test_elastic_admission.py"


def _entry(name: str, outcome: str, **fields: Any) -> dict[str, Any]:
    return {"kind": "test", "name": f"{_FILE}::{name}", "outcome": outcome, **fields}


_ENTRIES = [
    _entry("test_a", "passed", duration_s=0.5, allocations=3),
    _entry("test_b", "passed", duration_s=0.1, allocations=0),
    _entry("test_b", "failed", duration_s=0.2, reason="the test left 0x1f", text="whole"),
    _entry("test_c", "failed", duration_s=2.0, reason="the test left 17\nmore", text="all"),
    _entry("test_d", "skipped", reason="no GPU"),
    _entry("test_e", "skipped", reason=NOT_REACHED),
    _entry("test_f", "passed", lookups={"in place of several": 1}),
    {"kind": "warning", "name": "", "text": "UserWarning: slow\nvery"},
]


def test_a_test_has_the_worst_outcome_of_its_phases() -> None:
    outcomes = {name.rpartition("::")[2]: one["outcome"] for name, one in results(_ENTRIES).items()}
    assert outcomes["test_b"] == "failed"
    assert outcomes["test_a"] == "passed"


def test_like_failures_count_together_and_what_was_not_reached_apart() -> None:
    summary = summarize(_ENTRIES)
    assert summary["total"] == {
        "failed": 2,
        "not reached": 1,
        "passed": 2,
        "passed, computed on the GPU": 1,
        "skipped": 1,
    }
    assert summary["rooms"] == {"strategies": summary["total"]}
    names = [f"{_FILE}::test_b", f"{_FILE}::test_c"]
    assert summary["failures"] == {"the test left N": names}
    assert summary["skips"] == {"no GPU": 1, NOT_REACHED: 1}
    assert summary["warnings"] == {"UserWarning: slow": 1}
    assert summary["slowest"][0] == [f"{_FILE}::test_c", 2.0]
    assert "2 x the test left N" in to_text(summary)


def test_files_of_a_record_that_was_cut_off(tmp_path: Path) -> None:
    lines = [json.dumps(entry) for entry in _ENTRIES]
    (tmp_path / "record.jsonl").write_text("\n".join([*lines, lines[0][:20]]))
    assert len(read_record(tmp_path / "record.jsonl")) == len(_ENTRIES)
    write_summary(tmp_path)
    assert (tmp_path / "failed.txt").read_text() == f"{_FILE}::test_b\n{_FILE}::test_c\n"
    assert (tmp_path / "alone.txt").read_text() == f"{_FILE}::test_f\n"
    assert "whole" in (tmp_path / "failures.log").read_text()
    assert json.loads((tmp_path / "summary.json").read_text()) == summarize(_ENTRIES)
    assert read_record(tmp_path / "none.jsonl") == []


def test_missing_library_is_read_off_an_error() -> None:
    error = "E   ModuleNotFoundError: No module named 'ray.train'"
    assert missing_library(error) == "ray"
    assert missing_library("E   ModuleNotFoundError: No module named 'stratagem.lost'") is None
    assert missing_library("E   ImportError: cannot import name 'ray'") is None
