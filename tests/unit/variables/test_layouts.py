"""Rules for which variables are divided over the devices of a replica."""

from __future__ import annotations

import warnings

import keras
import pytest
from jax.sharding import PartitionSpec

import stratagem as sg
from stratagem.devices.finding import find_groups
from stratagem.devices.mesh import Topology
from stratagem.logs import size_text
from stratagem.variables.layouts import Division, VariableLayouts, require_layouts_used


@pytest.fixture
def topology() -> Topology:
    return Topology.of_groups(find_groups([["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]))


def keras_map(shape, names, layouts) -> keras.distribution.LayoutMap:
    mesh = keras.distribution.DeviceMesh(shape, names, [f"cpu:{i}" for i in range(4)])
    layout_map = keras.distribution.LayoutMap(mesh)
    for pattern, layout in layouts.items():
        layout_map[pattern] = layout
    return layout_map


@pytest.mark.parametrize(
    "layout_map",
    [
        {".*/kernel": (None, "logical"), ".*/bias": [None]},
        {".*/kernel": keras.distribution.TensorLayout((None, "logical")), ".*/bias": ()},
        keras_map((2, 2), ["batch", "model"], {".*/kernel": (None, "model"), ".*/bias": (None,)}),
        keras_map((4, 1), ["x", "logical"], {".*/kernel": (None, "logical"), ".*/bias": (None,)}),
    ],
)
def test_rule_divides_the_variables_that_it_matches(topology, layout_map) -> None:
    layouts = VariableLayouts(layout_map, topology)
    division = layouts.division("dense/kernel", (3, 4))
    assert division is not None
    assert (division.axes, division.replica_axis) == (((), ("logical",)), None)
    assert division.sharding(topology).spec == PartitionSpec(None, ("logical",))
    assert layouts.division("dense/bias", (4,)) is None
    assert layouts.division("dense/kernel_2", (3, 4)) is None
    layouts.require_matches()


def test_path_itself_goes_before_patterns(topology) -> None:
    layouts = VariableLayouts({"a.b": ("logical",), "a.*": (None,)}, topology)
    division = layouts.division("a.b", (2,))
    assert division is not None
    assert division.axes == (("logical",),)
    assert layouts.division("a.c", (2,)) is None


def test_slot_is_divided_as_its_variable_where_it_has_the_shape(topology) -> None:
    layouts = VariableLayouts({"kernel": ("logical", None)}, topology)
    inherited = layouts.division("kernel", (4, 3))
    assert layouts.division("adam/kernel_momentum", (4, 3), inherited) is inherited
    assert layouts.division("adafactor/kernel_row", (4,), inherited) is None
    assert layouts.division("adam/kernel_odd", (5, 3), inherited) is None


def test_one_device_a_replica_divides_nothing() -> None:
    layouts = VariableLayouts(
        {"kernel": ("logical",)}, Topology.of_groups(find_groups([["cpu:0"]]))
    )
    assert layouts.division("kernel", (3,)) is None
    layouts.require_matches()


def test_several_rules_for_one_variable_are_refused(topology) -> None:
    layouts = VariableLayouts({"a.*": ("logical",), ".*b": ("logical",)}, topology)
    patterns = r"\['a\.\*', '\.\*b'\]"
    with pytest.raises(ValueError, match=f"'ab' matches several patterns of .*: {patterns}"):
        layouts.division("ab", (2,))


def test_layout_of_more_axes_than_the_variable_has_is_refused(topology) -> None:
    layouts = VariableLayouts({"a": (None, "logical")}, topology)
    with pytest.raises(ValueError, match=r"'a' of shape \(4,\) matches .*, which has 2 axes"):
        layouts.division("a", (4,))
    assert layouts.division("a", (4,), is_trainable=False) is None


def test_axis_that_cannot_be_divided_is_left_whole_with_one_warning(topology) -> None:
    layouts = VariableLayouts({"head_.": ("logical", "replica"), "odd": ("logical",)}, topology)
    with pytest.warns(UserWarning, match=r"'head_0' of shape \(3, 4\) .*: 3 over 2 devices"):
        division = layouts.division("head_0", (3, 4))
    assert division == Division(((), ("replica",)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert layouts.division("head_1", (3, 5)) is None
        assert layouts.division("head_2", (4, 4)) == Division((("logical",), ("replica",)))
    with pytest.warns(UserWarning, match="'odd' of shape"):
        assert layouts.division("odd", (3,)) is None


@pytest.mark.parametrize(
    ("num_devices", "size", "parts", "text"),
    [
        (4, 2, 2, "2 over 4 devices (axis 0, 'logical'), which leaves 2 parts."),
        (6, 9, 3, "9 over 6 devices (axis 0, 'logical'), which leaves 3 parts."),
        (6, 5, 1, "5 over 6 devices (axis 0, 'logical'), which leaves it whole."),
    ],
)
def test_axis_is_divided_over_a_factor_of_the_devices(num_devices, size, parts, text) -> None:
    topology = Topology.of_groups(find_groups([[f"cpu:{i}" for i in range(num_devices)]]))
    layouts = VariableLayouts({"heads": ("logical", None)}, topology)
    with pytest.warns(UserWarning, match="cannot be divided") as caught:
        division = layouts.division("heads", (size, 1024), itemsize=2)
    if parts == 1:
        assert division is None
    else:
        assert division.sharding(topology).shard_shape((size, 1024)) == (size // parts, 1024)
    (message,) = [str(one.message) for one in caught]
    assert text in message
    held, wanted = size_text(size * 2048 / parts), size_text(size * 2048 / num_devices)
    assert f"A device holds {held} of it instead of {wanted}." in message


def test_layout_with_both_axes_of_a_mesh_of_keras(topology) -> None:
    """As KerasHub's own maps: the batch axis stands for the replicas."""
    by_both = keras_map((2, 2), ["batch", "model"], {"a": ("model", "batch"), "b": ("batch",)})
    layouts = VariableLayouts(by_both, topology)
    assert layouts.uses_replicas
    division = layouts.division("a", (4, 2, 3))
    assert division == Division((("logical",), ("replica",), ()))
    assert division.replica_axis == 1
    assert division.spec(1) == PartitionSpec(("logical",), "replica")
    assert division.spec(None) == division.logical_spec == PartitionSpec(("logical",))
    assert [division.is_free(axis) for axis in range(3)] == [False, True, True]
    assert layouts.division("b", (4,)) == Division((("replica",),))
    by_one = keras_map((2, 2), ["batch", "model"], {"a": ("model",)})
    assert not VariableLayouts(by_one, topology).uses_replicas


@pytest.mark.parametrize(
    "layout_map",
    [
        {"a": ("model",)},
        {"a": ("logical", "logical")},
        {"a": ("replica", "replica")},
        keras_map((4, 1), ["batch", "model"], {"a": ("model",)}),
    ],
)
def test_layout_by_another_axis_or_twice_is_refused(topology, layout_map) -> None:
    with pytest.raises(ValueError, match=r"layout_map\['a'\] shards over"):
        VariableLayouts(layout_map, topology)


def test_what_is_no_map_and_no_layout_is_refused(topology) -> None:
    with pytest.raises(TypeError, match="layout_map=7 is of type int"):
        VariableLayouts(7, topology)
    with pytest.raises(TypeError, match=r"layout_map\['a'\]='logical' is of type str"):
        VariableLayouts({"a": "logical"}, topology)


def test_rule_that_matches_nothing_is_reported_when_training_starts(topology) -> None:
    layouts = VariableLayouts({"a": ("logical",), "b": (None,)}, topology)
    layouts.division("a", (2,))
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        counter, weight = sg.Variable(1.0, trainable=False), sg.Variable(1.0)
    other = keras.Variable(1.0)
    require_layouts_used(layouts, [other])
    require_layouts_used(layouts, [counter])
    with pytest.raises(ValueError, match=r"patterns \['b'\] of layout_map match no variable"):
        require_layouts_used(layouts, [counter, weight])
    layouts.division("b", (2,))
    require_layouts_used(layouts, [weight])
    require_layouts_used(None, [weight])


def test_division_fits_shapes_that_it_divides(topology) -> None:
    division = Division(((), ("logical",)))
    assert division.fits((3, 4), topology)
    assert not division.fits((3, 5), topology)
    assert not division.fits((4,), topology)
