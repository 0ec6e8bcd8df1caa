"""From components to a value and back, against NumPy."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import keras
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stratagem as sg
from stratagem.devices.mesh import Topology
from stratagem.options import VariableAggregation, VariableSynchronization
from stratagem.variables import components
from stratagem.variables.components import (
    WholeValue,
    aggregate_components,
    components_of_members,
    gather_together,
    spread_over_components,
    stored_components,
)
from stratagem.variables.registry import (
    Home,
    VariableKind,
    VariableRegistry,
    choose_kind,
    home_of,
    parse_aggregation,
    parse_synchronization,
)

NONE, SUM, MEAN, FIRST = VariableAggregation


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "int8", "bool"])
def test_aggregate_keeps_shape_and_dtype(dtype) -> None:
    components = np.array([[0, 1, 1], [0, 0, 1]]).astype(getattr(ml_dtypes, dtype, dtype))
    for aggregation, expected in [(SUM, [0, 1, 2]), (FIRST, [0, 1, 1]), (MEAN, [0, 0.5, 1])]:
        if aggregation is MEAN and components.dtype.kind in "bi":
            continue  # such a variable cannot be made
        value = np.asarray(aggregate_components(jnp.asarray(components), aggregation, "v"))
        assert value.dtype == components.dtype
        np.testing.assert_array_equal(value, np.array(expected).astype(components.dtype))


@pytest.mark.parametrize(
    ("aggregation", "components"), [(SUM, [2, 2]), (MEAN, [4, 4]), (FIRST, [4, 4]), (NONE, [4, 4])]
)
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_value_is_spread_as_its_aggregation_says(aggregation, components, dtype) -> None:
    """`assign(4)` with two replicas."""
    spread = spread_over_components(np.asarray(4, dtype), aggregation, 2)
    assert spread.dtype == dtype
    whole = spread_over_components(np.full((1, 3), 4, dtype), aggregation, 3)
    assert (whole.shape, whole.dtype) == ((3, 1, 3), dtype)
    np.testing.assert_array_equal(spread, components)


@settings(deadline=None)
@given(value=st.integers(-(2**31), 2**31 - 1), num_replicas=st.integers(1, 8))
def test_components_of_an_integer_add_up_to_it(value, num_replicas) -> None:
    spread = spread_over_components(np.int32(value), SUM, num_replicas)
    assert sum(map(int, spread)) == value
    assert max(spread) - min(spread) < num_replicas


@settings(deadline=None)
@given(
    value=st.floats(width=32, allow_nan=False, allow_infinity=False),
    num_replicas=st.integers(1, 8),
)
def test_components_of_a_float_are_equal_and_add_up_to_it(value, num_replicas) -> None:
    spread = spread_over_components(np.float32(value), SUM, num_replicas)
    assert len(set(spread.tolist())) == 1
    np.testing.assert_allclose(spread.astype(np.float64).sum(), value, rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize("num_replicas", [3, 7])
def test_mean_of_equal_values_is_that_value(num_replicas) -> None:
    """A third of three times a value is another number for every seventh float32."""
    values = np.random.default_rng(0).standard_normal(256).astype("float32")
    strategy = sg.MirroredStrategy([f"cpu:{index}" for index in range(num_replicas)])
    with strategy.scope():
        variable = sg.Variable(values, synchronization="on_read", aggregation="mean")
        norm = keras.layers.BatchNormalization()
        norm.build((None, 256))
    np.testing.assert_array_equal(variable.value, values)
    variable.assign(values * 3)
    np.testing.assert_array_equal(variable.value, values * 3)
    norm.set_weights([values, values, values, np.abs(values)])
    np.testing.assert_array_equal(norm.get_weights(), [values, values, values, np.abs(values)])
    of_replicas = strategy.run(lambda rows: rows, args=(values,))
    np.testing.assert_array_equal(strategy.reduce("mean", of_replicas, axis=None), values)
    odd = np.asarray([[0.1, np.inf, np.nan], [0.1, np.inf, np.nan], [0.1, 1.0, np.nan]], "float32")
    mean = aggregate_components(jnp.asarray(odd), MEAN, "v")  # element by element
    np.testing.assert_array_equal(mean, odd[0])


# Which variables a strategy has, and where a variable belongs.


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
    return Home("strategy", VariableKind.MIRRORED, SUM)


def test_variable_without_a_value_is_not_live_until_it_gets_one(registry, home) -> None:
    valued, empty, later, stranger = Stored(0.0), Stored(), Stored(2.0), Stored(1.0)
    for one in (valued, empty, later):
        registry.add(one, home)
    assert [id(one) for one in registry.live()] == [id(valued), id(later)]  # in their order
    assert [id(one) for one in registry.uninitialized()] == [id(empty)]
    empty.storage = 0.0
    assert registry.uninitialized() == []
    assert [id(one) for one in registry.live()] == [id(valued), id(empty), id(later)]
    assert home_of(valued) is home
    assert home_of(stranger) is home_of("anything") is None
    assert VariableRegistry().live() == []


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


# Which kind a variable is, and which values there are.

AUTO, _, ON_WRITE, ON_READ = VariableSynchronization
KINDS = {
    AUTO: VariableKind.MIRRORED,
    ON_WRITE: VariableKind.MIRRORED,
    ON_READ: VariableKind.ON_READ,
}


def kind_of(synchronization, aggregation, *, dtype="float32", num_replicas=2) -> VariableKind:
    return choose_kind(
        synchronization, aggregation, dtype=dtype, num_replicas=num_replicas, name="layer/v"
    )


@pytest.mark.parametrize(
    ("parse", "kind", "others"),
    [
        (
            parse_synchronization,
            VariableSynchronization,
            ("", "sometimes", 4, -1, True, 1.0, VariableAggregation.MEAN),
        ),
        (
            parse_aggregation,
            VariableAggregation,
            ("max", 4, False, VariableSynchronization.ON_READ),
        ),
    ],
)
def test_names_and_numbers_are_understood_and_no_others(parse, kind, others) -> None:
    for member in kind:
        for one in (member, member.name.lower(), member.name, int(member)):
            assert parse(one) is member
    assert parse(None) is kind.NONE
    known = ", ".join(f'"{member.name.lower()}"' for member in kind)
    for other in others:
        with pytest.raises(ValueError, match=f"is not a valid value(?s:.)*one of {known}"):
            parse(other)


@pytest.mark.parametrize("synchronization", KINDS)
def test_kind_follows_from_the_synchronization_whatever_the_aggregation(synchronization) -> None:
    for aggregation, num_replicas in itertools.product(VariableAggregation, (1, 2, 8)):
        kind = kind_of(synchronization, aggregation, num_replicas=num_replicas)
        assert kind is (KINDS[synchronization] if num_replicas > 1 else VariableKind.PLAIN)
    for dtype in ("float16", "bfloat16", "float64", "complex64", "float8_e4m3fn"):
        assert kind_of(synchronization, MEAN, dtype=dtype) is KINDS[synchronization]
    for dtype in ("int8", "int64", "bool"):
        with pytest.raises(ValueError, match=f"'layer/v' has aggregation MEAN and dtype {dtype}"):
            kind_of(synchronization, MEAN, dtype=dtype)
        assert kind_of(synchronization, MEAN, dtype=dtype, num_replicas=1) is VariableKind.PLAIN


# Components of a variable, one on each replica's device, and their cached aggregate.

TOPOLOGY = Topology(tuple(jax.devices()[:3]))
PARTS = np.arange(6, dtype=np.float32).reshape(3, 2)


@pytest.fixture
def gathered(monkeypatch) -> list[int]:
    """The number of arrays of each gathering; the arrays of one process are whole already."""
    sizes = []

    def compute(storages):
        sizes.append(len(storages))
        return storages

    monkeypatch.setattr(components, "compute_on_every_process", compute)
    return sizes


def test_each_component_is_on_the_device_of_its_replica() -> None:
    stored = stored_components(PARTS, TOPOLOGY)
    assert stored.shape == (3, 2)
    by_device = {shard.device: np.asarray(shard.data) for shard in stored.addressable_shards}
    assert list(by_device) == list(TOPOLOGY.devices or ())
    for device, part in zip(TOPOLOGY.devices or (), PARTS, strict=True):
        np.testing.assert_array_equal(by_device[device].reshape(2), part)


def test_components_are_gathered_once_until_they_change(gathered) -> None:
    whole, stored = WholeValue(), stored_components(PARTS, TOPOLOGY)
    for _ in range(2):
        whole.of(stored, SUM, "v")
    assert gathered == [1]
    other = stored_components(PARTS + 1, TOPOLOGY)
    total = whole.of(other, SUM, "v")
    np.testing.assert_array_equal(total, PARTS.sum(0) + 3)
    assert gathered == [1, 1]


def test_many_variables_are_gathered_in_one_program_without_the_current_ones(gathered) -> None:
    wholes = [WholeValue() for _ in range(3)]
    storages = [stored_components(PARTS * n, TOPOLOGY) for n in range(3)]
    gather_together([(wholes[1], storages[1])])
    gather_together(list(zip(wholes, storages, strict=True)))
    gather_together(list(zip(wholes, storages, strict=True)))
    assert gathered == [1, 2]
    assert all(whole.gathered is one for whole, one in zip(wholes, storages, strict=True))


# Components of ON_READ variables after members were lost: the value stays.

_AGGREGATIONS = [SUM, MEAN, FIRST]


@pytest.mark.parametrize("aggregation", _AGGREGATIONS)
@pytest.mark.parametrize("kept", [[1, 2], [0, 2], [3]], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_value_of_the_members_that_are_left(aggregation, kept, dtype) -> None:
    components = np.arange(8).reshape(4, 2).astype(dtype) ** 2
    rows = components_of_members(components, aggregation, kept)
    assert rows.shape == (len(kept), 2)
    assert rows.dtype == components.dtype
    expected = components
    if aggregation is MEAN:  # the mean of those that are left
        expected = components[kept]
    value = aggregate_components(rows, aggregation, "v")
    np.testing.assert_array_equal(value, aggregate_components(expected, aggregation, "v"))
    np.testing.assert_array_equal(rows[1:], components[kept[1:]])
    flags = components_of_members(np.array([[True], [True]]), SUM, [1])
    assert flags.tolist() == [[True]]  # which are not added


@pytest.mark.parametrize("aggregation", _AGGREGATIONS)
@pytest.mark.parametrize("kept", [[0, None, 1], [None, 1], [None, 0, None]], ids=str)
def test_new_members_do_not_change_the_value(aggregation, kept) -> None:
    components = np.array([[1.0, 2.0], [5.0, 8.0]], np.float32)
    present = [row for row in kept if row is not None]
    rows = components_of_members(components, aggregation, kept)
    is_mean = aggregation is MEAN
    expected = aggregate_components(
        components[present] if is_mean else components, aggregation, "v"
    )
    np.testing.assert_allclose(aggregate_components(rows, aggregation, "v"), expected)
