"""Warnings of Keras on JAX itself, with one device as with many, which are no fault of a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parity.comparison import KINDS, Current

_KERAS_WARNINGS = (
    # Keras's variables take part in NumPy's conversion by an older protocol, as when it saves them.
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning",
    # Metrics that count ask for 64-bit integers, which JAX has only on demand.
    "ignore:Explicitly requested dtype int64 requested in asarray:UserWarning",
)


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
            for warning in _KERAS_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))
