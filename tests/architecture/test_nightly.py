"""The tests and the combinations of parameters that `make test` leaves out."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import slow_rows
from tests.slow_rows import NIGHTLY, QUICK_ROWS, covering_rows, spare_combinations

_ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"(tests/[\w/]+\.py)::(test_\w+)(\[.+\])?")


@pytest.mark.parametrize("name", ["nightly.txt", "quick_rows.txt", "versions.txt"])
def test_each_line_is_a_test_that_exists(name) -> None:
    lines = (_ROOT / "tests" / name).read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if not line.startswith("#")]
    assert rows == sorted(set(rows))
    for row in rows:
        match = _ROW.fullmatch(row)
        assert match is not None, row
        source = (_ROOT / match[1]).read_text(encoding="utf-8")
        assert f"def {match[2]}(" in source, row


def test_no_line_is_in_vain() -> None:
    functions = {row.partition("[")[0] for row in NIGHTLY if row.partition("[")[0] in NIGHTLY}
    rows = [*QUICK_ROWS, *(row for row in NIGHTLY if "[" in row)]
    assert not [row for row in rows if row.partition("[")[0] in functions]
    by_hand = {row.partition("[")[0] for row in QUICK_ROWS}
    assert not [row for row in NIGHTLY if row.partition("[")[0] in by_hand]


def test_tests_of_other_versions_are_quick() -> None:
    rows = (_ROOT / "tests/versions.txt").read_text(encoding="utf-8").splitlines()
    assert not [row for row in rows if slow_rows.is_nightly(row)]


@pytest.fixture
def lists(monkeypatch) -> None:
    whole = {"a.py::test_whole", "a.py::test_rows[1]"}
    of_files = {"NIGHTLY": whole, "QUICK_ROWS": {"a.py::test_few[x]"}}
    for name, rows in of_files.items():
        monkeypatch.setattr(slow_rows, name, frozenset(rows))
    monkeypatch.setattr(slow_rows, "_CHOSEN_BY_HAND", frozenset({"a.py::test_few"}))


ROWS = ["whole[1]", "rows[1]", "rows[2]", "few[x]", "few[y]", "whole_other", "few"]


@pytest.mark.usefixtures("lists")
def test_lines_name_tests_or_rows_and_quick_rows_the_only_ones() -> None:
    left_out = [row for row in ROWS if slow_rows.is_nightly(f"a.py::test_{row}")]
    assert left_out == ["whole[1]", "rows[1]", "few[y]", "few"]


@pytest.mark.usefixtures("lists")
def test_line_of_a_collected_file_that_names_no_test_is_found() -> None:
    of_file = {"a.py::test_whole[1]", "a.py::test_rows[1]", "a.py::test_few[x]", "a.py::test_other"}
    assert slow_rows.missing_rows(of_file) == []
    assert slow_rows.missing_rows(of_file - {"a.py::test_few[x]"}) == ["a.py::test_few[x]"]
    assert slow_rows.missing_rows(of_file - {"a.py::test_whole[1]"}) == ["a.py::test_whole"]
    assert slow_rows.missing_rows({"b.py::test_rows[2]"}) == []


class Row:
    """What the choice sees of a row: ids of its parameters, and its markers."""

    def __init__(self, function: str, values: tuple[str, ...], marker: str | None = None) -> None:
        self.nodeid = f"{function}[{'-'.join(values)}]"
        self.callspec = SimpleNamespace(_idlist=values)
        self._marker = marker

    def get_closest_marker(self, name: str) -> bool:
        return name == self._marker


PRODUCT = [*itertools.product("abc", "123456", ["eager", "compiled"])]


@pytest.mark.parametrize("rows", [PRODUCT, PRODUCT[::5], [("a",), ("b",)], [("a", "b-c")]])
def test_chosen_rows_have_each_value(rows) -> None:
    chosen = [rows[index] for index in covering_rows("test_one", rows)]
    assert {*map(frozenset, zip(*chosen, strict=True))} == {
        *map(frozenset, zip(*rows, strict=True))
    }


def test_product_is_covered_by_as_many_rows_as_its_longest_column() -> None:
    assert len(covering_rows("test_one", PRODUCT)) == 6


def test_function_always_runs_the_same_rows_and_another_one_others() -> None:
    chosen = {name: covering_rows(name, PRODUCT) for name in ("test_one", "test_two")}
    assert chosen["test_one"] == covering_rows("test_one", PRODUCT) != chosen["test_two"]


def test_combinations_are_left_out_of_each_function_by_itself() -> None:
    rows = [Row(name, values) for name in ("test_one", "test_two") for values in PRODUCT]
    spare = spare_combinations([*rows, SimpleNamespace(nodeid="test_without_parameters")])
    assert [row.nodeid.partition("[")[0] for row in spare].count("test_one") == 24
    assert len(spare) == 48


@pytest.mark.parametrize("way", ["compiled", "eager"])
def test_rows_of_each_way_to_run_have_each_value(way) -> None:
    rows = [Row("test_one", values) for values in PRODUCT]
    spare = {row.nodeid for row in spare_combinations(rows)}
    left = [row.callspec._idlist for row in rows if row.nodeid not in spare]
    assert {value for row in left if way in row for value in row} == {*"abc", *"123456", way}


@pytest.mark.parametrize(
    ("values", "marker"),
    [
        (PRODUCT[:4], None),  # few rows
        ([(value,) for value in "abcdefgh"], None),  # each has a value of its own
        (PRODUCT, "every_combination"),
        (PRODUCT, "slow"),  # left out already
    ],
)
def test_rows_that_are_not_left_out(values, marker) -> None:
    assert spare_combinations([Row("test_one", row, marker) for row in values]) == []


def test_slow_rows_cover_nothing() -> None:
    slow = [Row("test_one", values, "slow") for values in PRODUCT if values[0] == "a"]
    quick = [Row("test_one", values) for values in PRODUCT if values[0] != "a"]
    spare = {row.nodeid for row in spare_combinations([*slow, *quick])}
    left = [row.callspec._idlist for row in quick if row.nodeid not in spare]
    assert {value for row in left for value in row} == {*"bc", *"123456", "eager", "compiled"}
