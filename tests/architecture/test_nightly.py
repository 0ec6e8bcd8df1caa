"""The list of tests that `make test` leaves out names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests.slow_rows import NIGHTLY, missing_nightly_rows

_ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"(tests/[\w/]+\.py)::(test_\w+)(\[.+\])?")


def test_each_line_is_a_test_that_exists() -> None:
    lines = (_ROOT / "tests/nightly.txt").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if not line.startswith("#")]
    assert rows == sorted(set(rows))
    for row in rows:
        match = _ROW.fullmatch(row)
        assert match is not None, row
        source = (_ROOT / match[1]).read_text(encoding="utf-8")
        assert f"def {match[2]}(" in source, row


def test_row_of_a_collected_file_that_names_no_test_is_found() -> None:
    row = min(NIGHTLY)
    file = row.partition("::")[0]
    of_file = [other for other in NIGHTLY if other.startswith(f"{file}::")]
    assert missing_nightly_rows([f"{file}::test_other", *of_file]) == []
    assert missing_nightly_rows([f"{file}::test_other", *set(of_file) - {row}]) == [row]
