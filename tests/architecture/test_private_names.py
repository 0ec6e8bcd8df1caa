"""Private names of Keras and JAX in use: each is in its table, and in the installed version.

`python -m tests.architecture.test_private_names` prints all that a new release has moved, even
where Stratagem cannot be imported, and exits with 1 if there is any.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import pkgutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import keras
import pytest

from tests.architecture.source_tree import SOURCE, package

_KERAS_TABLE = SOURCE / "stratagem/keras/private.py"
_JAX_TABLE = SOURCE / "stratagem/devices/private.py"


def _name_of(path: Path) -> str:
    return f"loaded_{path.parent.name}"


def _loaded(path: Path) -> Any:
    """Returns a module by its file: its package may not be importable."""
    spec = importlib.util.spec_from_file_location(_name_of(path), path)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _is_there(path: str) -> bool:
    try:
        pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return False
    return True


def moved() -> list[str]:
    """Returns one line for each name that the installed Keras or JAX lacks."""
    with contextlib.suppress(ImportError):  # it has read its table by then
        _loaded(_KERAS_TABLE)
    table: Any = sys.modules[_name_of(_KERAS_TABLE)]
    lacking = set(table.missing())
    lines = [
        f"Keras {keras.__version__} has no {one.path} ({one.why})"
        for one in table.NAMES
        if one.path in lacking
    ]
    names = _loaded(_JAX_TABLE).NAMES
    lines += [f"JAX {jax.__version__} has no {path}" for path in names if not _is_there(path)]
    try:
        importlib.import_module("stratagem.keras")
    except Exception as error:  # noqa: BLE001 - whatever a new Keras makes of the import
        lines.append(f"stratagem.keras cannot be imported: {type(error).__name__}: {error}")
    return lines


@pytest.mark.compatibility
def test_installed_versions_have_every_name() -> None:
    assert moved() == []


def test_every_private_name_of_keras_is_in_the_table() -> None:
    (module,) = [one for one in package() if one.name == "stratagem.keras.private"]
    used = {
        imported.full_name.rpartition(".")[2]
        for imported in module.imports
        if imported.module.startswith("keras.src") and imported.name != "global_state"
    }
    attributes = {node.attr for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)}
    attributes |= {patch.name for patch in importlib.import_module("stratagem.keras.seam").PATCHES}
    used |= {one for one in attributes if one.startswith("_") and not one.startswith("__")}
    listed = {
        part
        for one in _loaded(_KERAS_TABLE).NAMES
        for path in (one.path, one.before)
        for part in path.split(".")
    }
    assert used <= listed


def test_all_names_that_keras_lacks_are_in_one_error(monkeypatch) -> None:
    private = importlib.import_module("keras.src.losses.loss")
    monkeypatch.delattr(private, "apply_mask")
    monkeypatch.delattr(keras.src.utils.python_utils, "pythonify_logs")
    monkeypatch.delattr(keras.metrics.MeanMetricWrapper, "__init__")  # which sets `_fn`
    with pytest.raises(ImportError, match=r"Expected Keras 3\.12 to") as raised:
        _loaded(_KERAS_TABLE)
    named = ("loss.apply_mask", "python_utils.pythonify_logs", "MeanMetricWrapper._fn_kwargs")
    assert all(one in str(raised.value) for one in named)


def test_attributes_that_keras_lacks_are_in_one_error(monkeypatch) -> None:
    seam = importlib.import_module("stratagem.keras.seam")
    monkeypatch.delattr(keras.random.SeedGenerator, "next")
    monkeypatch.delattr(keras.layers.BatchNormalization, "_moments")
    with pytest.raises(ImportError, match=r"SeedGenerator\.next, BatchNormalization\._moments"):
        seam.install()


if __name__ == "__main__":
    found = moved()
    print("\n".join(found) or f"Keras {keras.__version__}, JAX {jax.__version__}: nothing moved.")
    sys.exit(bool(found))
