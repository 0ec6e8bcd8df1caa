"""Variables that a source hands out instead of new ones."""

from __future__ import annotations

import keras
import pytest

import stratagem as sg
from stratagem.keras.variables.variable_source import current_source, variables_from
from tests.unit.keras.replicas import values_of


class Source:
    """Notes what is asked for, and hands out what it is given."""

    def __init__(self, *existing) -> None:
        self.existing_ones = list(existing)
        self.requests = []
        self.added = []

    def existing(self, request):
        self.requests.append(request)
        return self.existing_ones.pop(0) if self.existing_ones else None

    def add(self, request, variable) -> None:
        self.added.append(variable)


@pytest.fixture(params=["mirrored", "central", "one"])
def strategy(request):
    if request.param == "mirrored":
        return sg.MirroredStrategy(["cpu:0", "cpu:1"])
    if request.param == "central":
        return sg.CentralStorageStrategy(["cpu:0", "cpu:1"])
    return sg.OneDeviceStrategy("cpu:0")


def test_existing_variable_is_handed_out_as_it_is(strategy) -> None:
    with strategy.scope():
        variable = keras.Variable([1.0, 2.0], name="w")
        kind = type(variable)
        with variables_from(Source(variable)):
            again = keras.Variable([5.0, 6.0], name="w", trainable=False)
    assert again is variable
    assert type(variable) is kind
    assert values_of([variable])[0].tolist() == [1.0, 2.0]
    assert not variable.trainable


def test_source_learns_what_is_asked_for(strategy) -> None:
    source = Source()
    with strategy.scope(), variables_from(source), keras.name_scope("outer"):
        made = [
            keras.Variable("zeros", shape=(2, 3), dtype="float16", name="a"),
            keras.Variable(3, trainable=False),
            keras.metrics.Mean(name="m").total,
        ]
    assert [one is other for one, other in zip(source.added, made, strict=False)][:2] == [True] * 2
    asked = [(r.path, r.shape, r.dtype, r.trainable, r.is_summed) for r in source.requests]
    assert asked[0] == ("outer/a", (2, 3), "float16", True, False)
    assert asked[1] == ("outer/variable", (), "int32", False, False)
    assert asked[2][1:] == ((), "float32", False, True)
    assert [r.path for r in source.requests][:3] == [one.path for one in made]


def test_outside_of_scopes_nobody_is_asked() -> None:
    source = Source()
    with variables_from(source):
        keras.Variable(1.0)
        assert current_source() is source
    assert source.requests == []
    assert current_source() is None
