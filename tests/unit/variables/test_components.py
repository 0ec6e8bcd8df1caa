"""Components of a variable, one on each replica's device, and their cached aggregate."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from stratagem.devices.mesh import Topology
from stratagem.options import VariableAggregation
from stratagem.variables import components
from stratagem.variables.components import WholeValue, gather_together, stored_components

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


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [(VariableAggregation.SUM, PARTS.sum(0)), (VariableAggregation.MEAN, PARTS.mean(0))],
)
def test_whole_value_is_the_aggregate(aggregation, expected, gathered) -> None:
    stored = stored_components(PARTS, TOPOLOGY)
    np.testing.assert_allclose(WholeValue().of(stored, aggregation, "v"), expected)


def test_components_are_gathered_once_until_they_change(gathered) -> None:
    whole, stored = WholeValue(), stored_components(PARTS, TOPOLOGY)
    for _ in range(2):
        whole.of(stored, VariableAggregation.SUM, "v")
    assert gathered == [1]
    other = stored_components(PARTS + 1, TOPOLOGY)
    total = whole.of(other, VariableAggregation.SUM, "v")
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
