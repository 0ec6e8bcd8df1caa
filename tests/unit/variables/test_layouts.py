"""Rules for which variables are divided over the devices of a replica."""

from __future__ import annotations

import functools
import math
import re
import types
import warnings
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import stratagem as sg
from stratagem.devices.finding import find_devices, find_groups
from stratagem.devices.mesh import Topology
from stratagem.execution.programs.program import Program
from stratagem.group.current import Identity
from stratagem.logs import size_text
from stratagem.variables import components, exhausted_memory
from stratagem.variables.components import agree_on_initial_values, initial_digest
from stratagem.variables.layouts import (
    Division,
    VariableLayouts,
    axis_names,
    devices_per_replica_of,
    groups_of_mesh,
    require_layouts_used,
    store_of,
)


@pytest.fixture
def topology() -> Topology:
    return Topology.of_groups(find_groups([["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]))


def keras_map(shape, names, layouts=types.MappingProxyType({})) -> keras.distribution.LayoutMap:
    devices = [f"cpu:{index}" for index in range(math.prod(shape))]
    mesh = keras.distribution.DeviceMesh(shape, names, devices)
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


def test_slot_is_divided_as_its_variable_where_it_has_the_shape(topology) -> None:
    layouts = VariableLayouts(
        {"kernel": ("logical", None), "a.b": ("logical",), "a.*": (None,)}, topology
    )
    inherited = layouts.division("kernel", (4, 3))
    assert layouts.division("adam/kernel_momentum", (4, 3), inherited) is inherited
    assert layouts.division("adafactor/kernel_row", (4,), inherited) is None
    assert layouts.division("adam/kernel_odd", (5, 3), inherited) is None
    assert layouts.division("a.b", (2,)).axes == (("logical",),)  # before the pattern
    assert layouts.division("a.c", (2,)) is None
    one = Topology.of_groups(find_groups([["cpu:0"]]))
    alone = VariableLayouts({"kernel": ("logical",)}, one)
    assert alone.division("kernel", (3,)) is None
    alone.require_matches()


def test_rules_that_do_not_fit_a_variable_are_refused(topology) -> None:
    layouts = VariableLayouts(
        {"a.*": ("logical",), ".*b": ("logical",), "c": (None, "logical")}, topology
    )
    patterns = r"\['a\.\*', '\.\*b'\]"
    with pytest.raises(ValueError, match=f"'ab' matches several patterns of .*: {patterns}"):
        layouts.division("ab", (2,))
    with pytest.raises(ValueError, match=r"'c' of shape \(4,\) matches .*, which has 2 axes"):
        layouts.division("c", (4,))
    assert layouts.division("c", (4,), is_trainable=False) is None
    with pytest.raises(TypeError, match="layout_map=7 is of type int"):
        VariableLayouts(7, topology)
    with pytest.raises(TypeError, match=r"layout_map\['a'\]='logical' is of type str"):
        VariableLayouts({"a": "logical"}, topology)


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


# A device without free memory: the error's numbers, its options, and the state afterwards.

GIB = 2**30
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1.50GiB."


def _fails(message: str = OUT_OF_MEMORY) -> Any:
    def fail(*_: object) -> None:
        raise jax.errors.JaxRuntimeError(message)

    return fail


def _trained(strategy: Any) -> keras.Model:
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(64, name="wide")])
        model.compile("adam", "mse")
    model.fit(np.ones((4, 8), "float32"), np.ones((4, 64), "float32"), verbose=0)
    return model


@functools.cache
def _trained_on_one() -> keras.Model:
    """For tests that leave it as it is."""
    return _trained(sg.OneDeviceStrategy("cpu:0"))


def _message(model: keras.Model, monkeypatch: pytest.MonkeyPatch, **stats: int) -> str:
    """Returns the message of a failed step on a device with these numbers of its allocator."""
    monkeypatch.setattr(exhausted_memory, "_memory_stats", lambda _: stats)
    monkeypatch.setattr(Program, "_call", _fails())
    with pytest.raises(MemoryError, match="is out of memory: 1,610,612,736 bytes") as caught:
        model.distribute_strategy.run(lambda: model.trainable_variables[0] + 1)
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)
    return str(caught.value)


def test_error_lists_the_largest_variables_with_slots_and_says_what_the_rest_takes(
    monkeypatch,
) -> None:
    model = _trained_on_one()
    message = _message(model, monkeypatch, bytes_limit=2 * GIB, bytes_in_use=GIB)
    kernel_bytes = 8 * 64 * 4
    assert f"JAX may use {2 * GIB:,} bytes of it; {GIB:,} are in use." in message
    slots = sum(v.value.nbytes for v in model.optimizer.variables[2:])
    assert f"optimizer slots {slots:,}" in message
    listed = [line.strip() for line in message.splitlines() if line.startswith("  ")]
    path = model.trainable_variables[0].path
    assert listed[0] == f"{path} (8, 64) float32, {kernel_bytes:,} bytes"
    assert len(listed) == 5
    assert [line.endswith("optimizer slot") for line in listed[:3]] == [False, True, True]


@pytest.mark.parametrize(
    ("message", "asked_bytes"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12345 bytes.", 12345),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1.50GiB.", 3 * 2**29),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 77 bytes.", 77),
        ("INTERNAL: Error dispatching computation: Out of memory allocating 4 bytes.", 4),
        ("RESOURCE_EXHAUSTED: Failed to allocate request for 2.00KiB (2048B)", None),
    ],
)
def test_requested_bytes_are_read_from_the_words_of_xla(message, asked_bytes, monkeypatch) -> None:
    strategy = sg.OneDeviceStrategy("cpu:0")
    monkeypatch.setattr(Program, "_call", _fails(message))
    wanted = "an allocation failed" if asked_bytes is None else f"{asked_bytes:,} bytes were"
    with pytest.raises(sg.errors.ResourceExhaustedError, match=wanted):
        strategy.run(lambda: jnp.ones(()))


