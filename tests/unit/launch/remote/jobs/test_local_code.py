"""Files that are sent with a program."""

from __future__ import annotations

import importlib
import io
import json
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest

from stratagem.launch.remote.jobs.local_code import Package, local_modules, pack


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A script with modules, and what is not meant."""
    for name in (
        "project/train.py",
        "project/models/__init__.py",
        "project/models/deep/wide.py",
        "project/data/raw/big.bin",
        "project/data/small.csv",
        "project/.git/config",
        "project/.hidden",
        "project/models/__pycache__/wide.cpython-311.pyc",
        "project/env/pyvenv.cfg",
        "project/env/lib/python.py",
        "elsewhere/shared_layers/__init__.py",
        "elsewhere/shared_layers/dense.py",
        "elsewhere/single_file.py",
        "elsewhere/spaces/inner/deep.py",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"NAME = {name!r}\n")
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    return tmp_path


def _names(package: Package) -> list[str]:
    return sorted(zipfile.ZipFile(io.BytesIO(package.content)).namelist())


def test_folder_is_sent_without_what_is_not_meant(project) -> None:
    package = pack(project / "project", {}, more={"call": b"bytes"})
    assert _names(package) == [
        "call",
        "data/raw/big.bin",
        "data/small.csv",
        "models/__init__.py",
        "models/deep/wide.py",
        "train.py",
    ]
    archive = zipfile.ZipFile(io.BytesIO(package.content))
    assert archive.read("train.py") == (project / "project/train.py").read_bytes()
    assert archive.read("call") == b"bytes"


def test_patterns_leave_files_out_by_name_and_by_path(project) -> None:
    package = pack(project / "project", {}, excludes=["*.csv", "data/raw/"])
    assert _names(package) == ["models/__init__.py", "models/deep/wide.py", "train.py"]


def test_modules_of_nobody_else_are_found(project, monkeypatch) -> None:
    for name in ("shared_layers", "shared_layers.dense", "single_file", "spaces.inner.deep"):
        importlib.import_module(name)
    try:
        found = local_modules()
    finally:
        for name in [
            n for n in sys.modules if n.startswith(("shared_layers", "single_", "spaces"))
        ]:
            del sys.modules[name]
    elsewhere = project / "elsewhere"
    assert {name: found.get(name) for name in ("shared_layers", "single_file", "spaces")} == {
        "shared_layers": elsewhere / "shared_layers",
        "single_file": elsewhere / "single_file.py",
        "spaces": elsewhere / "spaces",
    }
    assert not {"numpy", "json", "stratagem", "__main__", "pytest", "sys"} & found.keys()
    assert _names(pack(None, {name: found[name] for name in ("shared_layers", "single_file")})) == [
        "shared_layers/__init__.py",
        "shared_layers/dense.py",
        "single_file.py",
    ]


def test_modules_without_files_are_left_out() -> None:
    odd = types.ModuleType("odd")
    odd.__file__ = "/no/such/file.py"
    loaded = {"odd": odd, "bare": types.ModuleType("bare"), "json": json, "numpy": np}
    assert local_modules(loaded) == {}


def test_file_of_the_folder_wins_over_a_module_of_its_name(project) -> None:
    (project / "project" / "single_file.py").write_text("HERE = 1\n")
    package = pack(project / "project", {"single_file": project / "elsewhere/single_file.py"})
    archive = zipfile.ZipFile(io.BytesIO(package.content))
    assert archive.read("single_file.py") == b"HERE = 1\n"


def test_same_files_are_the_same_package(project) -> None:
    first = pack(project / "project", {})
    (project / "project" / "train.py").touch()
    assert pack(project / "project", {}) == first
    (project / "project" / "train.py").write_text("NAME = 0\n")
    assert pack(project / "project", {}).name != first.name


def test_too_large_folder_names_what_is_large(project, monkeypatch) -> None:
    (project / "project/data/raw/big.bin").write_bytes(bytes(5000))
    with pytest.raises(ValueError, match=r"files are larger than 4,000 bytes") as raised:
        pack(project / "project", {}, limit_bytes=4000)
    assert "data (5,0" in str(raised.value)
    assert "STRATAGEM_UPLOAD_LIMIT_BYTES" in str(raised.value)
    monkeypatch.setenv("STRATAGEM_UPLOAD_LIMIT_BYTES", "10")
    with pytest.raises(ValueError, match="files are larger than 10 bytes"):
        pack(project / "project", {})
