"""`python -m validation.on_gpu`: arguments of pytest, environment, and the time limit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from validation.on_gpu.__main__ import main, pytest_arguments, run_environment, wait


def test_files_keep_their_order_and_single_tests_are_dealt_out(tmp_path: Path) -> None:
    arguments = pytest_arguments(["tests/a.py", "tests/b.py"], 4, 60.0, tmp_path)
    assert arguments[-2:] == ["tests/a.py", "tests/b.py"]
    assert arguments[arguments.index("--dist") + 1 :][:2] == ["loadfile", "--no-loadscope-reorder"]
    assert "faulthandler_timeout=90" in arguments
    single = pytest_arguments(["@failed.txt"], 4, 60.0, tmp_path)
    assert single[single.index("--dist") + 1 :] == ["load", "@failed.txt"]
    assert "--numprocesses" not in pytest_arguments(["tests/a.py"], 1, 60.0, tmp_path)


def test_only_a_gpu_gets_its_flags(tmp_path: Path) -> None:
    given = {"XLA_FLAGS": "--xla_one=1", "PYTHONPATH": "/other", "HOME": "/root"}
    environment = run_environment("gpu", tmp_path / "record", 12.5, given)
    assert environment["XLA_FLAGS"] == "--xla_one=1 --xla_gpu_autotune_level=0"
    assert environment["PYTHONPATH"].endswith(":/other")
    assert environment["STRATAGEM_TEST_PLATFORM"] == "gpu"
    assert environment["STRATAGEM_TEST_UNTIL_S"] == "12.5"
    assert run_environment("imitated", tmp_path, 1.0, given)["XLA_FLAGS"] == "--xla_one=1"


@pytest.mark.parametrize(
    ("program", "ended"),
    [
        ("import sys; sys.exit(3)", "exit status 3"),
        ("import time; time.sleep(60)", "exit status -2"),
    ],
)
def test_run_is_interrupted_at_the_limit(program: str, ended: str) -> None:
    program = f"import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); {program}"
    limit_s = 30.0 if "exit(3)" in program else 0.5
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, start_new_session=True)
    assert wait(process, limit_s) == ended


def test_list_names_rooms_and_files_and_runs_nothing(tmp_path: Path) -> None:
    command = ["--list", "--rooms", "profiling", "--output", str(tmp_path / "none")]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    assert "tests/unit/observe/profiling/test_summary.py" in result.output
    assert "tests/unit/strategies/test_elastic_admission.py" not in result.output
    assert not (tmp_path / "none").exists()


def test_empty_file_of_test_ids_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / "failed.txt").write_text("\n")
    command = ["--only", str(tmp_path / "failed.txt"), "--output", str(tmp_path / "none")]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    assert "names no tests" in result.output
    assert not (tmp_path / "none").exists()