def test_options_of_several_replicas_name_sharded_state(monkeypatch) -> None:
    of_two = _trained(sg.MirroredStrategy(["cpu:0", "cpu:1"]))
    one = _message(_trained_on_one(), monkeypatch)
    assert "shard_state" not in one
    assert "gradient_accumulation_steps" in one
    assert "mixed_bfloat16" in one
    assert 'shard_state="optimizer" or shard_state="all"' in _message(of_two, monkeypatch)
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        assert "mixed_bfloat16" not in _message(_trained_on_one(), monkeypatch)
    finally:
        keras.config.set_dtype_policy("float32")


def test_memory_of_other_processes_is_named_if_the_own_share_had_been_enough(monkeypatch) -> None:
    model = _trained_on_one()
    enough = _message(model, monkeypatch, bytes_limit=4 * GIB, bytes_in_use=GIB)
    monkeypatch.undo()
    short = _message(model, monkeypatch, bytes_limit=2 * GIB, bytes_in_use=GIB)
    assert "nvidia-smi" in enough
    assert "XLA_PYTHON_CLIENT_PREALLOCATE=false" in enough
    assert "nvidia-smi" not in short


def test_pinned_host_memory_has_a_limit_of_its_own(monkeypatch) -> None:
    monkeypatch.setattr(
        Program, "_call", _fails("RESOURCE_EXHAUSTED: Out of host memory trying to allocate 9GiB.")
    )
    with pytest.raises(
        MemoryError, match=r"9,663,676,416 bytes in pinned(.|\n)*HOST_MEMORY_LIMIT_GB"
    ):
        sg.OneDeviceStrategy("cpu:0").run(lambda: jnp.ones(()))


def test_training_goes_on_after_a_failed_step(monkeypatch) -> None:
    model = _trained(sg.MirroredStrategy(["cpu:0", "cpu:1"]))
    before = model.get_weights()
    assert "All variables still have their values" in _message(model, monkeypatch)
    monkeypatch.undo()
    for value, kept in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(value, kept)
    history = model.fit(np.ones((4, 8), "float32"), np.ones((4, 64), "float32"), verbose=0)
    assert np.isfinite(history.history["loss"][0])


def test_variables_that_a_failed_step_had_taken_over_are_counted(monkeypatch) -> None:
    model = _trained(sg.OneDeviceStrategy("cpu:0"))
    model.trainable_variables[0].stored.delete()
    message = _message(model, monkeypatch)
    path = model.trainable_variables[0].path
    assert f"such as {path}: restore a checkpoint" in message
    assert re.search(r"1 of \d+ variables lost their values with the failed step", message)


def test_creation_of_variables_fit_input_and_functions_explain_too(monkeypatch) -> None:
    strategy = sg.OneDeviceStrategy("cpu:0")
    model = _trained(strategy)
    with pytest.raises(MemoryError, match="SG107"), strategy.scope():
        _fails()()
    with pytest.raises(ValueError, match="other"), strategy.scope():
        raise ValueError("other")
    monkeypatch.setattr(Program, "_call", _fails())
    with pytest.raises(MemoryError, match="SG107"):
        model.fit(np.ones((4, 8), "float32"), np.ones((4, 64), "float32"), verbose=0)
    with pytest.raises(MemoryError, match="SG107"):
        model.evaluate(np.ones((4, 8), "float32"), np.ones((4, 64), "float32"), verbose=0)
    monkeypatch.undo()
    monkeypatch.setattr(jax, "device_put", _fails())
    dataset = strategy.distribute_dataset([np.ones((100_000,), "float32")])
    with pytest.raises(MemoryError, match="SG107"):
        next(iter(dataset))


