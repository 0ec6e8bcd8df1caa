"""Notebooks as programs: code cells joined for rewriting, magics set aside."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from typing import Any

from stratagem.cli.migrate.rewrite import Rewritten, UnreadableSourceError
from stratagem.messages import explain

_CELL = "__stratagem_cell__"
_MAGIC = "__stratagem_magic__"
# Cell magics whose cell is Python of the notebook; %%writefile has a program of its own.
_PYTHON_CELLS = ("%%time", "%%timeit", "%%capture", "%%prun")
_MAGIC_LINE = re.compile(r"^(?P<indent>\s*)(?P<text>[!%?].*|[\w.]+\s*=\s*[!%].*|[\w.]+\?{1,2}\s*)$")
_CELL_LINE = re.compile(rf"^{_CELL}\((\d+)\)\n?", re.MULTILINE)
_MAGIC_CALL = re.compile(rf"{_MAGIC}\((\d+)\)")

_Rewrite = Callable[[str], Rewritten]


def rewrite_notebook(text: str, rewrite: _Rewrite) -> tuple[str, list[Rewritten]]:
    """Rewrites the code cells of a notebook; returns its text and the programs in it.

    The cells are one program, as they are when the notebook runs. Raises UnreadableSourceError for
    a text that is no notebook.
    """
    notebook = _loaded(text)
    cells = [cell for cell in notebook["cells"] if cell.get("cell_type") == "code"]
    sources = ["".join(cell.get("source", ())) for cell in cells]
    programs: list[Rewritten] = []
    new = list(sources)
    joined: list[str] = []
    magics: list[str] = []
    for index, source in enumerate(sources):
        if source.startswith("%%writefile") and source.partition("\n")[0].endswith(".py"):
            head, _, body = source.partition("\n")
            if _error_line(body) is None:
                programs.append(rewrite(body))
                new[index] = f"{head}\n{programs[-1].after}"
        elif (code := _without_magics(source, magics)) is not None:
            joined.append(f"{_CELL}({index})\n{code}\n")
    programs.append(rewrite("".join(joined)))
    for index, code in _split(programs[-1].after):
        # The line break after the last line is not part of a cell.
        new[index] = _MAGIC_CALL.sub(lambda match: magics[int(match[1])], code[:-1])
    if new == sources:
        return text, programs
    for cell, source in zip(cells, new, strict=True):
        is_list = isinstance(cell.get("source"), list)
        cell["source"] = source.splitlines(keepends=True) if is_list else source
    return _dumped(notebook, text), programs


def _loaded(text: str) -> dict[str, Any]:
    try:
        notebook = json.loads(text)
        if isinstance(notebook, dict) and isinstance(notebook.get("cells"), list):
            return notebook
        reason = "it has no list of cells"
    except json.JSONDecodeError as error:
        reason = str(error)
    raise UnreadableSourceError(
        explain(
            f"This is not a notebook: {reason}.",
            expected="JSON of format 4, with cells.",
            fix="open it in Jupyter and save it again.",
        )
    )


def _without_magics(source: str, magics: list[str]) -> str | None:
    """Returns a cell's code with calls in place of magics; None for a cell that is not Python."""
    first = source.split(None, 1)[0] if source.strip() else ""
    if first.startswith("%%") and first not in _PYTHON_CELLS:
        return None
    lines = source.split("\n")
    while (error_line := _error_line("\n".join(lines))) is not None:
        # A line may begin with % in the middle of an expression: only an error makes it a magic.
        candidates = [index for index in range(error_line) if _MAGIC_LINE.match(lines[index])]
        if not candidates:
            return None
        match = _MAGIC_LINE.match(lines[candidates[-1]])
        indent, text = match.groups() if match is not None else ("", "")
        lines[candidates[-1]] = f"{indent}{_MAGIC}({len(magics)})"
        magics.append(text)
    return "\n".join(lines) if _CELL not in source else None


def _error_line(code: str) -> int | None:
    """Returns the number of the first line that does not parse, None if all lines do."""
    try:
        ast.parse(code)
    except SyntaxError as error:
        return min(error.lineno or 1, code.count("\n") + 1)
    except ValueError:  # a null byte
        return 0
    return None


def _split(program: str) -> list[tuple[int, str]]:
    _, *parts = _CELL_LINE.split(program)
    return [(int(index), code) for index, code in zip(parts[::2], parts[1::2], strict=True)]


def _dumped(notebook: dict[str, Any], text: str) -> str:
    """Writes JSON in the manner of the original."""
    end = "\n" if text.endswith("\n") else ""
    original = json.loads(text)
    for indent in (1, 2, 4, None):
        for is_ascii in (False, True):
            if json.dumps(original, indent=indent, ensure_ascii=is_ascii) + end == text:
                return json.dumps(notebook, indent=indent, ensure_ascii=is_ascii) + end
    return json.dumps(notebook, indent=1, ensure_ascii=False) + end
