"""Warnings of Keras on JAX itself, with one device as with many, which are no fault of a test."""

from __future__ import annotations

from pathlib import Path

import pytest

_KERAS_WARNINGS = (
    # Keras's variables take part in NumPy's conversion by an older protocol, as when it saves them.
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning",
    # Metrics that count ask for 64-bit integers, which JAX has only on demand.
    "ignore:Explicitly requested dtype int64 requested in asarray:UserWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            for warning in _KERAS_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))
