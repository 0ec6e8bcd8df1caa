"""Prose lint of `make lint`: openings of docstrings, worn phrases, and length of sentences.

    python -m tests.prose [FILE ...]

Pages are README.md and docs/, without tables, lists of links, code blocks and directives.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPENINGS = ("How", "Of", "Tells", "That", "What", "Where", "Whether", "Which", "Who", "Whose")
PHRASES = (
    "anybody",
    "anyone",
    "goes on",
    "hands out",
    "has to do with",
    "is told",
    "lets go",
    "nobody",
    "somebody",
    "told",
    "what is",
    "whoever",
)
MEAN_WORDS = {"README.md": 18, "docs": 20}
# Pages that the site generates from docstrings, which are checked themselves.
GENERATED = ROOT / "docs" / "reference" / "api"
# Titles, API terms and quotations that hold a phrase on purpose.
ALLOWED: tuple[str, ...] = ()

_SENTENCE_END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`*\[\"])")
_PHRASE = re.compile(rf"\b({'|'.join(PHRASES)})\b|(?:^|(?<=[.:] ))Of\b")


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each docstring."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, kinds) and (found := ast.get_docstring(node)):
            yield node.body[0].lineno, found


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each comment on a line of its own."""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("# "):
            yield number, line


def check_source(name: str, text: str) -> list[str]:
    """Returns the violations in a source file."""
    found = [
        f"{name}:{line}: a docstring opens with {text_.split()[0]!r}: use a noun or a verb"
        for line, text_ in docstrings(text)
        if text_.split()[0].rstrip(",") in OPENINGS
    ]
    return found + _worn(name, [*docstrings(text), *comments(text)])


def sentences(page: str) -> list[tuple[int, str]]:
    """Returns the line and the text of each sentence in the paragraphs and lists of a page."""
    found: list[tuple[int, str]] = []
    paragraph: list[str] = []
    start, in_code = 1, False
    for number, line in enumerate([*page.splitlines(), ""], start=1):
        stripped = line.strip()
        if stripped.startswith("```"):
            in_code = not in_code
        is_text = (
            not in_code and stripped and not stripped.startswith(("|", "#", "```", ":", "<", "!["))
        )
        begins = bool(re.match(r"(\d+\.|[-*]) ", stripped))
        if paragraph and (not is_text or begins):
            text = " ".join(paragraph)
            found += [(start, one) for one in _SENTENCE_END.split(text) if one]
            paragraph = []
        if is_text:
            if not paragraph:
                start = number
            paragraph.append(re.sub(r"^(\d+\.|[-*]) ", "", stripped))
    return found


def words(sentence: str) -> int:
    """Returns the number of words; code in backquotes counts as one."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", sentence))
    return len(re.findall(r"[A-Za-z][\w'-]*", plain))


def check_page(name: str, text: str) -> list[str]:
    """Returns the violations in a page."""
    found = _worn(name, sentences(text))
    lengths = [words(one) for _, one in sentences(text)]
    lengths = [length for length in lengths if length > 2]
    limit = MEAN_WORDS.get(name, MEAN_WORDS["docs"])
    if lengths and (mean := sum(lengths) / len(lengths)) > limit:
        found.append(f"{name}: {mean:.1f} words a sentence on average, at most {limit}")
    return found


def _worn(name: str, texts: list[tuple[int, str]]) -> list[str]:
    return [
        f"{name}:{line}: {match[0]!r} in {' '.join(text.split())[:80]!r}"
        for line, text in texts
        if not any(one in text for one in ALLOWED)
        for match in _PHRASE.finditer(re.sub(r"`[^`]*`|\"[^\"]*\"", "", text))
    ]


def check(path: Path) -> list[str]:
    """Returns the violations in a file."""
    name = str(path.relative_to(ROOT))
    check_file = check_source if path.suffix == ".py" else check_page
    return check_file(name, path.read_text())


def main() -> int:
    """Prints all violations and returns 1 if there are any."""
    given = [Path(one).resolve() for one in sys.argv[1:]]
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    pages = [page for page in pages if GENERATED not in page.parents]
    found = [
        violation
        for path in given or [*sorted((ROOT / "src").rglob("*.py")), *pages]
        for violation in check(path)
    ]
    print("\n".join(found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
