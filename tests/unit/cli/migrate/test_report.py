"""Printed reports."""

from __future__ import annotations

from pathlib import Path

from stratagem.cli.migrate import report
from stratagem.cli.migrate.files import FileReport

ONE = FileReport(Path("a.py"), "x\n", "y\n", marks=((3, "tf.foo: do it"), (0, "tf.bar: too")))
BROKEN = FileReport(Path("b.py"), error="Line 1 does not parse.")


def test_diff_is_plain_without_a_terminal(capsys) -> None:
    report.show_diff(ONE)
    assert capsys.readouterr().out == "--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-x\n+y\n"


def test_diff_is_colored_on_a_terminal(capsys, monkeypatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    report.show_diff(ONE)
    shown = capsys.readouterr().out
    assert "\x1b[" in shown
    assert "+y" in shown


def test_summary(capsys) -> None:
    report.show_summary([ONE, BROKEN], written=False)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == (
        "a.py:3: tf.foo: do it\n"
        "a.py: tf.bar: too\n"
        "b.py stays as it is. Line 1 does not parse.\n"
        "2 files: 1 to change, 1 line, 2 places left to do, 1 not readable.\n"
    )


def test_dictionary_has_the_files_with_something_to_say() -> None:
    found = report.as_dict([ONE, BROKEN, FileReport(Path("c.py"), "x", "x")])
    assert found["files"] == 3
    assert [one["path"] for one in found["reports"]] == ["a.py", "b.py"]
