"""Package of a program's files: its folder, and loaded modules that are not installed."""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import io
import os
import site
import sys
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from stratagem import settings
from stratagem.errors import explain

# Never sent: caches, environments, and names that begin with a dot.
_LEFT_OUT = (".*", "__pycache__", "*.pyc", "node_modules", "*.egg-info")
_NUM_LARGEST = 5
# The date of every file, so that equal files make equal packages.
_DATE = (1980, 1, 1, 0, 0, 0)


@dataclasses.dataclass(frozen=True)
class Package:
    """Archive of files, with a name that depends only on their contents."""

    name: str
    content: bytes


def local_modules(loaded: Mapping[str, ModuleType] | None = None) -> dict[str, Path]:
    """Returns file or folder of each loaded top-level module outside Python and its packages."""
    installed = _installed_folders()
    found: dict[str, Path] = {}
    for name, module in list((sys.modules if loaded is None else loaded).items()):
        top, _, _ = name.partition(".")
        if top in ("__main__", "__mp_main__", "stratagem") or top in found:
            continue
        path = _location(top, name, module)
        if path is not None and not any(path.is_relative_to(one) for one in installed):
            found[top] = path
    return found


def pack(
    folder: Path | None,
    modules: Mapping[str, Path],
    *,
    more: Mapping[str, bytes] | None = None,
    excludes: Sequence[str] = (),
    limit_bytes: int | None = None,
) -> Package:
    """Packs files into an archive, to be unpacked where the program runs.

    Packs all of `folder`, `modules` (files of `folder` take precedence) and `more` files by
    content. `excludes` are patterns of names or paths, such as "*.csv" or "data/raw"; caches,
    virtual environments and names that begin with a dot are never packed. Raises ValueError above
    `limit_bytes`, or `STRATAGEM_UPLOAD_LIMIT_BYTES` if None.
    """
    limit = int(settings.read("upload_limit_bytes")) if limit_bytes is None else limit_bytes
    files: dict[str, Path] = {}
    sizes: dict[str, int] = {}
    for name, path in _all_files(folder, modules, (*_LEFT_OUT, *excludes)):
        if name in files:
            continue
        files[name] = path
        part = name.partition("/")[0]
        sizes[part] = sizes.get(part, 0) + path.stat().st_size
        if sum(sizes.values()) > limit:
            raise ValueError(_too_large(folder, sizes, limit))
    written = io.BytesIO()
    contents = {name: path.read_bytes() for name, path in files.items()} | dict(more or {})
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(contents.items()):
            archive.writestr(zipfile.ZipInfo(name, _DATE), content, zipfile.ZIP_DEFLATED)
    data = written.getvalue()
    return Package(f"stratagem_{hashlib.sha256(data).hexdigest()[:32]}.zip", data)


def _all_files(
    folder: Path | None, modules: Mapping[str, Path], excludes: Sequence[str]
) -> Iterator[tuple[str, Path]]:
    """Yields files with their names in the archive; the first of a name wins."""
    if folder is not None:
        yield from _files_below(folder, excludes)
    for top, place in modules.items():
        if folder is not None and place.is_relative_to(folder):
            continue
        if place.is_dir():
            for name, path in _files_below(place, excludes):
                yield f"{top}/{name}", path
        else:
            yield place.name, place


def _files_below(folder: Path, excludes: Sequence[str]) -> Iterator[tuple[str, Path]]:
    for current, folders, names in os.walk(folder):
        here = Path(current)
        folders[:] = sorted(
            name
            for name in folders
            if not _is_excluded(here.joinpath(name).relative_to(folder), excludes)
            and not (here / name / "pyvenv.cfg").exists()
        )
        for name in sorted(names):
            path = here / name
            if not _is_excluded(path.relative_to(folder), excludes) and path.is_file():
                yield path.relative_to(folder).as_posix(), path


def _is_excluded(path: Path, excludes: Iterable[str]) -> bool:
    return any(
        fnmatch.fnmatch(path.name, one) or fnmatch.fnmatch(path.as_posix(), one.rstrip("/"))
        for one in excludes
    )


def _too_large(folder: Path | None, sizes: Mapping[str, int], limit: int) -> str:
    largest = sorted(sizes, key=lambda part: -sizes[part])[:_NUM_LARGEST]
    named = ", ".join(f"{part} ({sizes[part]:,} bytes so far)" for part in largest)
    return explain(
        f"The program's files are larger than {limit:,} bytes; the largest are {named}.",
        expected=f"source code and small files only in {folder}.",
        fix='pass excludes=["..."], move data to storage that the servers can read, or raise '
        "STRATAGEM_UPLOAD_LIMIT_BYTES.",
    )


def _location(top: str, name: str, module: ModuleType) -> Path | None:
    """Returns file or folder of the top-level module that a module belongs to, or None."""
    file = getattr(module, "__file__", None)
    folders = list(getattr(module, "__path__", None) or ())
    if name == top and file is None and folders:
        return Path(folders[0]).resolve()  # a package without __init__.py
    if file is None or not Path(file).is_file():
        return None
    path = Path(file).resolve()
    if name == top:
        return path.parent if folders else path
    depth = name.count(".") + (1 if folders else 0)
    return path.parents[depth - 1] if len(path.parents) >= depth else None


def _installed_folders() -> list[Path]:
    folders = [*sysconfig.get_paths().values(), *site.getsitepackages(), sys.base_prefix]
    # Debian's folder, and `pip install --user`'s; a virtual environment may be in the folder.
    folders += [site.getusersitepackages(), sys.prefix]
    roots = {Path(folder).resolve() for folder in folders if folder}
    return [root for root in roots if root != Path(root.anchor)]
