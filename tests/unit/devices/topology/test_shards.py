"""Sharded copies: transfer, and reading by replica and on the host."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from stratagem.devices.finding import find_groups
from stratagem.devices.mesh import Topology
from stratagem.devices.shards import (
    assemble_on_host,
    creating_on_host,
    local_copy,
    put_shards,
    replica_copy,
)

VALUE = np.arange(12.0, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def topology() -> Topology:
    return Topology.of_groups(find_groups([["cpu:3", "cpu:1"], ["cpu:0", "cpu:2"]]))


@pytest.fixture
def divided(topology) -> NamedSharding:
    return NamedSharding(topology.mesh, PartitionSpec(None, topology.logical_axes))


@pytest.mark.parametrize("kind", ["numpy", "on one device", "on all", "in other pieces"])
def test_each_device_gets_its_piece(topology, divided, kind) -> None:
    value = {
        "numpy": VALUE,
        "on one device": jnp.asarray(VALUE),
        "on all": topology.replicate(VALUE),
        "in other pieces": put_shards(
            np.tile(VALUE, (2, 1)), NamedSharding(topology.mesh, PartitionSpec("logical"))
        ),
    }[kind]
    wanted = np.tile(VALUE, (2, 1)) if kind == "in other pieces" else VALUE
    array = put_shards(value, divided)
    assert array.sharding == divided
    pieces = {shard.device.id: np.asarray(shard.data) for shard in array.addressable_shards}
    for device in (3, 0):
        np.testing.assert_array_equal(pieces[device], wanted[:, :2])
    for device in (1, 2):
        np.testing.assert_array_equal(pieces[device], wanted[:, 2:])
    np.testing.assert_array_equal(assemble_on_host(array), wanted)


def test_what_lies_there_in_pieces_stays(divided) -> None:
    array = put_shards(VALUE, divided)
    assert put_shards(array, divided) is array


def test_traced_value_is_put_in_pieces_by_the_program(divided) -> None:
    doubled = jax.jit(lambda x: put_shards(2 * x, divided))(VALUE)
    np.testing.assert_array_equal(doubled, 2 * VALUE)
    assert doubled.sharding.is_equivalent_to(divided, 2)


@pytest.mark.parametrize("replica_id", [0, 1])
def test_copy_of_a_replica_is_whole_on_its_first_device(topology, divided, replica_id) -> None:
    first = topology.devices_of(replica_id)[0]
    for array in (put_shards(VALUE, divided), topology.replicate(VALUE)):
        copy = replica_copy(array, topology, replica_id)
        np.testing.assert_array_equal(copy, VALUE)
        assert copy.devices() == {first}
    stacked = topology.stack([VALUE, 2 * VALUE])
    component = replica_copy(stacked, topology, replica_id)
    np.testing.assert_array_equal(component, [(replica_id + 1) * VALUE])
    assert component.devices() == {first}


def test_own_copy_is_an_ordinary_array(topology, divided) -> None:
    for array in (put_shards(VALUE, divided), topology.replicate(VALUE)):
        copy = local_copy(array, topology)
        np.testing.assert_array_equal(copy, VALUE)
        assert copy.devices() == {topology.devices[0]}
    assert local_copy(3, topology) == 3


def test_values_of_any_kind_are_read_on_the_host() -> None:
    np.testing.assert_array_equal(assemble_on_host(VALUE), VALUE)
    np.testing.assert_array_equal(assemble_on_host(jnp.asarray(VALUE)), VALUE)


def test_large_arrays_are_made_on_the_host() -> None:
    with jax.default_device(jax.devices()[3]):
        with creating_on_host(True):
            large = jnp.ones(3)
        with creating_on_host(False):
            small = jnp.ones(3)
    assert large.devices() == {jax.local_devices(backend="cpu")[0]}
    assert small.devices() == {jax.devices()[3]}
