"""Files to migrate: finding, reading, rewriting and writing them."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import json
import os
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import libcst as cst
import libcst.matchers as m
from libcst.metadata import (
    MetadataWrapper,
    QualifiedName,
    QualifiedNameProvider,
    QualifiedNameSource,
)
from rich.console import Console
from rich.syntax import Syntax

from stratagem.cli.migrate.context import MARK, FileContext, StatementRewriter, dotted, module_names
from stratagem.cli.migrate.datasets import DatasetRewriter
from stratagem.cli.migrate.imports import ImportRewriter, imports_tensorflow
from stratagem.cli.migrate.names import NameRewriter
from stratagem.cli.migrate.rules import tensorflow_name
from stratagem.cli.migrate.tapes import TapeRewriter
from stratagem.errors import explain, invalid

# Assignments of modules, such as `keras = tf.keras`, as the imports that they stand for.

_MAX_PARTS = 2  # "keras" and "keras.layers"


class ModuleAliasRewriter(StatementRewriter):
    """Replaces `layers = tf.keras.layers` at the top of a file by an import of the same name."""

    def visit_IndentedBlock(self, node: cst.IndentedBlock) -> bool:
        """Leaves blocks alone."""
        return False

    def leave_Assign(
        self, original_node: cst.Assign, updated_node: cst.Assign
    ) -> cst.BaseSmallStatement:
        """Replaces the assignment."""
        target = original_node.targets[0].target
        if len(original_node.targets) > 1 or not isinstance(target, cst.Name):
            return updated_node
        is_name = dotted(original_node.value) is not None
        name = self.tensorflow_name(original_node.value) if is_name else None
        parts = name.split(".") if name else []
        if not parts or parts[0] != "keras" or len(parts) > _MAX_PARTS:
            return updated_node
        module, _, last = f"tensorflow.{name}".rpartition(".")
        alias = "" if last == target.value else f" as {target.value}"
        line = cst.parse_statement(f"from {module} import {last}{alias}")
        return cst.ensure_type(line, cst.SimpleStatementLine).body[0]


# Rewriting of `tf.function`, and the functions that replicas or workers run.

_RUN = ("run", "experimental_run_v2", "experimental_run", "call_for_each_replica", "run_steps")
_PLAIN = ("schedule", "create_per_worker_dataset", "distribute_datasets_from_function")
_READS = ("get_next", "get_next_as_optional")
_MAKES_DATA = ("distribute_datasets_from_function", "experimental_distribute_dataset")


@dataclasses.dataclass
class FunctionUses:
    """Names of functions that are compiled, and of those that must stay plain Python."""

    steps: set[str] = dataclasses.field(default_factory=set[str])
    plain: set[str] = dataclasses.field(default_factory=set[str])


def function_uses(module: cst.Module) -> FunctionUses:
    """Finds functions that are passed to `strategy.run`, and those a coordinator schedules."""
    uses = FunctionUses()
    for node in m.findall(module, m.Call(func=m.Attribute())):
        call = cst.ensure_type(node, cst.Call)
        method = cst.ensure_type(call.func, cst.Attribute).attr.value
        name = _first_name(call)
        if name is not None and method in _RUN:
            uses.steps.add(name)
        elif name is not None and method in _PLAIN:
            uses.plain.add(name)
    for node in m.findall(module, m.FunctionDef()):
        function = cst.ensure_type(node, cst.FunctionDef)
        if _must_stay_plain(function):
            uses.plain.add(function.name.value)
    return uses


def _first_name(call: cst.Call) -> str | None:
    """Returns the name of the function that a call is given, `f` for `self.f` too."""
    for argument in call.args[:1]:
        if isinstance(argument.value, cst.Name | cst.Attribute):
            value = argument.value
            return value.value if isinstance(value, cst.Name) else value.attr.value
    return None


def _must_stay_plain(function: cst.FunctionDef) -> bool:
    """Returns True if a function reads or makes a dataset itself, which a trace cannot."""
    parameters = [one.name.value for one in function.params.params]
    for name in parameters:
        reads = m.Call(func=m.Name("next"), args=[m.Arg(value=m.Name(name))])
        methods = m.OneOf(*(m.Name(one) for one in _READS))
        gets = m.Call(func=m.Attribute(value=m.Name(name), attr=methods))
        loops = m.For(iter=m.Name(name))
        if m.findall(function.body, m.OneOf(reads, gets, loops)):
            return True
    makes = m.OneOf(*(m.Name(one) for one in _MAKES_DATA))
    return bool(m.findall(function.body, m.Call(func=m.Attribute(attr=makes))))


class FunctionRewriter(StatementRewriter):
    """Drops `tf.function` where a function runs in a step, or reads a dataset itself."""

    def __init__(self, context: FileContext, uses: FunctionUses) -> None:
        super().__init__(context)
        self._uses = uses

    def leave_FunctionDef(
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        """Drops the decorator, keeping the comments above it."""
        name = original_node.name.value
        if name not in self._uses.steps | self._uses.plain:
            if any(self._is_function(one.decorator) for one in original_node.decorators):
                self._uses.steps.add(name)
            return updated_node
        kept = [
            new
            for old, new in zip(original_node.decorators, updated_node.decorators, strict=True)
            if not self._is_function(old.decorator)
        ]
        if len(kept) == len(updated_node.decorators):
            return updated_node
        after = () if kept else updated_node.lines_after_decorators
        return updated_node.with_changes(decorators=kept, lines_after_decorators=after)

    def leave_For(self, original_node: cst.For, updated_node: cst.For) -> cst.For:
        """Loops over a Python range where TensorFlow's loop was over a tensor."""
        call = original_node.iter
        if isinstance(call, cst.Call) and self.tensorflow_name(call.func) == "range":
            new = cst.ensure_type(updated_node.iter, cst.Call)
            return updated_node.with_changes(iter=new.with_changes(func=cst.Name("range")))
        return updated_node

    def _is_function(self, decorator: cst.BaseExpression) -> bool:
        node = decorator.func if isinstance(decorator, cst.Call) else decorator
        return self.tensorflow_name(node) == "function"


