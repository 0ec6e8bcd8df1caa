"""Writes the pages of the API reference from the public names and their docstrings.

python docs/_extensions/api_pages.py build/api

The site does this at each build (`api_reference.py`); the pages are not committed.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import inspect
import re
import tomllib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import api_markdown
from api_markdown import fenced, in_table, section_of, sections, summary_of
from api_signatures import signature_of, type_of

import stratagem

ROOT = Path(__file__).parents[2]
MIGRATION = ROOT / "src" / "stratagem" / "cli" / "migrate" / "symbols.toml"
_OPERATORS = ("__call__", "__enter__", "__exit__", "__iter__", "__getitem__", "__len__")
_STATUSES = {
    "same": "The same",
    "renamed": "Renamed, with the same arguments",
    "changed": "Changed",
    "unneeded": "Not needed here",
    "absent": "Has no counterpart",
}


@dataclasses.dataclass
class Entry:
    """A public class, function, module or value, and its name, such as "sg.input.Dataset"."""

    value: Any
    name: str

    @property
    def kind(self) -> str:
        """Directive of Sphinx's Python domain, or "module"."""
        if isinstance(self.value, types.ModuleType):
            return "module"
        if inspect.isclass(self.value):
            return "exception" if issubclass(self.value, BaseException) else "class"
        return "function" if callable(self.value) else "data"

    @property
    def module(self) -> str:
        """Public module that it is documented in: "sg", or "sg.input" for "sg.input.Dataset"."""
        return self.name if self.kind == "module" else self.name.rpartition(".")[0]

    @property
    def page(self) -> str:
        """Page without suffix, below the folder of the reference."""
        path = self.name.split(".")[1:]
        if self.kind in ("class", "exception"):
            return "/".join(path)
        path = path if self.kind == "module" else path[:-1]
        return "/".join([*path, "index"]) if path else "functions"


def entries() -> list[Entry]:
    """Returns everything that is public, sorted by name."""
    found = [Entry(value, name) for name, value in _walk("sg", stratagem)]
    return sorted(found, key=lambda entry: entry.name)


