"""Error codes: each one in the source has a true page, and each page belongs to a code."""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
import re
import tomllib
from pathlib import Path

import pytest

import stratagem as sg
from tests.architecture.source_tree import REPOSITORY, Module, from_text, package

FOLDER = REPOSITORY / "docs" / "reference" / "errors"
PAGES = {path.stem: path.read_text("utf-8") for path in sorted(FOLDER.glob("SG*.md"))}
HEADINGS = ["Causes", "Fix", "Setting", "Related"]
_TEXT = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\| `(STRATAGEM_\w+)` \| `([^`]*)` \|", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Use:
    """One call of `explain` with a code: where, the error made of it, and its whole message."""

    code: str
    where: str
    error: str | None
    message: re.Pattern[str]


def uses(modules: list[Module]) -> list[Use]:
    found: list[Use] = []
    for module in modules:
        for node, parent in _calls(module.tree):
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            code = keywords.get("code")
            if not isinstance(node.func, ast.Name) or node.func.id != "explain" or code is None:
                continue
            assert isinstance(code, ast.Constant), module.at(node.lineno)
            pattern = (
                f"^{_pattern(node.args[0])}\nExpected {_pattern(keywords['expected'])}\n"
                f"Fix: {_pattern(keywords['fix'])}\nHelp: stratagem explain {code.value}$"
            )
            message = re.compile(pattern, re.MULTILINE)
            found.append(Use(code.value, module.at(node.lineno), _error(parent), message))
    return found


def _calls(tree: ast.AST, parent: ast.Call | None = None):
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call):
            yield node, parent
        yield from _calls(node, node if isinstance(node, ast.Call) else parent)


def _pattern(node: ast.expr) -> str:
    """A regular expression for a text, with any words where values are filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.escape(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_pattern, node.values))
    return "(?s:.+?)"


def _error(call: ast.Call | None) -> str | None:
    """The class of the error that a message is for: "Warning" for a warning; None if unknown."""
    name = "" if call is None else ast.unparse(call.func).split(".")[-1]
    if name == "Verdict" and isinstance(call.args[0], ast.Constant):
        return call.args[0].value
    if name == "warn":
        return "warning"
    return name if name.endswith("Error") else None


@functools.cache
def uses_by_code() -> dict[str, list[Use]]:
    """Read by the first test that needs it, not by each process that collects the tests."""
    by_code = collections.defaultdict(list)
    for use in uses(package()):
        by_code[use.code].append(use)
    return by_code


# The class is not public; its page names the public classes that it derives from.
NOT_PUBLIC = {"VariableOnWorkerError": "RuntimeError"}


@pytest.mark.slow
def test_codes_of_the_source_are_those_of_the_pages() -> None:
    assert sorted(uses_by_code()) == sorted(PAGES)


def test_codes_have_one_form() -> None:
    assert [code for code in PAGES if not re.fullmatch(r"SG[1-9]\d\d", code)] == []


def test_every_page_has_a_title_of_its_own() -> None:
    titles = [page.splitlines()[0] for page in PAGES.values()]
    assert [title.partition(": ")[0] for title in titles] == [f"# {code}" for code in PAGES]
    texts = [title.partition(": ")[2] for title in titles]
    assert all(texts)
    assert len(set(texts)) == len(texts)


def test_index_lists_each_code_once_with_its_title() -> None:
    """The list also holds removed codes, which stay unused."""
    index = (FOLDER / "index.md").read_text("utf-8")
    live, _, removed = index.partition("\n## Removed\n")
    listed = re.findall(r"^\* \[(SG\d{3})\]\((SG\d{3})\.md\): (.+)$", live, re.MULTILINE)
    titles = [(code, code, page.splitlines()[0].partition(": ")[2]) for code, page in PAGES.items()]
    assert listed == titles
    assert set(re.findall(r"SG\d{3}", removed)).isdisjoint(PAGES)


@pytest.mark.parametrize("code", PAGES)
def test_page_has_its_sections(code) -> None:
    headings = re.findall(r"^## (.+)$", PAGES[code], re.MULTILINE)
    assert headings == [name for name in HEADINGS if name in headings]
    assert {"Causes", "Fix", "Related"} <= {*headings}
    assert re.match(r"# .+\n\n(Raised|Issued) as ", PAGES[code])


@pytest.mark.parametrize("code", PAGES)
def test_page_shows_a_message_of_the_source(code) -> None:
    shown = [text for text in _TEXT.findall(PAGES[code]) if "Help: stratagem explain" in text]
    assert shown
    for text in shown:
        text = re.sub(r"^\w+Error: ", "", text)
        assert any(use.message.search(text) for use in uses_by_code()[code]), text


@pytest.mark.parametrize("code", PAGES)
def test_page_names_the_classes_that_are_raised(code) -> None:
    line = re.sub(r"^(Raised|Issued)", "", PAGES[code].split("\n\n")[1]).lower()
    raised = {NOT_PUBLIC.get(use.error, use.error) for use in uses_by_code()[code] if use.error}
    missing = [name for name in raised if name.lower() not in line]
    assert missing == [], f"{missing} raised at {[use.where for use in uses_by_code()[code]]}"


def test_every_public_error_is_on_a_page() -> None:
    pages = "\n".join(PAGES.values())
    missing = [name for name in sg.errors.__all__ if f"`sg.errors.{name}`" not in pages]
    assert missing == []


@pytest.mark.parametrize("code", PAGES)
def test_settings_exist_with_their_defaults(code) -> None:
    defaults = dict(_ROW.findall((FOLDER.parent / "environment.md").read_text("utf-8")))
    for name, default in re.findall(r"`(STRATAGEM_\w+)`(?: \(`?(\w+)`?\))?", PAGES[code]):
        assert name in defaults, name
        assert default in ("", defaults[name]), name


@pytest.mark.parametrize("code", PAGES)
def test_links_lead_to_pages(code) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGES[code]):
        assert (FOLDER / target).is_file(), target


def test_wheel_holds_the_pages() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included["docs/reference/errors"] == "stratagem/error_pages"
    assert Path(FOLDER).is_dir()


SOURCE = """
def check(axis):
    raise ValueError(explain(f"axis={axis}.", expected="less.", fix=FIX, code="SG999"))
"""


def test_use_of_a_code_is_found_with_its_message() -> None:
    (use,) = uses([from_text(SOURCE)])
    assert (use.code, use.error) == ("SG999", "ValueError")
    right = "axis=3.\nExpected less.\nFix: pass 0.\nHelp: stratagem explain SG999"
    assert use.message.search(right)
    for wrong in (right.replace("less", "more"), right[:-1] + "8", right.replace("axis", "rank")):
        assert not use.message.search(wrong)
