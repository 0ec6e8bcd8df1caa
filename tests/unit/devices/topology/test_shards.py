"""Device groups: lookup, validation, division into adjacent groups, and topology."""

from __future__ import annotations

import decimal
import itertools
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import stratagem as sg
from stratagem.devices.finding import find_groups
from stratagem.devices.mesh import (
    REPLICA_AXIS,
    Topology,
    adjacent_groups,
    check_groups,
    prime_factors,
)
from stratagem.devices.shards import (
    assemble_on_host,
    creating_on_host,
    local_copy,
    put_shards,
    replica_copy,
    replicas_span_processes,
    require_exact_integers,
)
from stratagem.resources import programs_folder


class OfProcess:
    """A device of some process, as far as groups ask."""

    def __init__(self, process_index: int, number: int) -> None:
        self.process_index = process_index
        self.number = number

    def __str__(self) -> str:
        return f"device {self.number} of {self.process_index}"


def ids(groups) -> list[list[int]]:
    return [[device.id for device in group] for group in groups]


@pytest.fixture
def two_of_four() -> Topology:
    return Topology.of_groups(
        find_groups([["cpu:4", "cpu:1", "cpu:2", "cpu:3"], ["cpu:0", "cpu:5", "cpu:6", "cpu:7"]])
    )


def by_device(array: jax.Array) -> dict[int, np.ndarray]:
    return {shard.device.id: np.asarray(shard.data) for shard in array.addressable_shards}


@pytest.mark.parametrize(
    ("specs", "error", "match"),
    [
        ([["cpu:0", "cpu:1"], ["cpu:2"]], ValueError, "device groups have 2, 1 devices"),
        ([["cpu:0"], []], ValueError, "device groups have 1, 0 devices"),
        ([["cpu:0", "cpu:1"], ["cpu:1", "cpu:2"]], ValueError, "more than once"),
        ([[], []], ValueError, r"devices=\[\] is empty"),
        ([["cpu:0"], "cpu:1"], TypeError, "mixes groups with the single device 'cpu:1'"),
    ],
)
def test_groups_that_cannot_be_are_refused(specs, error, match) -> None:
    with pytest.raises(error, match=match):
        find_groups(specs)


@pytest.mark.parametrize(
    ("groups", "match"),
    [
        ([], "device groups have no devices"),
        ([[0, 1], [1, 2]], r"contain cpu:1 more than once"),
        ([[0, 0]], r"contain cpu:0 more than once"),
    ],
)
def test_groups_of_devices_are_checked(groups, match) -> None:
    with pytest.raises(ValueError, match=match):
        check_groups([[jax.devices()[index] for index in group] for group in groups])


