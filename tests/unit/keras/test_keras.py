"""Patches of Keras: each has an effect, upstream.md explains it, and there are no others."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from stratagem.keras.patches import Patch, declared
from stratagem.keras.private import JAXTrainer, Trainer, jax_core
from stratagem.keras.seam import PATCHES
from tests.architecture.source_tree import REPOSITORY, SOURCE, Module, assert_none, package
from tests.fresh_process import run_fresh

# The methods of a metric class are wrapped when its first object is created.
_ALLOWED = {("stratagem.keras.numerics.metrics", "cls")}


# Keras 3.16 has other names for these.
_OLDER_NAMES = {
    JAXTrainer: "JAXTrainer",
    Trainer: "Trainer",
    jax_core: "keras.src.backend.jax.core",
}


def _name(patch: Patch) -> str:
    return f"{_OLDER_NAMES.get(patch.owner, patch.owner.__name__)}.{patch.name}"


@pytest.mark.parametrize("patch", PATCHES, ids=_name)
def test_patch_is_installed(patch: Patch) -> None:
    found = vars(patch.owner)[patch.name]
    found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
    while not (path := Path(found.__code__.co_filename)).is_relative_to(SOURCE):
        assert hasattr(found, "__wrapped__"), f"{_name(patch)} is {found} of {path}"
        found = found.__wrapped__


def test_all_patches_are_installed_and_each_attribute_has_one() -> None:
    names = sorted(map(_name, PATCHES))
    assert names == sorted(_name(patch) for patches in declared.values() for patch in patches)
    assert len(set(names)) == len(names)


def _assigned(module: Module) -> list[tuple[str, ast.expr]]:
    """The root names of objects whose attributes a module replaces, `self` excluded."""
    found: list[tuple[str, ast.expr]] = []
    for node in ast.walk(module.tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = [one.value for one in node.targets if isinstance(one, ast.Attribute)]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
            targets = node.args[:1]
        for target in targets:
            root = target
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name):
                found.append((root.id, target))
    return found


def _of_keras(module: Module) -> set[str]:
    """Names in a module that stand for Keras, its classes, or a class that a caller passes."""
    names = {"cls"}
    for one in module.imports:
        if one.module.split(".")[0] == "keras":
            names.add(one.name or "keras")
        if one.module.startswith("stratagem.keras.private") and one.name and one.name[0].isupper():
            names.add(one.name)
    return names


@pytest.mark.slow
def test_nothing_else_replaces_an_attribute_of_keras() -> None:
    violations = [
        f"{module.at(target.lineno)}: {ast.unparse(target)}"
        for module in package()
        if module.name.startswith(("stratagem.keras", "stratagem.estimator", "stratagem.parameter"))
        for root, target in _assigned(module)
        if root in _of_keras(module) and (module.name, root) not in _ALLOWED
    ]
    assert_none(violations)


def test_page_lists_each_patch() -> None:
    page = (REPOSITORY / "docs" / "design" / "upstream.md").read_text(encoding="utf-8")
    sections = re.findall(r"^### .+\n\nReplaced: (.+)\.$", page, re.MULTILINE)
    listed = {name for names in sections for name in re.findall(r"`(.+?)`", names)}
    assert listed == {_name(patch) for patch in PATCHES}
    assert f"so {len(PATCHES)} attributes" in page


# Keras with another backend is refused by the seam; plain Keras stays as it is.


@pytest.mark.parametrize(
    "module", [pytest.param("stratagem", marks=pytest.mark.slow), "stratagem.keras"]
)
def test_keras_that_was_loaded_with_another_backend_is_refused(module: str) -> None:
    # NumPy is a backend that needs nothing else installed.
    program = f"import keras\ntry:\n    import {module}\nexcept ImportError as e:\n    print(e)"
    assert run_fresh(program, KERAS_BACKEND="numpy") == [
        "Keras runs on the 'numpy' backend.",
        "Expected the 'jax' backend, which cannot be changed once Keras is loaded.",
        "Fix: put `import stratagem` before `import keras`, or set KERAS_BACKEND=jax.",
        "Help: stratagem explain SG101",
    ]


@pytest.mark.slow
def test_model_of_no_strategy_is_trained_by_plain_keras() -> None:
    program = """
import stratagem.keras
import keras, numpy as np
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
assert type(model.layers[0].kernel) is keras.Variable
model.fit(np.ones((4, 3), "float32"), np.zeros((4, 1), "float32"), verbose=0)
print(type(model.train_function).__module__.split(".")[0], model.layers[0].kernel.value[0, 0])
"""
    where, value = run_fresh(program, KERAS_BACKEND="jax")[-1].split()
    assert where != "stratagem"
    # Every row predicts 3 instead of 0: the gradient is 2 * 3 * 1.
    assert float(value) == pytest.approx(1 - 0.1 * 6)
