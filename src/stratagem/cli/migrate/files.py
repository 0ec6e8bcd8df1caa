"""Files to migrate: finding, reading, rewriting and writing them."""

from __future__ import annotations

import dataclasses
import difflib
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from stratagem.cli.migrate.context import MARK
from stratagem.cli.migrate.notebooks import rewrite_notebook
from stratagem.cli.migrate.rewrite import UnreadableSourceError, rewrite
from stratagem.messages import explain

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
            raise ValueError(
                explain(
                    f"{path} is not a program or a notebook.",
                    expected="a .py or .ipynb file, or a folder of them.",
                    fix="rename it, or leave it out.",
                )
            )
    return list(found)


def migrate_file(path: Path) -> FileReport:
    """Rewrites a file's text without writing it; a file that cannot be read has an error."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            text = file.read()
        if path.suffix == ".ipynb":
            after, programs = rewrite_notebook(text, rewrite)
            code = "\n".join(program.after for program in programs)
            marks = tuple((0, mark) for _, mark in _marks(code))
        else:
            after = rewrite(text).after
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
