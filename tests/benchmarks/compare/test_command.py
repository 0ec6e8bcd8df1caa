"""The command: exit codes, verdicts, refusal under load, and errors of its arguments."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result

from benchmarks.compare import command, rounds
from benchmarks.compare.revisions import Tree
from tests.benchmarks.compare.trees import make_tree
from tests.benchmarks.sides import fake_case, fake_side
from tests.command_runner import CliRunner


def _run(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    ours_s: float,
    *,
    busy_cores: float = 0.0,
    dies: bool = False,
) -> Result:
    """Compares a tree with one whose epoch takes a second."""
    base = make_tree(folder / "base", 1.0)

    @contextlib.contextmanager
    def check_out(commit: str) -> Iterator[Tree]:
        yield base

    case = fake_case(fake_side("ours"))
    monkeypatch.setattr(command, "_TRAINING", {"loop": lambda *arguments: [case]})
    monkeypatch.setattr(command, "HEAD", make_tree(folder / "ours", ours_s, dies=dies))
    monkeypatch.setattr(command, "check_out", check_out)
    monkeypatch.setattr(rounds, "busy_cores", lambda duration_s: busy_cores)
    arguments = ["HEAD", "loop", "--starts", "2", "--rounds", "2", "--output", str(folder)]
    return CliRunner().invoke(command.compare, arguments)


@pytest.mark.parametrize(("ours_s", "code", "word"), [(0.9, 0, "held"), (1.2, 1, "slower")])
def test_verdict_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ours_s: float, code: int, word: str
) -> None:
    result = _run(monkeypatch, tmp_path, ours_s)
    assert result.exit_code == code, result.output
    assert word in result.output
    (row,) = json.loads((tmp_path / "compare.json").read_text())["rows"]
    assert row["ratio"] == pytest.approx(1 / ours_s)


def test_no_verdict_under_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = _run(monkeypatch, tmp_path, 1.2, busy_cores=0.8)
    assert result.exit_code == 4
    assert "No verdict" in result.output
    assert "not judged" in result.output


def test_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = _run(monkeypatch, tmp_path, 1.0, dies=True)
    assert result.exit_code == 3
    assert "out of memory" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-branch", "loop"], "is no revision"),
        (["HEAD", "no_benchmark"], "'no_benchmark' is not one of"),
        (["HEAD", "loop", "--only", "no such case"], "No case contains 'no such case'"),
    ],
)
def test_bad_arguments(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(command.compare, arguments)
    assert result.exit_code == 2
    assert words in result.output