def _walk(path: str, module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    for name in module.__all__:
        value = getattr(module, name)
        yield f"{path}.{name}", value
        if isinstance(value, types.ModuleType):
            yield from _walk(f"{path}.{name}", value)


def members_of(cls: type) -> Iterator[tuple[str, type]]:
    """Yields each public member of a class with the class that defines it."""
    for name in sorted(dir(cls)):
        owner = next(base for base in cls.__mro__ if name in vars(base) or base is object)
        is_hidden = name.startswith("_") and name not in _OPERATORS
        if not is_hidden and owner.__module__.startswith("stratagem"):
            yield name, owner


# Returns the rows of the migration table for a name.
Migration = Callable[[str], list[Mapping[str, str]]]


def read_migration(path: Path = MIGRATION) -> Migration:
    """Reads the migration table."""
    rows: dict[str, list[Mapping[str, str]]] = {}
    for row in tomllib.loads(path.read_text("utf-8"))["symbol"]:
        rows.setdefault(row["here"], []).append(row)

    def lookup(name: str) -> list[Mapping[str, str]]:
        found = rows.get(name, ())
        return sorted(found, key=lambda row: (not row["name"].startswith("tf."), len(row["name"])))

    return lookup


def source_url() -> str:
    """Returns the address of the repository, from `project.urls` of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return project.get("urls", {}).get("Source", "https://stratagem.example/source").rstrip("/")


class Reference:
    """The pages of the reference.

    Args:
        url: address of the repository.
        migration: lookup of TensorFlow's symbols.
    """

    def __init__(self, url: str, migration: Migration) -> None:
        self.entries = entries()
        self._url = url
        self._migration = migration
        self._by_class = {id(entry.value): entry for entry in self.entries if entry.kind == "class"}

    def pages(self) -> dict[str, str]:
        """Returns the Markdown of each page by its name, such as "input/Dataset"."""
        found = {
            entry.page: self._class_page(entry)
            for entry in self.entries
            if entry.kind in ("class", "exception")
        }
        for entry in self.entries:
            if entry.kind == "module":
                found[entry.page] = self._module_page(entry.name, entry)
        found["functions"] = self._module_page("sg", None)
        found["index"] = self._index_page()
        return found

    def _index_page(self) -> str:
        modules = [entry for entry in self.entries if entry.kind == "module"]
        classes = [entry for entry in self.entries if entry.kind in ("class", "exception")]
        in_root = [entry for entry in classes if entry.module == "sg"]
        trees = ["functions", *(entry.page for entry in (*in_root, *modules))]
        return "\n\n".join(
            [
                "# Python API",
                "Every public name, generated from its docstring. `sg` is `import stratagem as sg`."
                " Examples run with `stratagem as sg`, `numpy as np`, `jax` and `keras` imported;"
                " a test runs all of them.",
                _toctree(trees),
                "## Modules",
                self._table(modules),
                "## Classes of sg",
                self._table(in_root),
                "## Functions of sg",
                self._table([one for one in self._in_module("sg") if one.kind == "function"]),
                "",
            ]
        )

    def _in_module(self, module: str) -> list[Entry]:
        return [one for one in self.entries if one.module == module and one.kind != "module"]

    def _module_page(self, name: str, entry: Entry | None) -> str:
        members = self._in_module(name)
        classes = [one for one in members if one.kind in ("class", "exception")]
        functions = [one for one in members if one.kind == "function"]
        parts = [f"# {name}" if entry else "# Functions of sg"]
        if entry:
            parts.append(_module_line(entry))
            parts.append(api_markdown.markdown(inspect.getdoc(entry.value) or ""))
            inner = self._inner_modules(name)
            parts.append(_toctree([one.page.rpartition("/")[2] for one in classes]))
            parts += ["## Names", self._table([*members, *inner])] if members or inner else []
        for one in members:
            if one.kind == "data":
                parts += [f"## {one.name}", _data(one)]
        for one in functions:
            parts += [f"## {one.name}", self._object(one)]
        return "\n\n".join(filter(None, parts)) + "\n"

    def _inner_modules(self, module: str) -> list[Entry]:
        modules = [one for one in self.entries if one.kind == "module"]
        return [one for one in modules if one.name.rpartition(".")[0] == module]

    def _table(self, rows: Sequence[Entry]) -> str:
        lines = ["| name | |", "|---|---|"]
        for entry in rows:
            role = "mod" if entry.kind == "module" else "obj"
            link = f"{{py:{role}}}`{entry.name} <{_full(entry.name)}>`"
            lines.append(f"| {link} | {in_table(self._summary(entry))} |")
        return "\n".join(lines)

    def _summary(self, entry: Entry) -> str:
        if entry.kind == "data":
            return f"A constant of type `{type(entry.value).__name__}`."
        return summary_of(inspect.getdoc(entry.value) or "")

    def _class_page(self, entry: Entry) -> str:
        parts = [f"# {entry.name}", self._object(entry)]
        inherited: dict[str, list[str]] = {}
        own: list[str] = []
        for name, owner in members_of(entry.value):
            base = self._by_class.get(id(owner))
            if base is None or owner is entry.value:
                own.append(self._member(entry, name))
            else:
                inherited.setdefault(base.name, []).append(name)
        if inherited:
            parts.append("## Inherited members")
            for base_name, names in sorted(inherited.items()):
                links = ", ".join(f"{{py:obj}}`{n} <{_full(base_name)}.{n}>`" for n in names)
                parts.append(f"From {{py:obj}}`{base_name} <{_full(base_name)}>`: {links}.")
        parts += ["## Members", *own] if own else []
        return "\n\n".join(parts) + "\n"

    def _object(self, entry: Entry) -> str:
        signature = signature_of(entry.value)
        options = {"module": "stratagem", "canonical": entry.name}
        body = api_markdown.markdown(inspect.cleandoc(_own_docstring(entry.value)))
        place = f"Full name: `{_full(entry.name)}`. Defined in {self._place(entry.value)}."
        return "\n\n".join(
            filter(
                None,
                [
                    fenced(entry.kind, f"{_short(entry.name)}{signature}", options, body, 6),
                    self._box(entry.name),
                    place,
                ],
            )
        )

    def _member(self, entry: Entry, name: str) -> str:
        cls: type = entry.value
        static = inspect.getattr_static(cls, name)
        options = {"module": "stratagem", "canonical": f"{entry.name}.{name}"}
        path = f"{_short(entry.name)}.{name}"
        function = static.__func__ if isinstance(static, classmethod | staticmethod) else static
        if inspect.isfunction(function):
            for kind in (classmethod, staticmethod):
                options |= {kind.__name__: ""} if isinstance(static, kind) else {}
            if getattr(function, "__isabstractmethod__", False):
                options["abstractmethod"] = ""
            docstring = inspect.getdoc(getattr(cls, name)) or ""
            signature = signature_of(function, skip_first=not isinstance(static, staticmethod))
            kind_name = "method"
        elif isinstance(static, property):
            options |= {"type": type_of(static.fget)} if type_of(static.fget) else {}
            docstring, signature, kind_name = inspect.getdoc(static) or "", "", "property"
        else:
            docstring, signature, kind_name = "", "", "attribute"
            options |= {"value": repr(static.value)} if isinstance(static, enum.Enum) else {}
        body = api_markdown.markdown(docstring)
        box = self._box(f"{entry.name}.{name}")
        parts = [fenced(kind_name, f"{path}{signature}", options, body, 6), box]
        return "\n\n".join(filter(None, parts))

    def _box(self, name: str) -> str:
        """Returns a note about the symbols of TensorFlow that a name replaces."""
        rows = self._migration(name)
        if not rows:
            return ""
        first, *others = rows
        library = "TensorFlow" if first["name"].startswith("tf.") else "Other libraries"
        lines = [f"{_status(first)}"]
        lines += [f"- `{row['name']}`: {_status(row)}" for row in others]
        # A fence of backticks cannot have backticks in its title.
        head = [f":::{{admonition}} {library}: `{first['name']}`", ":class: tip", ""]
        return "\n".join([*head, lines[0], *([""] if others else []), *lines[1:], ":::"])

    def _place(self, value: Any) -> str:
        value = inspect.unwrap(value)
        path = Path(inspect.getsourcefile(value) or "").resolve()
        if not path.is_relative_to(ROOT):
            return f"`{value.__module__}`"
        line = inspect.getsourcelines(value)[1]
        name = str(path.relative_to(ROOT))
        return f"[{name}:{line}]({self._url}/blob/main/{name}#L{line})"


def _own_docstring(value: Any) -> str:
    return (vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__) or ""


def _status(row: Mapping[str, str]) -> str:
    text = _STATUSES.get(row["status"], row["status"])
    return f"{text}. {row['difference']}".rstrip() if row["difference"] else f"{text}."


def _full(name: str) -> str:
    return name.replace("sg", "stratagem", 1)


def _short(name: str) -> str:
    return name.removeprefix("sg.")


def _module_line(entry: Entry) -> str:
    return f"```{{py:module}} {_full(entry.name)}\n```"


def _toctree(pages: Sequence[str]) -> str:
    return "\n".join(["```{toctree}", ":hidden:", "", *pages, "```"]) if pages else ""


def _data(entry: Entry) -> str:
    text = repr(entry.value)
    shown = text if len(text) <= 80 and " at 0x" not in text else ""
    options = {"module": "stratagem", "canonical": entry.name, "type": type(entry.value).__name__}
    options |= {"value": shown} if shown else {}
    body = ""
    if isinstance(entry.value, Mapping):
        body = "Keys: " + ", ".join(f"`{key}`" for key in entry.value) + "."
    return fenced("data", _short(entry.name), options, body, 6)


def lacking(entry: Entry) -> list[str]:
    """Returns what the docstring of a class or function lacks: an example, or a source."""
    parts = sections(inspect.cleandoc(_own_docstring(entry.value)))
    example = section_of(parts, "Example") or ""
    runs = ">>> " in example and not re.search(r"doctest:\s*\+SKIP", example)
    found = [] if runs else [f"{entry.name} has no runnable example"]
    return found if section_of(parts, "Source") else [*found, f"{entry.name} names no source"]


def write_pages(folder: Path, url: str | None = None) -> list[Path]:
    """Writes all pages, and removes those of names that are gone.

    Pages that would not change are left alone, so that Sphinx reads only the others again.
    """
    pages = Reference(url or source_url(), read_migration()).pages()
    written = [folder / f"{name}.md" for name in pages]
    for path, text in zip(written, pages.values(), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
    for path in set(folder.rglob("*.md")) - set(written):
        path.unlink()
    return written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Writes the pages of the API reference.")
    parser.add_argument("folder", type=Path)
    print(f"{len(write_pages(parser.parse_args().folder))} pages")
