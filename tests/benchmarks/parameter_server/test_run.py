"""The benchmark on real servers."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.cases import Environments
from benchmarks.parameter_server import run_parameter_server
from benchmarks.runner import Effort


@pytest.mark.slow
@pytest.mark.parametrize(
    ("only", "peers", "sides"),
    [
        ("1,000 rows", Path("nowhere"), {"ours"}),
        ("pull 1,000 rows", Environments.peers, {"ours", "reference"}),
        ("closures", Environments.peers, {"reference"}),
    ],
)
def test_sides_work_and_tell(tmp_path: Path, only: str, peers: Path, sides: set[str]) -> None:
    if "reference" in sides and not peers.is_file():
        pytest.skip("no environment of the peers")
    console = Console(width=150, record=True, file=io.StringIO())
    effort = Effort(num_rounds=1, round_s=0.1)
    went_well = run_parameter_server(
        Environments(peers=peers), effort, console, tmp_path, only=only, is_quick=True
    )
    written = json.loads((tmp_path / "parameter_server.json").read_text(encoding="utf-8"))
    assert went_well, written["failures"]
    assert len(written["rows"]) == 3 if len(sides) == 1 else 1
    for row in written["rows"]:
        assert {side for side in ("ours", "reference") if row[side]} == sides
        assert ("ratio" in row) == (len(sides) == 2)
    assert bool(written["scaling"]) == (only == "closures")
    assert ("Skipped: TensorFlow" in console.export_text()) == ("reference" not in sides)
