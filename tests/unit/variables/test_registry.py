"""Which variables a strategy has, and where a variable belongs."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from stratagem.options import VariableAggregation
from stratagem.variables.registry import Home, VariableKind, VariableRegistry, home_of


class Stored:
    """Stands in for a variable; compares as Keras variables do."""

    def __init__(self, storage: Any = None) -> None:
        self.storage = storage

    @property
    def has_value(self) -> bool:
        return self.storage is not None

    __hash__ = None

    def __eq__(self, other: object) -> Any:
        raise AssertionError("variables are found by identity")


@pytest.fixture
def registry() -> VariableRegistry:
    return VariableRegistry()


@pytest.fixture
def home() -> Home:
    return Home("strategy", VariableKind.MIRRORED, VariableAggregation.SUM)


def test_variable_knows_its_home_and_others_have_none(registry, home) -> None:
    variable, stranger = Stored(1.0), Stored(1.0)
    registry.add(variable, home)
    assert home_of(variable) is home
    assert home_of(stranger) is None
    assert home_of("anything") is None


def test_variables_come_in_the_order_of_their_creation(registry, home) -> None:
    variables = [Stored(float(index)) for index in range(4)]
    for variable in variables:
        registry.add(variable, home)
    assert [id(variable) for variable in registry.live()] == [
        id(variable) for variable in variables
    ]


def test_variable_without_a_value_is_not_live_until_it_gets_one(registry, home) -> None:
    valued, empty = Stored(0.0), Stored()
    registry.add(valued, home)
    registry.add(empty, home)
    assert [id(variable) for variable in registry.live()] == [id(valued)]
    assert [id(variable) for variable in registry.uninitialized()] == [id(empty)]
    empty.storage = 0.0
    assert registry.uninitialized() == []
    assert len(registry.live()) == 2


def test_registry_does_not_keep_a_variable_alive(registry, home) -> None:
    variable, other = Stored(1.0), Stored(2.0)
    registry.add(variable, home)
    registry.add(other, home)
    reference = weakref.ref(variable)
    del variable
    gc.collect()
    assert reference() is None
    assert [id(one) for one in registry.live()] == [id(other)]


def test_new_object_does_not_inherit_the_home_of_a_dead_one(registry, home) -> None:
    """CPython gives a freed address to the next object of the same size."""
    for _ in range(100):
        variable = Stored(1.0)
        registry.add(variable, home)
        del variable
        assert home_of(Stored(1.0)) is None
    assert registry.live() == []


def test_variable_may_outlive_its_registry(home) -> None:
    variable = Stored(1.0)
    VariableRegistry().add(variable, home)
    gc.collect()
    assert home_of(variable) is home
    del variable


def test_registries_do_not_share_variables(registry, home) -> None:
    other = VariableRegistry()
    variable = Stored(1.0)
    registry.add(variable, home)
    assert other.live() == []
    assert len(registry.live()) == 1
