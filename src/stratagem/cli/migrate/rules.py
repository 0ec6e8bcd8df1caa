"""Rules of names: what a name of TensorFlow becomes, or the advice where it has no counterpart."""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import functools
import importlib.util
import tomllib
from pathlib import Path
from typing import Any

from stratagem import public_names
from stratagem.cli.migrate.symbols import load_symbols

# Public names of Keras and of this package, read from their files without importing them.


def exists(name: str) -> bool:
    """Returns True if a dotted name of `sg` or `keras` exists, up to its first class or function.

    Names of other roots are not checked.
    """
    root, *parts = name.split(".")
    if root == "sg":
        return _exists_here(parts)
    if root == "keras":
        folder = _folder("keras")
        return folder is None or _exists_in(folder, parts)
    return True


def _exists_here(parts: list[str]) -> bool:
    if not parts:
        return True
    if parts[0] not in public_names():
        return parts[0] == "__version__"
    folder = _folder("stratagem")
    if folder is None:
        return True
    path = folder.joinpath(*".".join(public_names()[parts[0]]).split(".")[1:])
    path = path if path.is_dir() else path.with_suffix(".py")
    return not path.exists() or _exists_in(path, parts[1:])  # else it is no module


def _exists_in(path: Path, parts: list[str]) -> bool:
    """Follows submodules from a package's folder, or a module's file, to an exported name."""
    for part in parts:
        if path.is_dir():
            stub, below = path / "__init__.pyi", path / part
            names = _names(stub if stub.is_file() else path / "__init__.py")
            if below.is_dir() or below.with_suffix(".py").is_file():
                path = below if below.is_dir() else below.with_suffix(".py")
                continue
        else:
            names = _names(path)
        return part in names
    return True


@functools.cache
def _folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    locations = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(locations))) if locations else None


@functools.cache
def _names(path: Path) -> frozenset[str]:
    """Names that a module imports or defines at its top, and the strings of its tuples."""
    if not path.is_file():
        return frozenset()
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom | ast.Import):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple | ast.List):
            strings = (one.value for one in node.value.elts if isinstance(one, ast.Constant))
            names.update(one for one in strings if isinstance(one, str))
    return frozenset(names)


_FOLDER = Path(__file__).parent
_ROOTS = ("tensorflow", "tensorflow_core")
_VERSIONS = ("compat.v1.", "compat.v2.", "_api.v1.", "_api.v2.")


@dataclasses.dataclass(frozen=True)
class Argument:
    """An argument of a TensorFlow function: its new name, and whether it is dropped or refused."""

    old: str
    new: str
    refused: bool = False
    by_keyword: bool = False
    default: str | None = None


@dataclasses.dataclass(frozen=True)
class CallRule:
    """A function's counterpart: with arguments, or a template with `{0}` for the first one."""

    target: str
    arguments: tuple[Argument, ...] = ()
    template: str | None = None


@dataclasses.dataclass(frozen=True)
class Advice:
    """A text for a comment, and the page to read."""

    text: str
    page: str

    def __str__(self) -> str:
        return f"{self.text}, see {self.page}"


@dataclasses.dataclass(frozen=True)
class Resolution:
    """The counterpart of a name; `rest` are attributes after it, such as `.SUM` of an enum."""

    name: str
    target: str
    rest: str = ""
    call: CallRule | None = None
    is_removed: bool = False


def tensorflow_name(qualified: str) -> str | None:
    """Returns a name as the rules spell it, "" for the package itself; None if not TensorFlow's."""
    root, _, name = qualified.partition(".")
    if root == "keras":
        return qualified
    if root not in _ROOTS:
        return None
    for version in _VERSIONS:
        if f"{name}.".startswith(version):
            name = name[len(version) :]
    if name.startswith("python.keras"):
        name = name.removeprefix("python.")
    return name.removeprefix("dtypes.")


def resolve(name: str) -> Resolution | None:
    """Returns the counterpart of a name or of its longest prefix with one."""
    rules = _rules()
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        head, rest = ".".join(parts[:count]), "".join(f".{part}" for part in parts[count:])
        head = rules["aliases"].get(head, head)
        if head in rules["removed"]["names"]:
            return Resolution(head, "", rest, is_removed=True)
        call = _calls().get(head)
        target = rules["names"].get(head, call.target if call is not None else None)
        if target is not None:
            # A string or a number has no attributes.
            refused = not target or (rest and not target.replace(".", "_").isidentifier())
            return None if refused else Resolution(head, target, rest, call)
    return _by_prefix(name)


def advice(name: str) -> Advice:
    """Returns what to do about a name without a counterpart."""
    marks = _rules()["marks"]
    parts = name.split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), -1, -1))
    text, page = next(marks[prefix] for prefix in prefixes if prefix in marks)
    if difference := _differences().get(f"tf.{name}"):
        text = difference.rstrip(".")
    return Advice(f"tf.{name}: {text}" if name else text, page)


def foreign_advice(package: str) -> Advice | None:
    """Returns what to do about a package that needs TensorFlow."""
    found = _rules()["modules"].get(package)
    return Advice(f"{package}: {found[0]}", found[1]) if found is not None else None


def keyword_rules(target: str) -> dict[str, str]:
    """Returns the renamed arguments of a class or function of Keras, by their old names."""
    table: dict[str, dict[str, str]] = _rules()["keywords"]
    found: dict[str, str] = {}
    for pattern, renames in table.items():
        if fnmatch.fnmatchcase(target, pattern):
            found |= renames
    return found


def method(name: str) -> str | None:
    """Returns the new name of a method, if it has one."""
    return _rules()["methods"].get(name)


def _by_prefix(name: str) -> Resolution | None:
    prefixes: dict[str, str] = _rules()["prefixes"]
    for prefix in sorted(prefixes, key=len, reverse=True):
        if name == prefix or name.startswith(f"{prefix}."):
            target = prefixes[prefix] + name[len(prefix) :]
            return Resolution(name, target) if exists(target) else None
    return None


@functools.cache
def _rules() -> dict[str, Any]:
    return tomllib.loads((_FOLDER / "renames.toml").read_text(encoding="utf-8"))


@functools.cache
def _calls() -> dict[str, CallRule]:
    return {name: _parse(text) for name, text in _rules()["calls"].items() if text}


def _parse(text: str) -> CallRule:
    """Parses "target(a, b=c, d!, e:1)", or a template."""
    if "{0}" in text:
        return CallRule(text.partition("(")[0], template=text)
    target, _, inside = text.removesuffix(")").partition("(")
    specs = [spec.strip() for spec in inside.split(",") if spec.strip()]
    return CallRule(target, tuple(_argument(spec) for spec in specs))


def _argument(spec: str) -> Argument:
    spec, _, default = spec.partition(":")
    refused, by_keyword = spec.endswith("!"), spec.endswith("*")
    old, renamed, new = spec.rstrip("!*").partition("=")
    return Argument(old, new if renamed else old, refused, by_keyword, default or None)


@functools.cache
def _differences() -> dict[str, str]:
    """Texts of the table of symbols, by name in TensorFlow."""
    return {one.name: one.difference for one in load_symbols() if one.difference}
