"""Command lines of scripts, modules and programs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from stratagem.launch.functions import command_of


def output_of(command) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.parametrize("folder", ["", "sub/"])
def test_python_file_runs_on_this_interpreter(tmp_path, monkeypatch, folder) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / f"{folder}train.py").write_text("import sys; print(sys.executable, sys.argv)")
    command = command_of(f"{folder}train.py", ["--epochs", "3"])
    printed = f"{sys.executable} ['{folder}train.py', '--epochs', '3']\n"
    assert output_of(command) == printed


@pytest.mark.parametrize("name", ["my_package.train", "my_package", "my_module"])
def test_module_runs_as_python_m_does(tmp_path, monkeypatch, name) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_package").mkdir()
    for file in ("my_package/train.py", "my_package/__main__.py", "my_module.py"):
        (tmp_path / file).write_text("import sys; print(__name__, sys.argv[1:])")
    assert output_of(command_of(name, ["-x"], module=True)) == "__main__ ['-x']\n"


@pytest.mark.parametrize("name", ["train", "./train"])
def test_program_in_the_working_folder_runs(tmp_path, monkeypatch, name) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train").write_text("#!/bin/sh\necho run $1\n")
    (tmp_path / "train").chmod(0o755)
    assert output_of(command_of(name, ["7"])) == "run 7\n"


@pytest.mark.parametrize(
    ("name", "module", "words"),
    [
        ("train.py", False, "There is no file 'train.py' in (?s:.)*a Python script"),
        ("no-such-program", False, "There is no program 'no-such-program'(?s:.)*correct the name"),
        ("./train", False, "There is no program './train'"),
        ("no_such.module", True, "There is no module 'no_such.module'(?s:.)*as for `python -m`"),
        ("", True, "There is no module ''"),
    ],
)
def test_what_does_not_exist_is_named(tmp_path, monkeypatch, name, module, words) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=words):
        command_of(name, module=module)


def test_file_that_cannot_be_executed_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train").write_text("print(1)")
    with pytest.raises(
        PermissionError, match=r"'train' is not executable(?s:.)*name ends in \.py(?s:.)*chmod"
    ):
        command_of("train")
