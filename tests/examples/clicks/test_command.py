"""What a user runs: under the limit, to the AUC, and beside one device."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_LIMIT_S = 900
_NEEDED_GB = 12


def _run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )


def _available_gb() -> float:
    (kib,) = re.findall(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text())
    return 1024 * int(kib) / 1e9


def test_limit_that_the_table_fits_in_is_refused() -> None:
    finished = _run("examples.clicks", "--num-ids", "10000", "--limit-gb", "2")
    assert finished.returncode == 1
    assert "one process can make the whole table under 2.0 GB" in finished.stderr


@pytest.mark.slow
def test_table_that_no_process_has_room_for_is_trained(tmp_path) -> None:
    if _available_gb() < _NEEDED_GB:
        pytest.skip(f"{_available_gb():.1f} GB of memory are free, and {_NEEDED_GB} are needed")
    finished = _run("examples.clicks", "--output", str(tmp_path))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["auc"] >= 0.81
    table_bytes = 4 * results["options"]["num_ids"] * results["options"]["width"]
    assert len(results["used"]) == 1 + 3 + 2
    for one in results["used"]:
        assert one["peak_bytes"] < one["limit_bytes"] < table_bytes
    assert (tmp_path / "staleness.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_workers_that_wait_for_nobody_reach_the_auc_of_one_device(tmp_path) -> None:
    finished = _run("examples.clicks.compare", "--output", str(tmp_path))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    auc = results["auc"]
    assert set(auc) == {"one device", "one worker", "4 workers"}
    assert auc["one device"] > 0.8
    assert auc["one worker"] == pytest.approx(auc["one device"], abs=1e-3)
    assert auc["4 workers"] == pytest.approx(auc["one device"], abs=0.01)
    assert set(results["staleness"]["one worker"]) == {"0"}
    assert len(results["staleness"]["4 workers"]) > 1  # else nothing was shown
    assert (tmp_path / "staleness.png").read_bytes().startswith(b"\x89PNG")
