"""Files: found in folders, read, reported and written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stratagem.cli.migrate import files
from tests.unit.cli.migrate.programs import SG

TF = "import tensorflow as tf\ntf.Variable(1)\n"


def test_folders_are_searched_without_hidden_and_installed_ones(tmp_path) -> None:
    wanted = ["a.py", "b/c.py", "b/d.ipynb"]
    others = [".git/e.py", ".f.py", "venv/g.py", "h.txt", "b/site-packages/i.py", "mine/j.py"]
    for name in (*wanted, *others):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (tmp_path / "mine" / "pyvenv.cfg").write_text("")
    found = files.find_files([tmp_path, tmp_path / "a.py"])
    assert found == [tmp_path / name for name in wanted]


def test_other_file_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"h\.txt is not a program or a notebook"):
        files.find_files([tmp_path / "h.txt"])


def test_report(tmp_path) -> None:
    path = tmp_path / "a.py"
    path.write_text(f"{TF}tf.foo()\n")
    report = files.migrate_file(path)
    assert report.is_changed
    assert report.num_changed_lines == 3  # the import, the variable, and the comment
    assert report.to_dict() == {
        "path": str(path),
        "changed": True,
        "changed_lines": 3,
        "left_to_do": [
            {
                "line": 4,
                "text": "tf.foo: there is no counterpart yet, see docs/migrate/tool.md",
            }
        ],
        "error": None,
    }
    assert files.summary([report]) == {
        "files": 1,
        "changed_files": 1,
        "changed_lines": 3,
        "left_to_do": 1,
        "errors": 0,
    }


def test_diff_without_a_line_break_at_the_end(tmp_path) -> None:
    path = tmp_path / "a.py"
    path.write_text("import tensorflow as tf\ntf.Variable")
    lines = files.migrate_file(path).diff().splitlines()
    assert lines[-2:] == [f"+{SG.rstrip()}", "+sg.Variable"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"def f(:\n", "Line 1 does not parse"),
        (b"import tensorflow\nprint 'a'\n", "Line 2 does not parse"),
        (b"\xff\xfe\x00", "not text in UTF-8"),
        (b"x = 1\x00\n", "does not parse"),
    ],
)
def test_unreadable_file_has_an_error(tmp_path, content, words) -> None:
    path = tmp_path / "a.py"
    path.write_bytes(content)
    report = files.migrate_file(path)
    assert words in (report.error or "")
    assert not report.is_changed


def test_missing_file_has_an_error(tmp_path) -> None:
    assert "No such file" in (files.migrate_file(tmp_path / "a.py").error or "")


def test_notebook_that_is_none(tmp_path) -> None:
    path = tmp_path / "a.ipynb"
    path.write_text("{}")
    assert "This is not a notebook" in (files.migrate_file(path).error or "")


def test_marks_of_a_notebook(tmp_path) -> None:
    path = tmp_path / "a.ipynb"
    cell = {"cell_type": "code", "source": "import tensorflow as tf\ntf.foo"}
    path.write_text(json.dumps({"cells": [cell]}))
    report = files.migrate_file(path)
    assert [line for line, _ in report.marks] == [0]
    assert report.marks[0][1].startswith("tf.foo: ")


def test_written_file_keeps_its_permissions_and_line_ends(tmp_path) -> None:
    path = tmp_path / "a.py"
    path.write_bytes(TF.replace("\n", "\r\n").encode())
    path.chmod(0o750)
    files.write(files.migrate_file(path))
    assert path.read_bytes() == f"{SG}sg.Variable(1)\n".replace("\n", "\r\n").encode()
    assert path.stat().st_mode & 0o777 == 0o750
    assert [one.name for one in tmp_path.iterdir()] == ["a.py"]


def test_link_stays_a_link(tmp_path) -> None:
    path, link = tmp_path / "a.py", tmp_path / "b.py"
    path.write_text(TF)
    link.symlink_to(path)
    files.write(files.migrate_file(link))
    assert link.is_symlink()
    assert "sg.Variable" in path.read_text()


def test_failed_write_leaves_the_file(tmp_path, monkeypatch) -> None:
    path = tmp_path / "a.py"
    path.write_text(TF)
    report = files.migrate_file(path)

    def refuse(self: Path, mode: int) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(Path, "chmod", refuse)
    written = files.write(report)
    assert (written.error, written.is_changed) == ("no", False)
    assert path.read_text() == TF
    assert [one.name for one in tmp_path.iterdir()] == ["a.py"]
