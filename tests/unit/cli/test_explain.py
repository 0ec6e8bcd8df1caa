"""`stratagem explain`: a page, the list of pages, and unknown codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import Result

from stratagem.cli import explain, main
from tests.architecture.test_light_imports import heavy_modules
from tests.command_runner import CliRunner

PAGES = Path(__file__).parents[3] / "docs" / "reference" / "errors"


def _call(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["explain", *arguments])


@pytest.mark.parametrize("code", ["SG204", "sg204", "204", " SG204 "])
def test_page_is_printed(code) -> None:
    result = _call(code)
    assert (result.exit_code, result.stderr) == (0, "")
    page = (PAGES / "SG204.md").read_text()
    assert result.stdout.splitlines()[0] == page.splitlines()[0]
    assert page.split("## Causes")[0] in result.stdout


def test_every_page_is_printed_with_paths_of_files_in_place_of_links() -> None:
    for code in explain.load_pages():
        result = _call(code)
        assert result.exit_code == 0, code
        assert "](" not in result.stdout, code
        for path in re.findall(r"\((docs/[^)]*)\)", result.stdout):
            assert (PAGES.parents[2] / path).is_file(), (code, path)


def test_links_become_paths_or_codes() -> None:
    output = _call("SG204").stdout
    assert "* Variables that replicas write (docs/libraries/on_read_variables.md)\n" in output
    assert "* SG205: values that may count once" in output


def test_without_a_code_all_are_listed_by_group() -> None:
    result = _call()
    assert result.exit_code == 0
    listed = re.findall(r"^\* (SG\d{3}): (.+)$", result.stdout, re.MULTILINE)
    assert [code for code, _ in listed] == sorted(path.stem for path in PAGES.glob("SG*.md"))
    for code, title in listed:
        assert (PAGES / f"{code}.md").read_text().startswith(f"# {code}: {title}\n")
    groups = re.findall(r"^## SG(\d)xx: ", result.stdout, re.MULTILINE)
    assert groups == sorted({code[2] for code, _ in listed})


def test_page_and_list_are_json() -> None:
    page = json.loads(_call("--json", "204").stdout)
    assert page["code"] == "SG204"
    assert page["text"] == _call("204").stdout.rstrip("\n") + "\n"
    listed = {one["code"]: one["title"] for one in json.loads(_call("--json").stdout)}
    assert listed.keys() == explain.load_pages().keys()
    assert listed["SG204"] == page["title"]
    assert page["text"].startswith(f"# SG204: {page['title']}\n")


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("SG24", "Did you mean SG204"),
        ("SG2O4", "Did you mean SG204"),
        ("batch", "`stratagem explain` lists all codes."),
    ],
)
def test_unknown_code_names_close_ones_with_exit_code_2(code, answer) -> None:
    result = _call(code)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"There is no error code {code!r}. {answer}" in result.stderr


def test_missing_pages_are_an_error(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(explain, "_FOLDERS", (tmp_path / "none",))
    result = _call("SG204")
    assert result.exit_code == 1
    assert "The pages of the error codes are not installed." in result.stderr


def test_installed_pages_come_before_those_of_a_checkout(monkeypatch, tmp_path) -> None:
    (tmp_path / "SG999.md").write_text("# SG999: Nothing\n\nNo cause.\n")
    monkeypatch.setattr(explain, "_FOLDERS", (tmp_path, PAGES))
    assert list(explain.load_pages()) == ["SG999"]
    assert _call("999").stdout == "# SG999: Nothing\n\nNo cause.\n"


def test_nothing_heavy_is_loaded() -> None:
    statement = "from stratagem.cli import main; main(['explain', 'SG204'], standalone_mode=False)"
    assert heavy_modules(statement) == set()
