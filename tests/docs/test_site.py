"""Every page of the documentation is in a table of contents, and no link of a page is broken."""

from __future__ import annotations

import fnmatch
import functools
import importlib.util
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import pytest

from stratagem.cli.migrate.symbols import load_symbols

_REPOSITORY = Path(__file__).parents[2]
_DOCS = _REPOSITORY / "docs"
_SUFFIXES = (".md", ".ipynb")
# MyST makes anchors of headings up to this level; docs/conf.py has the same number.
_ANCHOR_LEVELS = 4
# Written by the build of the site: from docstrings, and from the table of symbols.
_GENERATED = ("reference/api", "migrate/symbols.md")
_SYMBOLS = _DOCS / "migrate" / "symbols.md"

_CODE_FENCE = re.compile(r"^ *(?P<fence>`{3,}).*?^ *(?P=fence)[ \t]*$", re.MULTILINE | re.DOTALL)
_TOCTREE = re.compile(r"^```\{toctree\}\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"!?\]\((?P<target>[^()\s]+)(?:\s+\"[^\"]*\")?\)")
_CARD = re.compile(r"^:link: (?P<target>\S+)$", re.MULTILINE)
_HEADING = re.compile(r"^(?P<level>#{1,6}) +(?P<text>.+?) *#*$", re.MULTILINE)
_TARGET = re.compile(r"^\((?P<name>[\w-]+)\)=$|<a (?:id|name)=\"(?P<id>[^\"]+)\"", re.MULTILINE)
_EXTERNAL = re.compile(r"^(https?|mailto):")


@functools.cache
def _symbols() -> str:
    """Returns the page of symbols, as the build of the site writes it."""
    place = _DOCS / "_extensions" / "migration_symbols.py"
    spec = importlib.util.spec_from_file_location(place.stem, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.page()


def text_of(path: Path) -> str:
    """Returns the Markdown of a page; of a notebook, its Markdown cells."""
    if path == _SYMBOLS:
        return _symbols()
    text = path.read_text("utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
    return "\n\n".join("".join(cell["source"]) for cell in cells)


def pages(docs: Path) -> dict[str, Path]:
    """Returns the pages by name, such as "guides/keras"."""
    found: dict[str, Path] = {}
    for path in sorted(docs.rglob("*")):
        relative = path.relative_to(docs)
        hidden = any(part.startswith(("_", ".")) for part in relative.parts)
        hidden = hidden or any(relative.is_relative_to(one) for one in _GENERATED)
        if path.suffix in _SUFFIXES and not hidden and relative.parts[0] != "pictures":
            found[str(relative.with_suffix(""))] = path
    return found


def entries(name: str, text: str, names: set[str]) -> Iterator[tuple[str, set[str]]]:
    """Yields each line of the tables of contents of a page, and the pages that it stands for."""
    folder = name.rpartition("/")[0]
    for tree in _TOCTREE.finditer(text):
        lines = [line.strip() for line in tree["body"].splitlines()]
        for line in filter(None, lines):
            if line.startswith(":"):
                continue
            target = f"{folder}/{line}" if folder else line
            found = {one for one in names if fnmatch.fnmatchcase(one, target)}
            yield line, {one for one in found if one.count("/") == target.count("/")}


def unreachable(docs: Path) -> list[str]:
    """Returns the pages that no table of contents leads to, and the entries that lead nowhere."""
    files = pages(docs)
    reached, left, broken = set[str](), ["index"], list[str]()
    while left:
        name = left.pop()
        if name in reached:
            continue
        reached.add(name)
        for line, found in entries(name, text_of(files[name]), set(files)):
            if not found and "*" not in line:
                broken.append(f"{name}: {line}")
            left += found
    return sorted(set(files) - reached) + broken


def anchors(text: str) -> set[str]:
    """Returns the anchors of a page, named as GitHub and MyST name them."""
    text = _CODE_FENCE.sub("", text)
    found = [match["name"] or match["id"] for match in _TARGET.finditer(text)]
    for heading in _HEADING.finditer(text):
        if len(heading["level"]) <= _ANCHOR_LEVELS:
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading["text"]).lower().strip()
            slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
            same = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", one) is not None for one in found)
            found.append(f"{slug}-{same}" if same else slug)
    return set(found)


def links(text: str) -> list[str]:
    """Returns the targets of the links and pictures of a page that stay in the repository."""
    without = _CODE.sub("code", _CODE_FENCE.sub("", text))
    targets = [match["target"] for match in _LINK.finditer(without)]
    targets += [f"{match['target']}.md" for match in _CARD.finditer(text)]
    return [target for target in targets if not _EXTERNAL.match(target)]


def broken_links(path: Path, repository: Path) -> list[str]:
    """Returns the links of a page that lead to no file of the repository, or to no heading."""
    broken: list[str] = []
    for target in links(text_of(path)):
        file, _, anchor = target.partition("#")
        place = (path.parent / file).resolve() if file else path
        exists = place == _SYMBOLS or place.exists()
        if not exists or not place.is_relative_to(repository):
            broken.append(f"{path.name}: {target}: no such file")
        elif anchor and place.suffix in _SUFFIXES and anchor not in anchors(text_of(place)):
            broken.append(f"{path.name}: {target}: no such heading")
    return broken


def test_every_page_is_in_a_table_of_contents() -> None:
    assert unreachable(_DOCS) == []


def _page_ids() -> list[Any]:
    named = {f"docs/{name}": path for name, path in pages(_DOCS).items()}
    for path in sorted(_REPOSITORY.glob("*.md")):
        named[path.name] = path
    return [pytest.param(path, id=name) for name, path in named.items()]


@pytest.mark.parametrize("path", _page_ids())
def test_links_lead_to_files_and_headings(path: Path) -> None:
    assert broken_links(path, _REPOSITORY) == []


def test_table_of_symbols_has_each_once_and_its_links_lead_to_files_and_headings() -> None:
    names = re.findall(r"^\| `([^`]+)` \|", _symbols(), re.MULTILINE)
    assert names == [symbol.name for symbol in load_symbols()]
    assert broken_links(_SYMBOLS, _REPOSITORY) == []


def test_design_pages_name_files_that_exist() -> None:
    """A page may leave out the folders that it is about."""
    folders = (_REPOSITORY / one for one in ("src", "tests", "validation", "benchmarks"))
    known = [path.as_posix() for one in folders for path in [one, *one.rglob("*")]]
    missing = [
        f"{page.name}: {name}"
        for page in sorted((_DOCS / "design").glob("*.md"))
        for name in re.findall(r"`((?:[a-z_]+/)*[a-z_]+(?:\.py|/))`", page.read_text("utf-8"))
        if not name.startswith("keras/src/")
        and not any(f"{path}/".endswith(f"/{name.rstrip('/')}/") for path in known)
    ]
    assert missing == []


def test_this_version_is_in_the_version_menu() -> None:
    project = tomllib.loads((_REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    listed = tomllib.loads((_DOCS / "versions.toml").read_text("utf-8"))["versions"]
    assert project["version"] in listed
    assert len(set(listed)) == len(listed)


def _after(diff: str) -> str:
    kept = [line for line in diff.splitlines() if not line.startswith("-")]
    return "\n".join(line[1:] for line in kept)


@pytest.mark.slow
def test_diff_of_the_home_page_trains() -> None:
    home = (_DOCS / "index.md").read_text("utf-8")
    diffs = re.findall(r"^```diff\n(.*?)^```$", home, re.MULTILINE | re.DOTALL)
    random = np.random.default_rng(0)
    names: dict[str, Any] = {
        "images": random.normal(size=(40, 8)).astype("float32"),
        "labels": random.integers(0, 10, 40),
    }
    program = _after(diffs[0]).replace("epochs=5", "epochs=1, verbose=0")
    exec(compile(program, "index.md", "exec", dont_inherit=True), names)
    assert isinstance(names["model"], keras.Model)
    assert int(names["model"].optimizer.iterations.value) == 1
    assert names["strategy"].num_replicas_in_sync == jax.local_device_count()
    for diff in diffs[1:]:
        exec(compile(_after(diff), "index.md", "exec", dont_inherit=True), {})


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """A small site without mistakes."""
    folder = tmp_path / "docs"
    (folder / "guides").mkdir(parents=True)
    (folder / "index.md").write_text("# Home\n\n```{toctree}\n:hidden:\n\nguides/index\n```\n")
    index = "# Guides\n\n```{toctree}\n:glob:\n\nfirst\n*\n```\n"
    (folder / "guides" / "index.md").write_text(index)
    (folder / "guides" / "first.md").write_text(
        "# First\n\n## The `fit` call\n\n## Same\n\n## Same\n"
    )
    cell = {"cell_type": "markdown", "source": ["# Notebook\n", "[first](first.md#same-1)\n"]}
    notebook = {"cells": [cell, {"cell_type": "code", "source": ["[x](none.md)"]}]}
    (folder / "guides" / "notebook.ipynb").write_text(json.dumps(notebook))
    return folder


def test_site_without_mistakes_passes(docs: Path) -> None:
    assert unreachable(docs) == []
    for path in pages(docs).values():
        assert broken_links(path, docs.parent) == []


@pytest.mark.parametrize("name", ["design/core.md", "guides/more/deep.md", "alone.ipynb"])
def test_page_in_no_table_is_found(docs: Path, name: str) -> None:
    (docs / name).parent.mkdir(parents=True, exist_ok=True)
    (docs / name).write_text('{"cells": []}')
    assert unreachable(docs) == [name.rpartition(".")[0]]


def test_entry_without_a_page_is_found(docs: Path) -> None:
    (docs / "guides" / "first.md").unlink()
    assert unreachable(docs) == ["guides/index: first"]


@pytest.mark.parametrize(
    ("link", "problem"),
    [
        ("[x](first.md)", None),
        ("[`x`](first.md#the-fit-call)", None),
        ("[x](first.md#same) [x](first.md#same-1) [x](#here)", None),
        ('[x](../index.md "title") ![x](../index.md)', None),
        ("`[x](gone.md)`\n\n```python\n[x](gone.md)\n```", None),
        ("[x](gone.md)", "gone.md: no such file"),
        ("![x](gone.png)", "gone.png: no such file"),
        ("[x](../../../outside)", "../../../outside: no such file"),
        ("[x](first.md#fit)", "first.md#fit: no such heading"),
        ("[x](first.md#same-2)", "first.md#same-2: no such heading"),
        ("[x](#there)", "#there: no such heading"),
        (":link: gone/index", "gone/index.md: no such file"),
    ],
)
def test_broken_link_is_found(docs: Path, link: str, problem: str | None) -> None:
    page = docs / "guides" / "page.md"
    page.write_text(f"# Here\n\n{link}\n")
    assert broken_links(page, docs.parent) == ([f"page.md: {problem}"] if problem else [])
