"""The stub of public names: each leads to the object of that name, in the module that it states."""

from __future__ import annotations

import importlib

import pytest

import stratagem as sg


@pytest.mark.parametrize("name", sg.public_names())
def test_name_leads_to_the_object_at_its_home(name) -> None:
    module, attribute = sg.public_names()[name]
    assert getattr(sg, name) is getattr(importlib.import_module(module), attribute)


def test_all_names_are_offered() -> None:
    names: dict[str, object] = {}
    exec("from stratagem import *", names)
    assert set(sg.public_names()) == set(names) - {"__builtins__"} == set(dir(sg))
