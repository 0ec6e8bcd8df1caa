"""The table of public names: each leads to an object of that name, in the module it states."""

from __future__ import annotations

import importlib
import inspect

import pytest

import stratagem as sg
from stratagem.public_names import PUBLIC_NAMES


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_name_leads_to_the_object_at_its_home(name) -> None:
    module, attribute = PUBLIC_NAMES[name]
    home = importlib.import_module(module)
    expected = home if attribute is None else getattr(home, attribute)
    assert getattr(sg, name) is expected
    assert inspect.ismodule(expected) == (attribute is None)


def test_all_names_are_offered() -> None:
    assert set(PUBLIC_NAMES) <= set(sg.__all__)
