"""The page is valid, needs no network, and escapes what a run says."""

from __future__ import annotations

import html.parser
import re

import pytest

from stratagem import environment as optional_libraries
from stratagem.errors import NotFoundError
from stratagem.observe.monitoring.html_report import write_report
from tests.goodput.runs import gang_restart, straggling, write

VOID = {"meta", "br"}


class Page(html.parser.HTMLParser):
    """Collects elements, and fails where one is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        self.text += data


@pytest.fixture
def page(tmp_path) -> Page:
    write(tmp_path / "run", straggling())
    write(tmp_path / "other", gang_restart())
    path = tmp_path / "new" / "report.html"
    write_report([tmp_path / "run", tmp_path / "other"], path)
    return Page(path.read_text(encoding="utf-8"))


def test_page_is_one_file(page) -> None:
    tags = {tag for tag, _ in page.seen}
    assert not tags & {"script", "link", "img", "iframe", "object"}
    addresses = [
        value
        for _, attributes in page.seen
        for name, value in attributes.items()
        if name in ("href", "src", "xlink:href") and not str(value).startswith("#")
    ]
    assert addresses == []
    assert not re.search(r"@import|url\((?!#)", page.text)


def test_page_holds_both_runs_and_their_sections(page) -> None:
    assert [tag for tag, _ in page.seen].count("h1") == 2
    titles = ("Where the time went", "Stragglers", "Checkpoints", "Warnings")
    assert all(title in page.text for title in titles)
    assert "slow <data>" in page.text


def test_times_are_not_broken_into_lines(page) -> None:
    tables = [attributes.get("class") for tag, attributes in page.seen if tag == "table"]
    assert "times" in tables
    assert None in tables  # that of causes has none
    assert ".times td:first-child { white-space: nowrap;" in page.text


def test_colors_of_charts_are_defined_for_light_and_dark(page) -> None:
    style = page.text[: page.text.index("Run ", 10)] + page.text
    used = {
        name
        for _, attributes in page.seen
        for name in re.findall(r"var\(--([\w-]+)\)", str(attributes.get("style")))
    }
    assert used
    assert [name for name in used if f"--{name}:" not in style] == []
    assert "prefers-color-scheme: dark" in style


def _luminance(color: str) -> float:
    parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = [
        part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_text_has_the_contrast_of_wcag_in_light_and_dark_colors(page) -> None:
    for theme in re.findall(r":root \{(.*?)\}", page.text, re.DOTALL):
        colors = dict(re.findall(r"--([\w-]+): (#\w{6});", theme))
        for text in ("text", "quiet"):
            for back in ("back", "card"):
                dark, light = sorted((_luminance(colors[text]), _luminance(colors[back])))
                assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, back)
    assert page.text.count(":root {") == 2


def test_folder_without_events_writes_no_file(tmp_path) -> None:
    with pytest.raises(NotFoundError, match="has no events"):
        write_report([tmp_path / "none"], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib"])
def test_missing_library_is_named(tmp_path, monkeypatch, missing) -> None:
    real = optional_libraries.importlib.import_module

    def without(name: str) -> object:
        if name == missing:
            raise ImportError(f"No module named {name!r}")
        return real(name)

    write(tmp_path, straggling())
    monkeypatch.setattr(optional_libraries, "importlib", type("", (), {"import_module": without}))
    with pytest.raises(ImportError, match=rf"(?s)needs {missing}.*stratagem\[observe\]"):
        write_report([tmp_path], tmp_path / "report.html")
