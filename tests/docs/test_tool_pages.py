"""Recorded outputs of commands: on their pages, in their pictures, and still what they print."""

from __future__ import annotations

import html
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

_DOCS = Path(__file__).parents[2] / "docs"


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "generate_tool_pages", _DOCS / "generate_tool_pages.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


_GENERATOR = _generator()
_ROWS = _GENERATOR.ROWS


def _recorded(name: str) -> str:
    text = _GENERATOR.recorded((_DOCS / _ROWS[name].page).read_text(), name)
    assert text, f"run python docs/generate_tool_pages.py {name}"
    return text


@pytest.mark.parametrize("name", _ROWS)
def test_page_has_the_output_and_the_command(name: str) -> None:
    assert _recorded(name).strip()
    page = (_DOCS / _ROWS[name].page).read_text()
    assert " ".join(_ROWS[name].command.split()[:2]) in page


def test_every_recorded_block_has_a_row() -> None:
    for path in _DOCS.rglob("*.md"):
        names = re.findall(r"<!-- recorded: (\w+) -->", path.read_text())
        assert [_ROWS[name].page for name in names] == [str(path.relative_to(_DOCS))] * len(names)


@pytest.mark.parametrize("name", [name for name, row in _ROWS.items() if row.picture])
def test_picture_shows_the_recorded_text(name: str) -> None:
    drawn = (_DOCS / "pictures" / f"tool_{name}.svg").read_text()
    texts = re.findall(r"<text[^>]*>(.*?)</text>", drawn)
    shown = re.sub(r"\s", "", html.unescape("".join(texts)))
    for line in _recorded(name).splitlines():
        if not re.search("[│┃┏┡├└]", line):
            assert re.sub(r"\s", "", line) in shown, line


@pytest.mark.slow
@pytest.mark.parametrize("name", _ROWS)
def test_command_still_prints_the_headings(name: str) -> None:
    row = _ROWS[name]
    if not _GENERATOR.can_record(row):
        pytest.skip(f"needs root and iproute2, or {row.module}")
    printed = _GENERATOR.shown(row, _GENERATOR.record(row)[0])
    assert _GENERATOR.headings(printed) == _GENERATOR.headings(_recorded(name))


def test_text_is_inserted_below_its_line_alone() -> None:
    page = "a\n\n<!-- recorded: x -->\n```text\nold\n```\n\n```text\nb\n```\n"
    assert _GENERATOR.recorded(page, "x") == "old"
    assert _GENERATOR.recorded(page, "y") is None
    assert _GENERATOR.insert(page, "x", "new\\1") == page.replace("old", "new\\1")


def test_headings_leave_out_what_differs_between_machines() -> None:
    text = "versions\n  JAX 1\n\x1b[1mRound trip, ms\x1b[0m\n│ a │\n| a | b |\n2 errors\nCores: 2"
    assert _GENERATOR.headings(text) == ["versions", "Round trip, ms", "a"]


def test_erased_lines_and_paths_are_left_out() -> None:
    printed = "10 %\r\x1b[2K20 %\r\x1b[2K\x1b[?25hin /x/y/home/a and /x/y/b  \n\n"
    assert _GENERATOR.redact(printed, "/x/y") == "in ~/a and b"
