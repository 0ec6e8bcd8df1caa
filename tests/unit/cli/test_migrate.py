"""`stratagem migrate`: diff, writing, exit codes and JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import Result

from stratagem.cli import main
from tests.command_runner import CliRunner
from tests.unit.cli.migrate.programs import SG

_TF = "import tensorflow as tf\ntf.Variable(1)\n"
_NEW = f"{SG}sg.Variable(1)\n"


def _call(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["migrate", *map(str, arguments)])


def test_diff_by_default(tmp_path) -> None:
    path = tmp_path / "a.py"
    path.write_text(_TF)
    result = _call(path)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-3:] == [
        "-tf.Variable(1)",
        f"+{SG.rstrip()}",
        "+sg.Variable(1)",
    ]
    assert result.stderr == "1 file: 1 to change, 2 lines, 0 places left to do.\n"
    assert path.read_text() == _TF


def test_write_and_write_again(tmp_path) -> None:
    (tmp_path / "b").mkdir()
    for path in (tmp_path / "a.py", tmp_path / "b" / "c.py"):
        path.write_text(_TF)
    result = _call("--write", tmp_path)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "2 files: 2 changed, 4 lines, 0 places left to do.\n"
    assert (tmp_path / "b" / "c.py").read_text() == _NEW
    assert "0 changed, 0 lines" in _call("--write", tmp_path).stderr


def test_file_that_cannot_be_written_does_not_stop_the_others(tmp_path, monkeypatch) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(_TF)
    replace = Path.replace

    def refuse(self: Path, target: Path) -> Path:
        if target.name == "a.py":
            raise PermissionError(13, "Permission denied", str(target))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", refuse)
    result = _call("--write", tmp_path)
    assert result.exit_code == 1
    assert "Permission denied" in result.stderr
    assert (tmp_path / "a.py").read_text() == _TF
    assert (tmp_path / "b.py").read_text() == _NEW
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.py", "b.py"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (_TF, 1),
        (_NEW, 0),
        ("x = 1\n", 0),
        ("# STRATAGEM: tf.a: do it\nimport tensorflow as tf\ntf.a()\n", 1),
    ],
)
def test_check(tmp_path, text, code) -> None:
    path = tmp_path / "a.py"
    path.write_text(text)
    assert _call("--check", path).exit_code == code
    assert path.read_text() == text


def test_place_left_to_do_is_shown_with_its_line(tmp_path) -> None:
    path = tmp_path / "a.py"
    path.write_text("import tensorflow as tf\ntf.foo()\n")
    result = _call(path)
    assert result.exit_code == 0
    assert f"{path}:2: tf.foo: there is no counterpart yet" in result.stderr


def test_json(tmp_path) -> None:
    (tmp_path / "a.py").write_text(_TF)
    (tmp_path / "b.py").write_text("x = 1\n")
    (tmp_path / "c.py").write_text("def f(:\n")
    result = _call("--json", tmp_path)
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["files"], found["changed_files"], found["errors"]) == (3, 1, 1)
    assert [one["path"].rpartition("/")[2] for one in found["reports"]] == ["a.py", "c.py"]


def test_broken_file_does_not_stop_the_others(tmp_path) -> None:
    (tmp_path / "a.py").write_text("def f(:\n")
    (tmp_path / "b.py").write_text(_TF)
    result = _call("--write", tmp_path)
    assert result.exit_code == 1
    assert "a.py stays as it is. Line 1 does not parse" in result.stderr
    assert (tmp_path / "a.py").read_text() == "def f(:\n"
    assert (tmp_path / "b.py").read_text() == _NEW


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "Missing argument 'PATH...'"),
        (("missing.py",), "'missing.py' does not exist"),
        ((__file__, "--nonsense"), "No such option"),
    ],
)
def test_wrong_use(arguments, words) -> None:
    result = _call(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_file_of_another_kind(tmp_path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("")
    result = _call(path)
    assert result.exit_code == 2
    assert "a.txt is not a program or a notebook" in result.stderr


def test_without_libcst(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "libcst", None)
    (tmp_path / "a.py").write_text(_TF)
    result = _call(tmp_path)
    assert result.exit_code == 1
    assert "stratagem migrate needs libcst, which cannot be imported" in result.stderr
    assert "Fix: pip install 'stratagem[migrate]'" in result.stderr


def test_help_has_the_exit_codes() -> None:
    text = " ".join(_call("--help").stdout.split())
    assert "Exit codes: 0 if done" in text
