"""Docstrings as Markdown, for the pages of the API reference."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence

_SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Example")
_TITLES = {"Args": "Arguments", "Source": "Source"}
_HEADER = re.compile(rf"^({'|'.join(_SECTIONS)}):(:?)$")
_SOURCE = re.compile(r"^Source: ")
_ITEM = re.compile(r"^([*\w]+(?:, [*\w]+)*): (.*)$")
_CODE = re.compile(r"(`+[^`]+`+)")
_SPECIAL = re.compile(r"([\\*<\[\]]|(?<!\w)_|_(?!\w))")
_BULLET = re.compile(r"^(- |\d+\. )")


def sections(docstring: str) -> list[tuple[str, str]]:
    """Splits a docstring into (title, text); the title of plain text is ""."""
    found: list[tuple[str, list[str]]] = [("", [])]
    for line in docstring.splitlines():
        header = _HEADER.match(line)
        if header:
            found.append((header[1], []))
        elif _SOURCE.match(line):
            found.append(("Source", [line.removeprefix("Source: ")]))
        elif line and not line.startswith(" ") and found[-1][0] not in ("", "Source"):
            found.append(("", [line]))
        elif not line and found[-1][0] == "Source":
            found.append(("", []))
        else:
            found[-1][1].append(line)
    texts = [(title, textwrap.dedent("\n".join(lines)).strip("\n")) for title, lines in found]
    return [(title, text) for title, text in texts if text]


def section_of(parts: Sequence[tuple[str, str]], title: str) -> str | None:
    """Returns the text of a section, or None."""
    return next((text for name, text in parts if name == title), None)


def summary_of(docstring: str) -> str:
    """Returns the first sentence, as Markdown."""
    first = " ".join(docstring.split("\n\n", 1)[0].split())
    sentence = re.split(r"(?<=[.:])\s+(?=[A-Z`])", first, maxsplit=1)[0]
    return escaped(sentence)


def in_table(text: str) -> str:
    """Escapes a text for a cell of a table."""
    return text.replace("|", "\\|")


def markdown(docstring: str) -> str:
    """Returns a docstring as Markdown."""
    parts: list[str] = []
    for title, text in sections(docstring):
        if title == "Example":
            parts += ["**Example**", _example(text)]
        elif title in ("Args", "Attributes", "Raises"):
            parts += [f"**{_TITLES.get(title, title)}**", _items(text)]
        elif title == "Source":
            parts.append(f"**Source:** {prose(text)}")
        elif title:
            parts += [f"**{title}**", prose(text)]
        else:
            parts.append(prose(text))
    return "\n\n".join(parts)


def prose(text: str) -> str:
    """Returns paragraphs, lists, literal blocks and examples as Markdown."""
    parts: list[str] = []
    is_literal = False
    for block in re.split(r"\n\s*\n", text):
        if is_literal and block.startswith(" "):
            parts.append(_code(textwrap.dedent(block)))
            continue
        is_literal = block.rstrip().endswith("::")
        if block.lstrip().startswith(">>> "):
            parts.append(_example(textwrap.dedent(block)))
        elif is_literal:
            lead = block.rstrip().removesuffix("::")
            parts += [f"{_paragraph(lead)}:"] if lead.strip() else []
        else:
            parts.append(_paragraph(block))
    return "\n\n".join(parts)


def escaped(text: str) -> str:
    """Escapes what Markdown would take for markup, outside of code."""
    return "".join(
        part if part.startswith("`") else _SPECIAL.sub(r"\\\1", part) for part in _CODE.split(text)
    )


def fenced(
    directive: str, argument: str, options: Mapping[str, str], body: str, length: int
) -> str:
    """Returns a directive of the Python domain."""
    fence = "`" * length
    lines = [f"{fence}{{py:{directive}}} {argument}"]
    lines += [f":{name}: {value}".rstrip() for name, value in options.items()]
    return "\n".join([*lines, *(["", body] if body else []), fence])


def _paragraph(block: str) -> str:
    lines: list[str] = []
    for line in block.splitlines():
        if lines and not _BULLET.match(line.strip()):
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line.strip())
    return escaped("\n".join(lines))


def _items(text: str) -> str:
    """Returns `name: text` items as a list; text of several paragraphs stays with its name."""
    items: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        found = _ITEM.match(line)
        if found:
            items.append((found[1], [found[2]]))
        elif items:
            items[-1][1].append(line)
        else:
            items.append(("", [line]))
    lines: list[str] = []
    for name, texts in items:
        first, rest = texts[0], textwrap.dedent("\n".join(texts[1:]))
        body = textwrap.indent(prose(f"{first}\n{rest}".rstrip()), "  ").lstrip()
        lines.append(f"- `{name}`: {body}" if name else f"- {body}")
    return "\n".join(lines)


def _example(text: str) -> str:
    # Not the language `python`: the tests of pages run those blocks as one program.
    return f"```pycon\n{text}\n```" if text.startswith(">>>") else _code(text)


def _code(text: str) -> str:
    return f"```py\n{text.rstrip()}\n```" if "─" not in text else f"```none\n{text.rstrip()}\n```"
