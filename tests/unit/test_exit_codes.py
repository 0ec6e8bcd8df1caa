"""Exit codes: their values, and the table of the documentation."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import click

import stratagem as sg
from stratagem import errors as exit_codes

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "exit_codes.md"


def test_codes_are_those_of_click_and_of_shells() -> None:
    assert click.ClickException.exit_code == exit_codes.FAILURE
    assert click.UsageError.exit_code == exit_codes.USAGE
    for name, code in (("INT", exit_codes.INTERRUPTED), ("TERM", exit_codes.TERMINATED)):
        finished = subprocess.run(["sh", "-c", f"sh -c 'kill -{name} $$'; exit $?"], check=False)
        assert finished.returncode == code


def test_program_that_saved_exits_with_the_code_that_launchers_resume() -> None:
    assert sg.preemption.EXIT_CODE == exit_codes.RESUMABLE
    assert sg.preemption.GOOGLE_CLOUD_EXIT_CODE == exit_codes.TERMINATED


def test_every_code_is_in_the_table() -> None:
    table = re.findall(r"^\| (\d+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    codes = [value for name, value in vars(exit_codes).items() if name.isupper()]
    assert [int(code) for code in table] == sorted(code for code in codes if isinstance(code, int))
