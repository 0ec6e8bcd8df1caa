"""Each benchmark runs at its smallest size, writes its figures, and draws them."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import BENCHMARKS

_REPOSITORY = Path(__file__).parents[1]
_LIMIT_S = 300.0
# What is measured is more than nothing: seconds, speeds, and ratios of them.
_MEASURED = re.compile(r"(ours|reference|base|epochs)(_rounds)?|ratio\w*|\w*_per_s|\w+_epoch_s")

# What `--only` says in rows of their own.
_PARTS = {"first_step": ["MLP", "two workers"], "checkpoint": ["waits for", "behind"]}
_ROWS = [(name, part) for name in BENCHMARKS for part in _PARTS.get(name, [""])]
# Other commands, OUT for the folder of their results.
_COMMANDS = (
    "compare HEAD run_overhead --only 'MLP, 1 CPU' --starts 1 --rounds 1 --round-s 0.05"
    " --output OUT",
    "gpu --tiny --only mlp-fit-100,mlp-jax-scan-by --rounds 1 --round-s 0.2 --profile --gated"
    " --output OUT",
    "report --results benchmarks/results --picture OUT/overview.png",
)
# A comparison says with these that one tree is slower, and that something else runs.
_CODES = {"compare": (0, 1, 4)}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "part"), _ROWS)
def test_smallest_size(name: str, part: str, tmp_path: Path) -> None:
    if name == "scaling" and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("Each of two workers needs a core.")
    arguments = [name, "--smallest", "--only", part, "--peers", "nowhere"]
    _run(["benchmarks", *arguments, "--output", str(tmp_path)], (0,))
    assert [one.name for one in tmp_path.iterdir()] == ["smallest"]
    (path,) = (tmp_path / "smallest").glob("*.json")
    results = json.loads(path.read_text(encoding="utf-8"))
    assert (path.stem, results["is_smallest"], results["failures"]) == (name, True, [])
    assert results["rows"]
    _check(results)
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("command", _COMMANDS, ids=lambda command: command.split()[0])
def test_other_commands(command: str, tmp_path: Path) -> None:
    name, *arguments = shlex.split(command.replace("OUT", str(tmp_path)))
    if name == "compare" and not (_REPOSITORY / ".git").exists():
        pytest.skip("Revisions are compared in a repository.")
    _run([f"benchmarks.{name}", *arguments], _CODES.get(name, (0,)))
    found = [json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.glob("*.json")]
    assert found or [*tmp_path.glob("*.png")]
    for results in found:
        assert results.get("rows") or [one["status"] for one in results["sides"]] == ["done"] * 2
    _check(found)


def _run(arguments: list[str], codes: tuple[int, ...]) -> str:
    paths = [str(_REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")]
    ended = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=_REPOSITORY,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert ended.returncode in codes, ended.stdout + ended.stderr
    return ended.stdout


def _check(results: Any) -> None:
    """All numbers are finite, and what is measured is more than nothing."""
    numbers = [*_numbers(results)]
    assert all(math.isfinite(number) for _, number in numbers)
    assert all(number > 0 for is_measured, number in numbers if is_measured)
    assert any(is_measured for is_measured, _ in numbers) or not results


def _numbers(found: Any, *, is_measured: bool = False) -> Iterator[tuple[bool, float]]:
    if isinstance(found, dict):
        for key, value in found.items():
            is_named = _MEASURED.fullmatch(key) is not None
            yield from _numbers(value, is_measured=is_measured or is_named)
    elif isinstance(found, list):
        for one in found:
            yield from _numbers(one, is_measured=is_measured)
    elif isinstance(found, int | float) and not isinstance(found, bool):
        yield is_measured, found
