"""One set of lines and tables, as text and as HTML."""

from __future__ import annotations

import html.parser
import re

import pytest
from rich.text import Text

from stratagem.logs import as_html, as_text, new_table, size_text

_VOID = {"br", "hr", "img"}


class Checked(html.parser.HTMLParser):
    """Tags, attributes and text of HTML whose tags must be closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def require_plain(page: str) -> Checked:
    """Checks HTML that any notebook may show: no scripts, links, handlers or colors."""
    checked = Checked(page)
    assert set(checked.tags) <= {"div", "b", "table", "thead", "tbody", "tr", "th", "td"}
    assert {name for name, _ in checked.attributes} <= {"class", "style"}
    assert not re.search(r"color|background|url|position", page)
    return checked


def _parts():
    table = new_table("A <title> that is longer than its table", ["name"], ["size"])
    table.add_row("<script>alert(1)</script>", "1")
    table.add_row(Text("a & b"), "22")
    return ["first <line>", "", table]


def test_text_has_lines_and_aligned_tables() -> None:
    assert as_text(_parts(), width=60).splitlines() == [
        "first <line>",
        "",
        "A <title> that is longer than its table",
        "name                        size",
        "────────────────────────────────",
        "<script>alert(1)</script>      1",
        "a & b                         22",
    ]


def test_markup_in_a_cell_is_text() -> None:
    table = new_table(None, ["name"])
    table.add_row("[red]not a color[/red]")
    assert "[red]not a color[/red]" in as_text([table])
    assert "[red]not a color[/red]" in as_html([table])


def test_html_is_escaped_and_has_the_same_cells() -> None:
    checked = require_plain(as_html(_parts()))
    assert checked.texts == [
        "first <line>",
        "A <title> that is longer than its table",
        "name",
        "size",
        "<script>alert(1)</script>",
        "1",
        "a & b",
        "22",
    ]
    assert checked.attributes.count(("style", "text-align:right")) == 3


def test_table_without_names_of_columns_has_no_head() -> None:
    table = new_table(None, ["", ""])
    table.add_row("a", "b")
    assert "thead" not in require_plain(as_html([table])).tags
    assert as_html([]) == '<div class="stratagem"></div>'


def test_tables_can_be_shown_twice() -> None:
    parts = _parts()
    assert (as_text(parts), as_html(parts)) == (as_text(parts), as_html(parts))


@pytest.mark.parametrize(
    ("num_bytes", "rough", "exact"),
    [
        (0, "0 B", "0 B"),
        (999, "999 B", "999 B"),
        (1536, "1.5 KiB", "1.5 KiB"),
        (2**19, "0.5 MiB", "512.0 KiB"),
        (2**20, "1.0 MiB", "1.0 MiB"),
        (2**29, "0.50 GiB", "512.0 MiB"),
        (3 * 2**30, "3.00 GiB", "3.00 GiB"),
    ],
)
def test_sizes(num_bytes, rough, exact) -> None:
    assert size_text(num_bytes) == rough
    assert size_text(num_bytes, least=1) == exact
