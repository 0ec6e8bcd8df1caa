"""Every example in a docstring runs and gives what it says."""

from __future__ import annotations

import doctest
import importlib
from typing import Any

import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from tests.architecture.source_tree import package

# Keras 3.15 converts its own variables in a manner that NumPy 2 warns about.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy")

# What the examples take for granted.
_NAMES: dict[str, Any] = {"sg": sg, "np": np, "jax": jax, "keras": keras}
_OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def _examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found: list[doctest.DocTest] = []
    for module in package():
        loaded = importlib.import_module(module.name)
        found += [test for test in finder.find(loaded, extraglobs=_NAMES) if test.examples]
    return found


@pytest.mark.parametrize("example", _examples(), ids=lambda example: example.name)
def test_example_gives_what_it_says(
    example: doctest.DocTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATAGEM_TPU_PLATFORM", "cpu")
    report: list[str] = []
    doctest.DocTestRunner(optionflags=_OPTIONS).run(example, out=report.append)
    assert not report, "".join(report)
