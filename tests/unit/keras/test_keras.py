"""Patches of Keras: each has an effect, and upstream.md explains it."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import keras
import numpy as np
import pytest

from stratagem.keras import private
from stratagem.keras.patches import Patch, declared
from stratagem.keras.private import JAXTrainer, Trainer, jax_core
from stratagem.keras.seam import PATCHES
from tests.architecture.source_tree import REPOSITORY, SOURCE
from tests.fresh_process import run_fresh

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


# Private names of Keras, compared with what Keras does in public.


def test_names_are_restored() -> None:
    name = keras.layers.Dense(1).name
    with private.fresh_names():
        assert keras.layers.Dense(1).name == "dense"
    assert keras.layers.Dense(1).name != name


def test_masks_of_earlier_traces_are_forgotten_in_a_step() -> None:
    def step(x: jax.Array) -> jax.Array:
        private.set_keras_mask(x, x > 0)
        with private.fresh_masks():
            assert private.get_keras_mask(x) is None
            private.set_keras_mask(x, x < 0)
        return private.get_keras_mask(x)

    np.testing.assert_array_equal(jax.jit(step)(np.array([-1.0, 1.0])), [False, True])