def test_groups_do_not_share_their_processes() -> None:
    with pytest.raises(ValueError, match="device 0 of 0, device 2 of 1 has a part of the devices"):
        check_groups([[OfProcess(index, 2 * index + part) for index in (0, 1)] for part in (0, 1)])
    with pytest.raises(ValueError, match="a multiple of it that divides the 12 devices"):
        adjacent_groups([OfProcess(index // 4, index) for index in range(12)], 6)


@pytest.mark.parametrize("size", [4, 8])
def test_group_may_have_several_processes(size) -> None:
    groups = adjacent_groups([OfProcess(index // 2, index) for index in range(8)], size)
    assert [[d.number for d in group] for group in groups] == [
        [*range(start, start + size)] for start in range(0, 8, size)
    ]
    topology = Topology.of_groups(groups)
    assert topology.spans_processes
    assert replicas_span_processes(topology)
    count = size // 2
    assert topology.processes_of_inputs == tuple(
        tuple(range(first, first + count)) for first in range(0, 4, count)
    )
    assert topology.local_replica_ids == (0,)  # of process 0
    assert [d.number for d in topology.local_devices] == [0]
    alone = Topology.of_groups([[OfProcess(index, index)] for index in range(3)])
    assert alone.processes_of_inputs == ((0,), (1,), (2,))
    assert not replicas_span_processes(alone)


def test_neighbours_of_each_process_form_groups() -> None:
    devices = [OfProcess(index // 4, index) for index in range(8)]
    groups = adjacent_groups(devices, 2)
    assert [[d.number for d in group] for group in groups] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(
        ValueError, match="devices_per_replica=3 does not divide the 4 devices of each process"
    ):
        adjacent_groups(devices, 3)
    with pytest.raises(ValueError, match="devices_per_replica=16 does not divide the 4"):
        adjacent_groups(devices, 16)
    with pytest.raises(ValueError, match="devices_per_replica=0"):
        adjacent_groups(devices, 0)
    with pytest.raises(TypeError, match="devices_per_replica='2' is of type str"):
        adjacent_groups(devices, "2")


def test_mesh_has_an_axis_for_each_factor_of_a_group(two_of_four) -> None:
    assert two_of_four.num_replicas == 2
    assert two_of_four.num_logical_devices == 4
    assert two_of_four.mesh.axis_names == (REPLICA_AXIS, "logical_0", "logical_1")
    assert two_of_four.mesh.devices.shape == (2, 2, 2)
    assert [d.id for d in two_of_four.mesh.devices.ravel()] == [4, 1, 2, 3, 0, 5, 6, 7]
    pair = Topology.of_groups(find_groups([["cpu:0", "cpu:1"]]))
    assert pair.mesh.axis_names == (REPLICA_AXIS, "logical")
    assert pair.mesh.devices.shape == (1, 2)
    single = Topology.of_groups(find_groups([["cpu:1"], ["cpu:0"]]))
    assert single == Topology(tuple(jax.devices()[index] for index in (1, 0)))
    assert (single.num_logical_devices, single.logical_axes) == (1, ())
    assert Topology(None).devices_of(0) == ()
    assert Topology(None).all_devices is None
    for number in (1, 2, 3, 4, 6, 8, 12, 97, 256):
        factors = prime_factors(number)
        assert math.prod(factors) == number
        assert all(factor % d for factor in factors for d in range(2, factor))
        assert list(factors) == sorted(factors)


def test_first_device_of_a_group_stands_for_its_replica(two_of_four) -> None:
    assert ids([two_of_four.devices, two_of_four.local_devices]) == [[4, 0], [4, 0]]
    assert ids([two_of_four.all_devices]) == [[4, 1, 2, 3, 0, 5, 6, 7]]
    assert ids([two_of_four.devices_of(1)]) == [[0, 5, 6, 7]]
    assert not two_of_four.spans_processes


def test_replicate_puts_a_copy_on_every_device_of_every_group(two_of_four) -> None:
    copies = by_device(two_of_four.replicate(np.arange(3)))
    assert set(copies) == set(range(8))
    assert all(copy.tolist() == [0, 1, 2] for copy in copies.values())


@pytest.mark.parametrize("method", ["stack", "put_stacked"])
def test_component_is_on_every_device_of_its_group(two_of_four, method) -> None:
    values = [np.array([1.0, 2.0]), np.array([3.0, 4.0])]
    stacked = getattr(two_of_four, method)(values if method == "stack" else np.stack(values))
    assert stacked.sharding.spec == PartitionSpec(REPLICA_AXIS)
    parts = by_device(stacked)
    for device in (4, 1, 2, 3):
        assert parts[device].tolist() == [[1.0, 2.0]]
    for device in (0, 5, 6, 7):
        assert parts[device].tolist() == [[3.0, 4.0]]


# 64-bit integers that JAX would change are refused on each way to the devices.

LARGE = np.array([[1], [2**31], [-7], [3]])
STRATEGIES: dict[str, Callable[[], Any]] = {
    "default": sg.get_strategy,
    "one device": lambda: sg.OneDeviceStrategy("cpu:0"),
    "mirrored": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"]),
}
TARGETS = np.zeros((4, 2), np.float32)
DOES_NOT_FIT = "of its values do not fit int32"


def small_model(name: str) -> keras.Model:
    with STRATEGIES[name]().scope():
        model = keras.Sequential([keras.layers.Embedding(10, 2), keras.layers.Flatten()])
        model.compile("sgd", "mse")
        model.build((None, 1))
    return model


def _batches(name: str, bad: int) -> None:
    """They are transferred one by one, and later many at once."""
    good = {"x": np.zeros((4, 1), np.int64), "user": np.zeros((4, 1), np.int64)}
    batches = [good | ({"user": LARGE} if place == bad else {}) for place in range(48)]
    list(iter(STRATEGIES[name]().distribute_dataset(batches)))


def _eagerly(name: str, value: Any) -> None:
    sg.config.run_eagerly(True)
    try:
        STRATEGIES[name]().run(lambda ids: ids, args=(value,))
    finally:
        sg.config.run_eagerly(False)


def _slices() -> sg.IndexedSlices:
    return sg.IndexedSlices(np.ones((4, 2), np.float32), LARGE[:, 0], (8, 2))


WAYS: dict[str, Callable[[str], object]] = {
    "early batches": lambda name: _batches(name, 0),
    "late batches": lambda name: _batches(name, 40),
    "fit": lambda name: small_model(name).fit(LARGE, TARGETS, verbose=0),
    "evaluate": lambda name: small_model(name).evaluate(LARGE, TARGETS, verbose=0),
    "predict": lambda name: small_model(name).predict(LARGE, verbose=0),
    "fit of a dataset": lambda name: small_model(name).fit(
        sg.get_strategy().distribute_dataset([(LARGE, TARGETS)]), verbose=0
    ),
    "run": lambda name: STRATEGIES[name]().run(lambda ids: ids, args=(LARGE,)),
    "run of a number": lambda name: STRATEGIES[name]().run(lambda i: i, args=(np.int64(2**40),)),
    "eager run": lambda name: _eagerly(name, LARGE),
    "values": lambda name: STRATEGIES[name]().distribute_values_from_function(lambda _: LARGE),
    "function": lambda _: sg.function(lambda ids: ids + 1)(LARGE),
    "lookup": lambda _: sg.nn.embedding_lookup(np.ones((4, 2), np.float32), LARGE),
    "dense rows": lambda _: _slices().to_dense(),
    "combined rows": lambda _: _slices().combined(),
}


@pytest.mark.parametrize(
    ("way", "name"),
    [
        *itertools.product(("early batches", "late batches"), ("default", "mirrored")),
        *itertools.product(("fit", "evaluate", "predict"), ("one device", "mirrored")),
        *itertools.product(("run", "run of a number", "eager run"), STRATEGIES),
        ("values", "mirrored"),
        *((way, "default") for way in ("fit of a dataset", "function", "lookup")),
        *((way, "default") for way in ("dense rows", "combined rows")),
    ],
)
def test_integers_that_jax_would_change_are_refused(way, name) -> None:
    place = {"early batches": r"batch\['user'\] has dtype int64", "lookup": "An array of ids"}
    with pytest.raises(OverflowError, match=rf"{place.get(way, '')}.*1 {DOES_NOT_FIT}"):
        WAYS[way](name)


def test_error_names_the_array_and_never_a_value() -> None:
    arrays = [np.zeros(3), np.array([5, 123456789012])]
    with pytest.raises(OverflowError, match="array 1 has dtype int64 and shape") as caught:
        require_exact_integers(arrays, lambda place: f"array {place}")
    assert "1234" not in str(caught.value)
    assert "SG311" in str(caught.value)
    numbers = [7, "text", None, np.array(["a"]), np.array([2**40], object), jax.numpy.ones(2)]
    require_exact_integers([*numbers, np.int64(2**31 - 1), np.uint64(2**32 - 1), np.array([], int)])
    with jax.enable_x64(True):
        require_exact_integers([LARGE])


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-(2**31) - 2, 2**31 + 1)),
    st.sampled_from(["int64", "uint64", "int32", "float64"]),
)
def test_an_error_is_raised_where_jax_changes_a_value(values, dtype) -> None:
    array = np.array(values, np.int64).astype(dtype)
    kept = np.asarray(jax.device_put(array))
    num_changed = sum(
        decimal.Decimal(int(one)) != int(other)
        for one, other in zip(array.tolist(), kept.tolist(), strict=True)
    )
    if num_changed and array.dtype.kind != "f":
        with pytest.raises(OverflowError, match=f"{num_changed} of its values do not fit"):
            require_exact_integers([array])
    else:
        require_exact_integers([array])


def test_keys_travel_as_pairs() -> None:
    """As the error says."""
    keys = np.array([[2**40 + 5, -1, 2**31]])
    (batch,) = STRATEGIES["one device"]().distribute_dataset([keys[..., None].view("uint32")])
    assert batch.shape == (1, 3, 2)
    assert np.asarray(batch).view(np.int64)[..., 0].tolist() == keys.tolist()


# JAX's persistent compilation cache, in processes of their own: a setting lasts as long as JAX.

_PROGRAM = """
import jax, jax.monitoring, stratagem as sg
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
strategy = sg.OneDeviceStrategy("cpu:0")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
total = strategy.run(lambda x: (x * 2).sum(), args=(jax.numpy.arange(8.0),))
print(total, jax.config.jax_compilation_cache_dir, hits.count("/jax/compilation_cache/cache_hits"))
"""


def _run(folder, program=_PROGRAM, expected_code=0, **variables):
    unset = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    shell = {name: text for name, text in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**shell, "STRATAGEM_CACHE_DIR": str(folder), "JAX_PLATFORMS": "cpu", **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == expected_code, done.stderr
    return done.stdout.split(), done.stderr


@pytest.mark.slow
def test_a_second_process_loads_what_the_first_compiled(tmp_path) -> None:
    (total, folder, num_hits), log = _run(tmp_path, STRATAGEM_LOG_LEVEL="INFO")
    assert (total, folder, num_hits) == ("56.0", str(programs_folder(tmp_path)), "0")
    assert f"cached in {folder}" in log
    assert os.stat(folder).st_mode & 0o077 == 0
    (total, _, num_hits), log = _run(tmp_path, STRATAGEM_LOG_LEVEL="INFO")
    assert total == "56.0"
    assert int(num_hits) > 0
    assert "cached in" not in log  # told once


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"STRATAGEM_COMPILATION_CACHE_BYTES": "0"}, "None"),
        ({"JAX_ENABLE_COMPILATION_CACHE": "0"}, "None"),
        ({"JAX_COMPILATION_CACHE_DIR": "/tmp/of_the_user"}, "/tmp/of_the_user"),
    ],
)
def test_the_choice_of_the_user_comes_first(tmp_path, variables, folder) -> None:
    (_, found, _), _ = _run(tmp_path, **variables)
    assert found == folder
    assert not (tmp_path / "programs").exists()


@pytest.mark.slow
def test_a_folder_that_others_can_write_is_not_used(tmp_path) -> None:
    folder = programs_folder(tmp_path)
    folder.mkdir(parents=True)
    folder.chmod(0o770)
    (_, found, _), log = _run(tmp_path)
    assert found == "None"
    assert f"chmod 700 {folder}" in log
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_programs_used_least_recently_are_removed(tmp_path) -> None:
    folder = programs_folder(tmp_path)
    elsewhere = folder.parent / "another_cpu"
    elsewhere.mkdir(parents=True)
    folder.mkdir(mode=0o700)
    now = time.time()
    files = {"old": (elsewhere, 300), "older": (folder, 400), "new": (folder, 10)}
    for name, (parent, age_s) in files.items():
        path = parent / f"{name}-cache"
        path.write_bytes(bytes(1000))
        os.utime(path, (now - age_s, now - age_s))
    program = "import stratagem as sg; sg.OneDeviceStrategy('cpu:0')"
    _run(tmp_path, program, STRATAGEM_COMPILATION_CACHE_BYTES="2500")
    assert {path.name for path in folder.parent.rglob("*-cache")} == {"old-cache", "new-cache"}
    _run(tmp_path, program, STRATAGEM_COMPILATION_CACHE_BYTES="1500")
    assert {path.name for path in folder.parent.rglob("*-cache")} == {"new-cache"}


@pytest.mark.slow
def test_a_disk_that_is_full_leaves_no_file(tmp_path) -> None:
    program = """
import os, resource, signal, stratagem as sg
from jax._src.lru_cache import LRUCache
sg.OneDeviceStrategy("cpu:0")
cache = LRUCache(os.environ["FOLDER"], max_size=-1)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    cache.put("key", bytes(5000))
except OSError as error:
    print(error.strerror.replace(" ", "_"))
print(os.listdir(os.environ["FOLDER"]))
"""
    printed, _ = _run(tmp_path, program, FOLDER=str(tmp_path / "entries"))
    assert printed == ["File_too_large", "[]"]


@pytest.mark.slow
def test_a_process_killed_while_it_writes_leaves_no_part_of_an_entry(tmp_path) -> None:
    program = """
import os, signal, stratagem as sg
from jax._src.lru_cache import LRUCache
sg.OneDeviceStrategy("cpu:0")
cache = LRUCache(os.environ["FOLDER"], max_size=-1)
replace, os.replace = os.replace, lambda *_: os.kill(os.getpid(), signal.SIGKILL)
cache.put("key", bytes(5000))
"""
    folder = tmp_path / "entries"
    _run(tmp_path, program, expected_code=-signal.SIGKILL, FOLDER=str(folder))
    assert not (folder / "key-cache").exists()


# Sharded copies: transfer, and reading by replica and on the host.

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
        own = local_copy(array, topology)  # an ordinary array
        np.testing.assert_array_equal(own, VALUE)
        assert own.devices() == {topology.devices[0]}
    assert local_copy(3, topology) == 3
    stacked = topology.stack([VALUE, 2 * VALUE])
    component = replica_copy(stacked, topology, replica_id)
    np.testing.assert_array_equal(component, [(replica_id + 1) * VALUE])
    assert component.devices() == {first}


def test_large_arrays_are_made_on_the_host() -> None:
    with jax.default_device(jax.devices()[3]):
        with creating_on_host(True):
            large = jnp.ones(3)
        with creating_on_host(False):
            small = jnp.ones(3)
    assert large.devices() == {jax.local_devices(backend="cpu")[0]}
    assert small.devices() == {jax.devices()[3]}