# Rewriting of one program: the passes, and the guarantees about what comes out.


class UnreadableSourceError(ValueError):
    """Raised for a file that is not Python 3."""


def rewrite(source: str) -> str:
    """Rewrites a program; one that does not import TensorFlow stays as it is.

    Raises UnreadableSourceError if the program does not parse.
    """
    module = _parsed(source)
    if module is None or not imports_tensorflow(module):
        return source
    if ".keras" in source:
        module = _visited(module, ModuleAliasRewriter(FileContext()))
    wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
    names, taken = module_names(wrapper)
    context = FileContext(names, taken=taken)
    uses = function_uses(module)
    module = wrapper.visit(FunctionRewriter(context, uses))
    tapes = TapeRewriter(context)
    # Names of each node take most of the time, so a pass runs only where it has work.
    if "GradientTape" in source:
        module = _visited(module, tapes)
    if "Dataset" in source:
        module = _visited(module, DatasetRewriter(context))
    has_tapes = tapes.num_rewritten > 0
    module = _visited(module, NameRewriter(context, uses.steps, has_tapes=has_tapes))
    module = module.visit(ImportRewriter(context, _used_names(module)))
    after = module.code
    _compile(after)
    return after


def _parsed(source: str) -> cst.Module | None:
    """Parses a program; None for one without the word tensorflow, which needs no tree."""
    try:
        _compile(source)
        module = cst.parse_module(source) if "tensorflow" in source else None
    except (SyntaxError, ValueError, cst.ParserSyntaxError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error).split("\n")[0]
        line = getattr(error, "lineno", None) or getattr(error, "raw_line", "?")
        raise UnreadableSourceError(
            explain(
                f"Line {line} does not parse: {reason}.",
                expected="a program for Python 3.",
                fix="repair it, or convert it with 2to3 first.",
            )
        ) from error
    if module is None or not module.body:
        return module
    # The comments at the top belong to the first statement like those above any other one.
    first = module.body[0]
    lines = [*module.header, *getattr(first, "leading_lines", ())]
    body = [first.with_changes(leading_lines=lines), *module.body[1:]]
    return module.with_changes(header=(), body=body)


def _compile(source: str) -> None:
    compile(source, "<program>", "exec", dont_inherit=True, flags=ast.PyCF_ONLY_AST)


def _visited(module: cst.Module, rewriter: StatementRewriter) -> cst.Module:
    return MetadataWrapper(module, unsafe_skip_copy=True).visit(rewriter)


