"""Kinds of strategies, and a warning of Keras on JAX itself, which is no fault of a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parity.comparison import KINDS, Current

# Metrics that count ask for 64-bit integers, which JAX has only on demand.
_KERAS_WARNING = "ignore:Explicitly requested dtype int64 requested in asarray:UserWarning"


# What is compared with one device here is compared so for other strategies, too.
_ALSO_FOR_OTHERS = ("data", "embeddings", "metrics", "one_device", "optimizers", "steps")


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Sets what `comparison.mirrored` makes."""
    Current.kind = KINDS[request.param]
    yield
    Current.kind = KINDS["mirrored"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Lets the tests run with all kinds, the others among the slow ones."""
    if metafunc.module.__name__.removeprefix("tests.parity.test_") in _ALSO_FOR_OTHERS:
        metafunc.fixturenames.append("kind")
        first, *others = KINDS
        kinds = [first, *(pytest.param(kind, marks=pytest.mark.slow) for kind in others)]
        metafunc.parametrize("kind", kinds, indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(folder):
            item.add_marker(pytest.mark.filterwarnings(_KERAS_WARNING))
