"""Loading of optional libraries."""

from __future__ import annotations

import json

import pytest

from stratagem.environment import load


def test_library_that_is_there_is_returned() -> None:
    assert load("json", needed_by="a test", install="nothing") is json


def test_missing_library_is_named_with_its_package() -> None:
    with pytest.raises(
        ImportError,
        match=r"GCEClusterResolver needs no_such_library, which cannot be imported: No mod(?s:.)*"
        r"pip install a-name",
    ):
        load("no_such_library", needed_by="GCEClusterResolver", install="a-name")