def _resolved(names: object) -> Collection[QualifiedName]:
    """Returns qualified names, which libcst computes when they are asked for."""
    value = names() if callable(names) else names
    return value if isinstance(value, Collection) else ()


def _used_names(module: cst.Module) -> set[str]:
    """Returns the local names of TensorFlow that a program still reads."""
    found = MetadataWrapper(module, unsafe_skip_copy=True).resolve(QualifiedNameProvider)
    used: set[str] = set()
    for node, names in found.items():
        if isinstance(node, cst.Name):
            for one in _resolved(names):
                is_import = one.source is QualifiedNameSource.IMPORT
                if is_import and tensorflow_name(one.name) is not None:
                    used.add(node.value)
    return used


# Notebooks as programs: code cells joined for rewriting, magics set aside.

_CELL = "__stratagem_cell__"
_MAGIC = "__stratagem_magic__"
# Cell magics whose cell is Python of the notebook; %%writefile has a program of its own.
_PYTHON_CELLS = ("%%time", "%%timeit", "%%capture", "%%prun")
_MAGIC_LINE = re.compile(r"^(?P<indent>\s*)(?P<text>[!%?].*|[\w.]+\s*=\s*[!%].*|[\w.]+\?{1,2}\s*)$")
_CELL_LINE = re.compile(rf"^{_CELL}\((\d+)\)\n?", re.MULTILINE)
_MAGIC_CALL = re.compile(rf"{_MAGIC}\((\d+)\)")


def rewrite_notebook(text: str) -> tuple[str, list[str]]:
    """Rewrites the code cells of a notebook; returns its text and the programs in it.

    The cells are one program, as they are when the notebook runs. Raises UnreadableSourceError for
    a text that is no notebook.
    """
    notebook = _loaded(text)
    cells = [cell for cell in notebook["cells"] if cell.get("cell_type") == "code"]
    sources = ["".join(cell.get("source", ())) for cell in cells]
    programs: list[str] = []
    new = list(sources)
    joined: list[str] = []
    magics: list[str] = []
    for index, source in enumerate(sources):
        if source.startswith("%%writefile") and source.partition("\n")[0].endswith(".py"):
            head, _, body = source.partition("\n")
            if _error_line(body) is None:
                programs.append(rewrite(body))
                new[index] = f"{head}\n{programs[-1]}"
        elif (code := _without_magics(source, magics)) is not None:
            joined.append(f"{_CELL}({index})\n{code}\n")
    programs.append(rewrite("".join(joined)))
    _, *parts = _CELL_LINE.split(programs[-1])
    for index, code in zip(map(int, parts[::2]), parts[1::2], strict=True):
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


def _dumped(notebook: dict[str, Any], text: str) -> str:
    """Writes JSON in the manner of the original."""
    end = "\n" if text.endswith("\n") else ""
    original = json.loads(text)
    for indent in (1, 2, 4, None):
        for is_ascii in (False, True):
            if json.dumps(original, indent=indent, ensure_ascii=is_ascii) + end == text:
                return json.dumps(notebook, indent=indent, ensure_ascii=is_ascii) + end
    return json.dumps(notebook, indent=1, ensure_ascii=False) + end


_SUFFIXES = (".py", ".ipynb")
_SKIPPED_FOLDERS = ("venv", "env", "node_modules", "__pycache__", "site-packages", "build", "dist")


@dataclasses.dataclass(frozen=True)
class FileReport:
    """Result of one file; with an `error` the file stays as it is."""

    path: Path
    before: str = ""
    after: str = ""
    marks: tuple[tuple[int, str], ...] = ()
    error: str | None = None

    @property
    def is_changed(self) -> bool:
        """True if the file changes."""
        return self.before != self.after

    @property
    def num_changed_lines(self) -> int:
        """Number of lines that are added or removed, the longer of the two in each place."""
        matcher = difflib.SequenceMatcher(
            None, self.before.splitlines(), self.after.splitlines(), autojunk=False
        )
        codes = matcher.get_opcodes()
        return sum(max(b - a, d - c) for tag, a, b, c, d in codes if tag != "equal")

    def diff(self) -> str:
        """Returns the unified diff of the file; of a notebook, that of its JSON."""
        name = str(self.path)
        lines = difflib.unified_diff(
            self.before.splitlines(keepends=True),
            self.after.splitlines(keepends=True),
            f"a/{name}",
            f"b/{name}",
        )
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)

    def to_dict(self) -> dict[str, object]:
        """Returns the report as JSON values."""
        return {
            "path": str(self.path),
            "changed": self.is_changed,
            "changed_lines": self.num_changed_lines,
            "left_to_do": [{"line": line, "text": text} for line, text in self.marks],
            "error": self.error,
        }