# Placement of variables and of state: sharded if large, else on the replicas.


def replicas(count: int) -> Topology:
    return Topology(find_devices([f"cpu:{index}" for index in range(count)]))


@pytest.mark.parametrize(
    ("shard_state", "weight", "slot"),
    [(None, False, False), ("optimizer", False, True), ("all", True, True)],
)
def test_layouts_and_sharded_state_go_together(shard_state, weight, slot) -> None:
    strategy = sg.MirroredStrategy(
        ["cpu:0", "cpu:1", "cpu:2", "cpu:3"],
        devices_per_replica=2,
        layout_map={"kernel": (None, "logical"), "table": ("logical", "replica")},
        shard_state=shard_state,
    )
    with strategy.scope():
        kernel = sg.Variable(np.zeros((64, 32)), name="kernel")
        table = sg.Variable(np.zeros((4, 8)), name="table")
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build([kernel, table])
    of_kernel, of_table = optimizer.variables[2:]
    assert [store_of(one) is not None for one in (kernel, of_kernel)] == [weight, slot]
    # A layout that names the replicas holds with and without `shard_state`.
    assert shapes_of_shards(table) == shapes_of_shards(of_table) == {(2, 4)}
    assert shapes_of_shards(kernel) == {(32, 16) if weight else (64, 16)}
    assert shapes_of_shards(of_kernel) == {(32, 16) if slot else (64, 16)}
    value = np.arange(2048.0, dtype="float32").reshape(64, 32)
    kernel.assign(value)
    for read in (kernel.numpy(), kernel.value, np.asarray(kernel)):
        np.testing.assert_array_equal(read, value)


def shapes_of_shards(variable: Any) -> set[tuple[int, ...]]:
    return {shard.data.shape for shard in variable.stored.addressable_shards}


@pytest.mark.parametrize(
    ("shard_state", "shape", "shard"),
    [
        ("all", (64, 32), (32, 16)),
        ("all", (64, 33), (32, 33)),  # no second axis
        ("all", (2048,), (1024,)),
        ("all", (8, 8), (8, 8)),  # small
        ("optimizer", (64, 32), (64, 32)),
    ],
)
def test_variables_without_a_layout_are_in_parts_of_both_axes(shard_state, shape, shard) -> None:
    strategy = sg.MirroredStrategy(
        ["cpu:0", "cpu:1", "cpu:2", "cpu:3"],
        devices_per_replica=2,
        layout_map={"kernel": (None, "logical"), "whole": (None,)},
        shard_state=shard_state,
    )
    value = np.arange(np.prod(shape), dtype="float32").reshape(shape)
    with strategy.scope():
        other = sg.Variable(value, name="other")
        whole = sg.Variable(np.zeros((64, 32)), name="whole")
    assert shapes_of_shards(other) == {shard}
    assert shapes_of_shards(whole) == {(32 if shard_state == "all" else 64, 32)}
    np.testing.assert_array_equal(other.value, value)


# Initial values of variables: compared between processes by their digests and shapes.

TOGETHER: Any = types.SimpleNamespace(spans_processes=True)
ALONE: Any = types.SimpleNamespace(spans_processes=False)


def variable(path: str, shape: tuple[int, ...] = (2,), digest: int = 1, dtype="float32") -> Any:
    return types.SimpleNamespace(
        path=path, shape=shape, dtype=dtype, initial_digest=digest, drop_initial=lambda: None
    )


class Group:
    """A group of two: this process is worker 0, and `first` is what the chief sent."""

    def __init__(self, first: list[Any]) -> None:
        self.identity = Identity(1, ("chief 0", "worker 0"), "h", 1)
        self.first = first

    def exchange(self, name: str, own: list[Any]) -> list[Any]:
        return [self.first, own]


class Registry:
    def __init__(self, *variables: Any) -> None:
        self.variables = list(variables)
        self.has_unsettled = bool(variables)

    def take_unsettled(self) -> list[Any]:
        taken, self.variables = self.variables, []
        return taken


@pytest.fixture
def taken(monkeypatch) -> list[str]:
    """Paths of the variables whose values are taken from process 0."""
    paths: list[str] = []
    monkeypatch.setattr(components, "is_in_parts", lambda variable, topology: False)
    monkeypatch.setattr(
        components, "_take_first", lambda variable, held, topology: paths.append(variable.path)
    )
    return paths


def agree(monkeypatch, first: list[Any], *variables: Any) -> None:
    monkeypatch.setattr(components, "current_group", lambda: Group(first))
    agree_on_initial_values(Registry(*variables), TOGETHER)  # pyright: ignore[reportArgumentType]


