"""Tutorials are notebooks without outputs that run from the first cell to the last."""

from __future__ import annotations

import ast
import copy
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stratagem as sg

_ROOT = Path(__file__).parents[2]
_FOLDER = _ROOT / "docs" / "tutorials"
_NAMES = (
    "custom_loop",
    "dcgan",
    "first_steps",
    "parameter_servers",
    "plan",
    "save_and_open",
    "two_machines",
)
_SKIP = "skip-execution"
_TIMEOUT_S = 900

_MARKDOWN_KEYS = {"cell_type", "id", "metadata", "source"}
_CODE_KEYS = {*_MARKDOWN_KEYS, "execution_count", "outputs"}
_ID = re.compile(r"[a-z0-9-]{1,64}")
_LINK = re.compile(r"\]\((?!https?:)(?P<target>[^)#]+)(?:#[^)]*)?\)")
_PUBLIC_NAME = re.compile(r"\bsg(?:\.[A-Za-z]\w*)+")
_WRITEFILE = re.compile(r"%%writefile (?P<path>\S+)\n(?P<text>.*)", re.DOTALL)


def _read(name: str) -> dict[str, Any]:
    return json.loads((_FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))


def _canonical(notebook: dict[str, Any]) -> str:
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def _texts(notebook: dict[str, Any]) -> str:
    cells = [_source(cell) for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
    return "\n\n".join(cells) + "\n"


def _code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def _is_skipped(cell: dict[str, Any]) -> bool:
    return _SKIP in cell["metadata"].get("tags", ())


def problems(notebook: dict[str, Any]) -> list[str]:
    """Returns the violations of the rules for tutorials, each with the cell's id."""
    if (notebook["nbformat"], notebook["nbformat_minor"]) != (4, 5):
        return ["the format is not 4.5"]
    ids = [cell.get("id", "") for cell in notebook["cells"]]
    found = [f"{name!r} is the id of several cells" for name in set(ids) if ids.count(name) > 1]
    for cell in notebook["cells"]:
        found += [f"cell {cell.get('id')!r}: {problem}" for problem in _cell_problems(cell)]
    return found or [*_install_problems(notebook), *_link_problems(notebook)]


def _cell_problems(cell: dict[str, Any]) -> Iterator[str]:
    is_code = cell["cell_type"] == "code"
    if cell.keys() != (_CODE_KEYS if is_code else _MARKDOWN_KEYS):
        yield f"its keys are {sorted(cell)}"
        return
    if not _ID.fullmatch(cell["id"]):
        yield "its id has other characters than a-z, 0-9 and -"
    if not cell["metadata"].keys() <= {"tags"}:
        yield f"its metadata is {cell['metadata']}"
    if is_code and (cell["outputs"] or cell["execution_count"] is not None):
        yield "it has outputs or was executed"
    if _source(cell).splitlines(keepends=True) != cell["source"] or not _source(cell).strip():
        yield "its source is not a list of lines"


def _install_problems(notebook: dict[str, Any]) -> Iterator[str]:
    first, *others = _code_cells(notebook)
    if not _source(first).startswith("%pip install ") or not _is_skipped(first):
        yield f"the first code cell is not a %pip install tagged {_SKIP}"
    yield from (f"cell {cell['id']!r} is skipped" for cell in others if _is_skipped(cell))
    with (_ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    (named,) = re.findall(r"\bstratagem(?:\[([\w,]+)\])?", _source(first)) or [None]
    if named is None:
        yield "stratagem is not installed"
    elif missing := set(filter(None, named.split(","))) - extras.keys():
        yield f"there is no extra {sorted(missing)}"


def _link_problems(notebook: dict[str, Any]) -> Iterator[str]:
    last = notebook["cells"][-1]
    if not _source(last).startswith("## What to read next\n") or not _LINK.search(_source(last)):
        yield "the last cell is not a list of what to read next"
    for match in _LINK.finditer(_texts(notebook)):
        if not (_FOLDER / match["target"]).is_file():
            yield f"a link leads to {match['target']}, which is not there"


def _python(cell: dict[str, Any]) -> str:
    """The Python of a code cell: a cell that writes a file becomes a call that does."""
    text = _source(cell)
    if match := _WRITEFILE.fullmatch(text):
        return f"__import__('pathlib').Path(f{match['path']!r}).write_text({match['text']!r})"
    assert not re.search(r"^\s*[%!]", text, re.MULTILINE), f"cell {cell['id']!r} has a magic"
    return text


def _program(notebook: dict[str, Any]) -> str:
    """The notebook as a program; like a notebook, its main module has no file."""
    cells = [(cell["id"], _python(cell)) for cell in _code_cells(notebook) if not _is_skipped(cell)]
    return (
        f"import linecache\nfor name, text in {cells!r}:\n"
        "    linecache.cache[name] = (len(text), None, text.splitlines(True), name)\n"
        "    exec(compile(text, name, 'exec'), globals())\n"
    )


def test_there_are_seven() -> None:
    assert tuple(sorted(path.stem for path in _FOLDER.glob("*.ipynb"))) == _NAMES


@pytest.mark.parametrize("name", _NAMES)
def test_follows_the_rules(name: str) -> None:
    assert problems(_read(name)) == []


@pytest.mark.parametrize("name", _NAMES)
def test_is_written_so_that_a_change_is_a_small_difference(name: str) -> None:
    text = (_FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    assert text == _canonical(json.loads(text))


@pytest.mark.parametrize("name", _NAMES)
def test_names_exist(name: str) -> None:
    notebook = _read(name)
    everything = "\n".join(map(_source, notebook["cells"]))
    names = set(_PUBLIC_NAME.findall(everything))
    assert names
    for one in sorted(names):
        functools.reduce(getattr, one.split(".")[1:], sg)


@pytest.mark.parametrize("name", _NAMES)
def test_cells_compile_and_check_their_results(name: str) -> None:
    cells = [cell for cell in _code_cells(_read(name)) if not _is_skipped(cell)]
    trees = [ast.parse(_python(cell), cell["id"]) for cell in cells]
    assert any(isinstance(node, ast.Assert) for tree in trees for node in ast.walk(tree))


@pytest.mark.slow
@pytest.mark.parametrize("name", _NAMES)
def test_runs(name: str, tmp_path: Path) -> None:
    # Without the flags of `make test`, which compile fast and convolve slowly.
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("needs matplotlib")
    begin_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _program(_read(name))],
        cwd=tmp_path,
        env={**environment, "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    print(f"{name}: {time.perf_counter() - begin_s:.0f} s")
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


def _example() -> dict[str, Any]:
    """A notebook that follows the rules."""
    metadata = {"tags": [_SKIP]}
    code = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
    text = {"cell_type": "markdown", "metadata": {}}
    return {
        "cells": [
            {**text, "id": "title", "source": ["# Title"]},
            {**code, "id": "install", "metadata": metadata, "source": ["%pip install stratagem"]},
            {**code, "id": "code", "source": ["number = 2\n", "print(number)"]},
            {**text, "id": "next", "source": ["## What to read next\n", "[A](../guides/keras.md)"]},
        ],
        "metadata": {},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def test_example_follows_the_rules() -> None:
    assert problems(_example()) == []


@pytest.mark.parametrize(
    ("cell", "change", "message"),
    [
        (0, {"id": "code"}, "several cells"),
        (0, {"id": "The Title"}, "other characters"),
        (0, {"outputs": []}, "its keys are"),
        (1, {"metadata": {}}, "not a %pip install tagged"),
        (1, {"source": ["pip install stratagem"]}, "not a %pip install tagged"),
        (1, {"source": ["%pip install jax"]}, "stratagem is not installed"),
        (1, {"source": ["%pip install 'stratagem[plot]'"]}, "no extra ['plot']"),
        (2, {"execution_count": 1}, "was executed"),
        (2, {"outputs": [{"output_type": "stream"}]}, "has outputs"),
        (2, {"metadata": {"tags": [_SKIP]}}, "'code' is skipped"),
        (2, {"metadata": {"collapsed": True}}, "its metadata is"),
        (2, {"source": ["number = 2\nprint(number)"]}, "not a list of lines"),
        (2, {"source": []}, "not a list of lines"),
        (3, {"source": ["[A](../guides/keras.md)"]}, "not a list of what to read next"),
        (3, {"source": ["## What to read next\n", "[A](missing.md)"]}, "leads to missing.md"),
    ],
)
def test_violation_is_found(cell: int, change: dict[str, Any], message: str) -> None:
    notebook = copy.deepcopy(_example())
    notebook["cells"][cell].update(change)
    assert any(message in problem for problem in problems(notebook))


def test_program_writes_files_and_skips_the_installation(tmp_path: Path) -> None:
    notebook = _example()
    notebook["cells"][2]["source"] = [f"folder = {str(tmp_path)!r}"]
    writing = {"source": ["%%writefile {folder}/a.txt\n", "{2}\n"], "id": "writing"}
    notebook["cells"].insert(3, {**copy.deepcopy(notebook["cells"][2]), **writing})
    exec(_program(notebook), {})
    assert (tmp_path / "a.txt").read_text() == "{2}\n"


def test_program_refuses_other_magics() -> None:
    notebook = _example()
    notebook["cells"][2]["source"] = ["!ls"]
    with pytest.raises(AssertionError, match="'code' has a magic"):
        _program(notebook)