def find_files(paths: Sequence[Path]) -> list[Path]:
    """Returns the programs and notebooks of paths; raises ValueError for other files."""
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            found.update(dict.fromkeys(_below(path)))
        elif path.suffix in _SUFFIXES:
            found[path] = None
        else:
            raise invalid(
                f"{path} is not a program or a notebook.",
                expected="a .py or .ipynb file, or a folder of them.",
                fix="rename it, or leave it out.",
            )
    return list(found)


def migrate_file(path: Path) -> FileReport:
    """Rewrites a file's text without writing it; a file that cannot be read has an error."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            text = file.read()
        if path.suffix == ".ipynb":
            after, programs = rewrite_notebook(text)
            marks = tuple((0, mark) for _, mark in _marks("\n".join(programs)))
        else:
            after = rewrite(text)
            marks = tuple(_marks(after))
    except UnicodeDecodeError as error:
        return FileReport(path, error=f"It is not text in UTF-8: {error.reason}.")
    except (OSError, UnreadableSourceError) as error:
        return FileReport(path, error=str(error))
    return FileReport(path, text, after, marks)


def write(report: FileReport) -> FileReport:
    """Replaces a file as a whole, with its permissions; one that cannot be written has an error."""
    try:
        _replace(report.path.resolve(), report.after)
    except OSError as error:
        return dataclasses.replace(report, after=report.before, marks=(), error=str(error))
    return report


def _replace(target: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        Path(name).chmod(target.stat().st_mode & 0o7777)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def summary(reports: Iterable[FileReport]) -> dict[str, int]:
    """Returns the totals of all files."""
    reports = list(reports)
    return {
        "files": len(reports),
        "changed_files": sum(one.is_changed for one in reports),
        "changed_lines": sum(one.num_changed_lines for one in reports),
        "left_to_do": sum(len(one.marks) for one in reports),
        "errors": sum(one.error is not None for one in reports),
    }


def _below(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(
            one
            for one in folders
            if not one.startswith(".")
            and one not in _SKIPPED_FOLDERS
            and not Path(root, one, "pyvenv.cfg").exists()
        )
        names = (Path(root, one) for one in sorted(files) if not one.startswith("."))
        yield from (path for path in names if path.suffix in _SUFFIXES)


def _marks(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if stripped.startswith(MARK):
            yield number, stripped.removeprefix(MARK)


# Printed results of a migration: diffs, and a summary with the places left to do.


def show_diff(report: FileReport) -> None:
    """Prints the unified diff of a file, colored on a terminal."""
    console = Console()
    if console.is_terminal:
        console.print(Syntax(report.diff(), "diff", background_color="default"))
    else:
        # As it is, so that `patch` can read it.
        console.file.write(report.diff())


def show_summary(reports: Sequence[FileReport], *, written: bool) -> None:
    """Prints totals, places left to do, and files that could not be read; on standard error."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    for one in reports:
        for line, text in one.marks:
            where = f"{one.path}:{line}" if line else str(one.path)
            console.print(f"{where}: {text}", markup=False)
        if one.error is not None:
            console.print(f"{one.path} stays as it is. {one.error}", markup=False, style="red")
    total = summary(reports)
    verb = "changed" if written else "to change"
    parts = [
        f"{_count(total['files'], 'file')}: {total['changed_files']} {verb}",
        _count(total["changed_lines"], "line"),
        f"{_count(total['left_to_do'], 'place')} left to do",
    ]
    if total["errors"]:
        parts.append(f"{total['errors']} not readable")
    console.print(", ".join(parts) + ".", markup=False)


def as_dict(reports: Sequence[FileReport]) -> dict[str, object]:
    """Returns totals and files as JSON values; files without changes or marks are left out."""
    named = [one for one in reports if one.is_changed or one.marks or one.error]
    return {**summary(reports), "reports": [one.to_dict() for one in named]}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
