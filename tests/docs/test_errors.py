"""Error codes: each one in the source has a row in the table of codes, and each page is true."""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
import re
import tomllib
from pathlib import Path

import pytest

from tests.architecture.source_tree import REPOSITORY, Module, from_text, package

FOLDER = REPOSITORY / "docs" / "reference" / "errors"
PAGES = {path.stem: path.read_text("utf-8") for path in sorted(FOLDER.glob("SG*.md"))}
# The table of codes: code, page or None, meaning, fix.
INDEX = (FOLDER / "index.md").read_text("utf-8")
_CODE = r"^\| \[?(SG\d+)\]?(?:\((SG\d+)\.md\))? \| (.*?) \| (.*) \|$"
ROWS = re.findall(_CODE, INDEX, re.MULTILINE)
HEADINGS = ["Causes", "Fix", "Setting"]
_TEXT = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\| `(STRATAGEM_\w+)` \| `([^`]*)` \|", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Use:
    """One `explain` or `invalid` with a code: where, the error of it, and its whole message."""

    code: str
    where: str
    error: str | None
    message: re.Pattern[str]


def uses(modules: list[Module]) -> list[Use]:
    found: list[Use] = []
    for module in modules:
        for node, parent in _calls(module.tree):
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            if name not in ("explain", "invalid"):
                continue
            parts = dict(zip(("received", "expected", "fix", "code"), node.args, strict=False))
            parts |= {keyword.arg: keyword.value for keyword in node.keywords}
            code = parts.get("code")
            if code is None or ast.unparse(code) == "code":  # in `invalid` itself
                continue
            assert isinstance(code, ast.Constant), module.at(node.lineno)
            pattern = (
                f"^{_pattern(parts['received'])}\nExpected {_pattern(parts['expected'])}\n"
                f"Fix: {_pattern(parts['fix'])}\nHelp: stratagem explain {code.value}$"
            )
            error = "ValueError" if name == "invalid" else _error(parent)
            message = re.compile(pattern, re.MULTILINE)
            found.append(Use(code.value, module.at(node.lineno), error, message))
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
def test_codes_of_the_source_are_those_of_the_table() -> None:
    assert sorted(uses_by_code()) == [code for code, *_ in ROWS]


def test_codes_have_one_form() -> None:
    assert [code for code, *_ in ROWS if not re.fullmatch(r"SG[1-9]\d\d", code)] == []
    # No row is left out because it has another form.
    assert INDEX.count("\n| SG") + INDEX.count("\n| [SG") == len(ROWS)


def test_each_code_is_below_the_heading_of_its_group() -> None:
    for part in INDEX.split("\n## ")[1:]:
        group = part[:3]
        assert part[3:7] == "xx: "
        assert {code[:3] for code in re.findall(r"^\| \[?(SG\d+)", part, re.MULTILINE)} == {group}


def test_every_code_has_a_meaning_of_its_own_and_a_fix() -> None:
    meanings = [meaning for _, _, meaning, _ in ROWS]
    assert len(set(meanings)) == len(meanings)
    assert [code for code, _, meaning, fix in ROWS if not meaning or not fix.endswith(".")] == []


def test_table_leads_to_each_page_and_has_its_title() -> None:
    linked = {code: (page, meaning) for code, page, meaning, _ in ROWS if page}
    titles = {code: page.splitlines()[0].removeprefix("# ") for code, page in PAGES.items()}
    assert linked == {
        code: (code, title.removeprefix(f"{code}: ")) for code, title in titles.items()
    }


@pytest.mark.parametrize("code", PAGES)
def test_page_has_its_sections(code) -> None:
    headings = re.findall(r"^## (.+)$", PAGES[code], re.MULTILINE)
    assert headings == [name for name in HEADINGS if name in headings]
    assert {"Causes", "Fix"} <= {*headings}
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


def test_settings_exist_with_their_defaults() -> None:
    defaults = dict(_ROW.findall((FOLDER.parent / "environment.md").read_text("utf-8")))
    text = "\n".join([INDEX, *PAGES.values()])
    for name, default in re.findall(r"`(STRATAGEM_\w+)`(?: \(`?(\w+)`?\))?", text):
        assert name in defaults or name == "STRATAGEM_SECRET", name
        assert default in ("", defaults.get(name)), name


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