def test_only_values_with_other_digests_are_sent(monkeypatch, taken) -> None:
    first = [("a", [2], "float32", 1), ("b", [2], "float32", 9)]
    agree(monkeypatch, first, variable("a"), variable("b"))
    assert taken == ["b"]
    names_differ = [("dense_7/kernel", [2], "float32", 1)]
    agree(monkeypatch, names_differ, variable("dense/kernel"))
    assert taken == ["b"]
    monkeypatch.setattr(components, "current_group", lambda: 1 / 0)
    registry = Registry(variable("a"))
    agree_on_initial_values(registry, ALONE)  # pyright: ignore[reportArgumentType]
    assert len(registry.variables) == 1  # processes by themselves exchange nothing


@pytest.mark.parametrize(
    "first", [("a", [3], "float32", 1), ("a", [2], "int32", 1)], ids=["shape", "dtype"]
)
def test_another_shape_or_dtype_is_an_error_before_values_are_sent(
    first, monkeypatch, taken
) -> None:
    with pytest.raises(RuntimeError, match=r"chief 0 created variable 'a' of shape .*worker 0"):
        agree(monkeypatch, [("z", [2], "float32", 0), first], variable("z"), variable("a"))
    assert taken == []


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ([], r"chief 0 created no further variable, but worker 0 created variable 'a'"),
        (
            [("a", [2], "float32", 1), ("b", [2], "float32", 1)],
            r"chief 0 created variable 'b' .* but worker 0 created no further variable",
        ),
    ],
    ids=["here", "there"],
)
def test_variable_of_one_process_alone_is_an_error(first, message, monkeypatch, taken) -> None:
    with pytest.raises(RuntimeError, match=message):
        agree(monkeypatch, first, variable("a"))
    assert taken == []


def test_digest_is_the_crc_of_the_bytes_in_row_order() -> None:
    value = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert initial_digest(value, TOGETHER) == zlib.crc32(value.tobytes())
    assert initial_digest(value.T, TOGETHER) == zlib.crc32(value.T.copy().tobytes())
    assert initial_digest(value, ALONE) == 0


# Axes of Keras's meshes in terms of replicas and the devices of a replica.


def replicas_of_mesh_axes(count: int, size: int) -> Topology:
    names = [[f"cpu:{i * size + j}" for j in range(size)] for i in range(count)]
    return Topology.of_groups(find_groups(names))


@pytest.mark.parametrize(
    ("shape", "names", "topology", "expected"),
    [
        ((2, 2), ["batch", "model"], (2, 2), {"batch": ("replica",), "model": ("logical",)}),
        ((2, 2), ["x", "y"], (2, 2), {"x": ("replica",), "y": ("logical",)}),
        ((4, 2), ["model", "data"], (2, 4), {"data": ("replica",), "model": (0, 1)}),
        ((1, 2, 4), ["a", "b", "c"], (1, 8), {"a": ("replica",), "b": (0,), "c": (1, 2)}),
        ((8, 1), ["batch", "model"], (8, 1), {"batch": ("replica",), "model": ()}),
        ((8,), ["x"], (8, 1), {"x": ("replica",)}),
        ((2,), ["x"], (2, 2), {"x": ("logical",)}),
        ((4, 2), ["batch", "model"], (2, 4), {"batch": ("replica",)}),  # other groups were given
        ((1, 2, 3), ["a", "b", "c"], (1, 6), {"a": ("replica",), "b": (0,), "c": (1,)}),
        ((1, 3, 2), ["a", "b", "c"], (1, 6), {"a": ("replica",)}),
    ],
)
def test_names_of_a_mesh(shape, names, topology, expected) -> None:
    own = replicas_of_mesh_axes(*topology)
    wanted = {
        name: tuple(f"logical_{axis}" if isinstance(axis, int) else axis for axis in axes)
        for name, axes in expected.items()
    }
    assert axis_names(keras_map(shape, names), own) == wanted
    without = {"replica": ("replica",), "logical": ("logical_0", "logical_1")}
    for layouts in ({}, keras.distribution.LayoutMap(None), keras_map((2, 4), ["b", "logical"])):
        assert axis_names(layouts, replicas_of_mesh_axes(2, 4)) == without


def test_groups_of_a_mesh() -> None:
    by_batch = keras_map((2, 2), ["batch", "model"])
    assert groups_of_mesh(by_batch) == [["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]
    by_model = keras_map((2, 2), ["model", "batch"])
    assert groups_of_mesh(by_model) == [["cpu:0", "cpu:2"], ["cpu:1", "cpu:3"]]
    assert groups_of_mesh(keras_map((2,), ["x"])) == [["cpu:0"], ["cpu:1"]]
    assert groups_of_mesh({}) is None
    assert groups_of_mesh(None) is None
    assert devices_per_replica_of(keras_map((2, 1, 2), ["batch", "a", "b"])) == 2
    assert devices_per_replica_of({}) == 1
