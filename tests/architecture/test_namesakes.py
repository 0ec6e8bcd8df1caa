"""Each module has a test file of its place and name, or names the test files that use it.

`shared_tests.toml` has the modules without a test of their own. Its rows are checked against the
sources: `tests/architecture/mentions.py` says what counts as a use.
"""

from __future__ import annotations

import ast
import functools
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from tests.architecture.mentions import Package
from tests.architecture.source_tree import (
    REPOSITORY,
    SOURCE,
    Module,
    assert_none,
    from_text,
    package,
)

TABLE = Path(__file__).with_name("shared_tests.toml")
TESTS = REPOSITORY / "tests"
EXEMPT = {"__init__", "__main__"}


def place_of(module: Module) -> str:
    """Returns "checkpoint/options" for `stratagem.checkpoint.options`."""
    return str(PurePosixPath(*module.path.with_suffix("").parts[1:]))


def namesake_of(place: str) -> str:
    """Returns "checkpoint/test_options.py" for "checkpoint/options"."""
    path = PurePosixPath(place)
    return str(path.with_name(f"test_{path.name.lstrip('_')}.py"))


def violations(
    places: list[str],
    table: Mapping[str, Mapping[str, Any]],
    exists: Callable[[str], bool],
    uses: Callable[[str], set[str]],
    imports: Callable[[str], set[str]],
) -> list[str]:
    """Returns what is wrong with the table.

    Args:
        places: of all modules.
        table: its sections `direct` and `through`.
        exists: True for a test file that there is.
        uses: places of the modules that a test file uses directly.
        imports: places of the modules that a module uses.
    """
    direct, through = table["direct"], table["through"]
    found = [f"{place}: has two rows" for place in direct.keys() & through.keys()]
    for place in places:
        has_row = place in direct or place in through
        if exists(namesake_of(place)) == has_row:
            is_row = "a test of its own: remove its row" if has_row else "neither a test nor a row"
            found.append(f"{place}: has {is_row}")
    rows = [(place, test, place) for place, tests in direct.items() for test in tests]
    for place, row in through.items():
        rows.append((place, row["test"], row["module"]))
        if row["module"] not in places or place not in imports(row["module"]):
            found.append(f"{place}: {row['module']} does not use it")
    found += [f"{place}: names no test" for place, tests in direct.items() if not tests]
    for place, test, used in rows:
        if place not in places:
            found.append(f"{place}: is no module")
        elif not exists(test):
            found.append(f"{place}: {test} does not exist")
        elif used not in uses(test) and test != namesake_of(used):
            found.append(f"{place}: {test} does not use {used}")
    return found


def test_each_module_has_a_test_of_its_own_or_a_true_row() -> None:
    modules = {place_of(one): one for one in package() if one.path.stem not in EXEMPT}
    everything = Package.of(package())
    place_by_name = {module.name: place for place, module in modules.items()}

    @functools.cache
    def used_by(path: Path) -> set[str]:
        names = everything.used_by(ast.parse(path.read_text(encoding="utf-8")))
        return {place_by_name[name] for name in names if name in place_by_name}

    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    assert_none(
        violations(
            list(modules),
            table,
            exists=lambda test: (TESTS / test).is_file(),
            uses=lambda test: used_by(TESTS / test),
            imports=lambda place: used_by(SOURCE / modules[place].path),
        )
    )


DIRECT = {"direct": {"a/b": ["a/test_c.py"]}, "through": {}}
THROUGH = {"direct": {}, "through": {"a/b": {"test": "a/test_d.py", "module": "a/c"}}}
MISSING = {"direct": {"a/b": ["a/test_e.py"]}, "through": {}}
FILES = {"a/test_c.py", "a/test_d.py"}


@pytest.mark.parametrize(
    ("table", "files", "uses", "imports", "message"),
    [
        (DIRECT, FILES, {"a/b"}, set(), None),
        (THROUGH, FILES, {"a/c"}, {"a/b"}, None),
        ({"direct": {}, "through": {}}, FILES, {"a/b"}, set(), "neither a test nor a row"),
        ({"direct": {"a/b": []}, "through": {}}, FILES, {"a/b"}, set(), "names no test"),
        (DIRECT, FILES, {"a/c"}, set(), "a/test_c.py does not use a/b"),
        (MISSING, FILES, {"a/b"}, set(), "a/test_e.py does not exist"),
        (DIRECT, {*FILES, "a/test_b.py"}, {"a/b"}, set(), "has a test of its own"),
        (THROUGH, FILES, {"a/c"}, set(), "a/c does not use it"),
        (THROUGH, FILES, set(), {"a/b"}, "a/test_d.py does not use a/c"),
    ],
    ids=[
        "direct",
        "through",
        "no row",
        "row without tests",
        "no use",
        "no file",
        "test of its own",
        "module without use",
        "no use of the module",
    ],
)
def test_row_that_is_not_true_is_found(table, files, uses, imports, message) -> None:
    found = violations(
        ["a/b", "a/c"], table, lambda test: test in files, lambda test: uses, lambda place: imports
    )
    assert len(found) == (message is not None)
    assert message is None or message in found[0]


def test_row_of_a_module_that_is_gone_is_found() -> None:
    found = violations([], DIRECT, lambda test: True, lambda test: {"a/b"}, lambda place: set())
    assert found == ["a/b: is no module"]


SAMPLE = """
class Store:
    num_rows: int

    def take_rows(self): raise ValueError(f"The store of {self} has no rows on this device.")

    def load(self): ...
"""


@pytest.mark.parametrize(
    "text",
    [
        "from stratagem.a.b import Store",
        "from stratagem.a import Store",
        "from stratagem.a import b",
        "import stratagem.a.b",
        "import stratagem as sg\nsg.Store()",
        "import stratagem as sg\na = sg.a\na.Store()",
        "patch('stratagem.a.b.Store')",
        "store.take_rows()",
        "raises(ValueError, match='has no rows on this device')",
    ],
)
def test_direct_use_is_found(text) -> None:
    assert "stratagem.a.b" in _sample().used_by(ast.parse(text))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "from stratagem.a import Other",
        "import stratagem as sg\nsg.Other()",
        "'''Store of stratagem.a.b has no rows on this device.'''",
        "store.load()",  # one word
        "Store()",  # of another library
        "take_rows()",
        "raises(ValueError, match='no rows on this machine')",
    ],
)
def test_other_words_are_no_use(text) -> None:
    assert "stratagem.a.b" not in _sample().used_by(ast.parse(text))


def test_attribute_of_two_modules_is_a_use_of_neither() -> None:
    both = [from_text(SAMPLE, f"stratagem.{name}") for name in ("a", "b")]
    assert Package.of(both).used_by(ast.parse("x.take_rows()")) == set()


def _sample() -> Package:
    root = "from stratagem.a import Store\nfrom stratagem.c import Other"
    return Package.of(
        [
            from_text(root, "stratagem"),
            from_text(
                "from stratagem.a.b import Store\nfrom stratagem.c import Other", "stratagem.a"
            ),
            from_text(SAMPLE, "stratagem.a.b"),
            from_text("class Other: ...", "stratagem.c"),
        ]
    )
