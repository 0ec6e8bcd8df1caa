"""Batches split over replicas: split rule, padding, and invalid batches."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.devices.finding import find_devices
from stratagem.devices.mesh import Topology
from stratagem.errors import InvalidArgumentError
from stratagem.group.member import Group
from stratagem.group.verdict import GroupLimits
from stratagem.input import distributed as size_exchange
from stratagem.input import placement as module
from stratagem.input.batches import (
    DeviceRows,
    batch_sizes_for_worker,
    is_on_accelerator,
    join_parts,
    split_lengths,
    take_batch,
    with_selected_rows,
)
from stratagem.input.iterator import Loader, Prefetcher
from stratagem.input.placement import HostSteps, place, put_arrays, put_steps
from stratagem.input.sources.adapters import as_source
from tests.parity.comparison import mirrored
from tests.row_selections import count_selections
from tests.unit.group.process_group.members import joined, together

_NONE: list[int] = []
# Examples 0 ... N-1, global batch size, and what each replica gets of each batch.
_SPLITS = [
    (6, 4, [[[0, 1], [2, 3]], [[4], [5]]]),
    (4, 4, [[[0], [1], [2], [3], _NONE]]),
    (8, 4, [[[0, 1], [2, 3], _NONE], [[4, 5], [6, 7], _NONE]]),
    (9, 4, [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], _NONE]]),
    (10, 12, [[[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]]),
    (10, 7, [[[0, 1], [2, 3], [4, 5], [6]], [[7], [8], [9], _NONE]]),
]


@pytest.mark.parametrize(("num_examples", "batch_size", "batches"), _SPLITS)
def test_batches_are_split_by_the_rule(
    num_examples: int, batch_size: int, batches: list[list[list[int]]]
) -> None:
    topology = mirrored(len(batches[0])).topology
    for index, parts in enumerate(batches):
        start = index * batch_size
        rows = np.arange(start, min(start + batch_size, num_examples), dtype="int32")
        placed = place([take_batch((rows,), len(parts))], topology)
        (value,) = placed.value()
        assert [part.tolist() for part in value.components] == parts
        assert placed.size == value.stacked.shape[1] == -(-len(rows) // len(parts))
        for shard, device in zip(
            value.stacked.addressable_shards, topology.devices or (), strict=True
        ):
            assert shard.device == device


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 12))
def test_split_shares_every_example_out_in_order(num_examples: int, num_replicas: int) -> None:
    size, lengths = split_lengths(num_examples, num_replicas)
    taken = lengths or (size,) * num_replicas
    assert sum(taken) == num_examples
    assert len(taken) == num_replicas
    full = num_examples // size
    assert taken[:full] == (size,) * full
    assert not any(taken[full + 1 :])


def test_parts_of_replicas_are_padded_to_the_longest() -> None:
    batch = join_parts([np.arange(1.0), None, np.arange(3.0)])
    placed = place([batch], mirrored(3).topology)
    assert [part.tolist() for part in placed.value().components] == [[0], [], [0, 1, 2]]
    assert batch.num_examples == 4
    assert batch.signature != join_parts([None, np.arange(1.0), np.arange(3.0)]).signature
    with pytest.raises(ValueError, match="Replicas received different batches"):
        join_parts([np.zeros((2, 3)), np.zeros((2, 4))])


def test_batches_of_one_program_have_equal_signatures() -> None:
    def signature(*shape: int, dtype: str = "float32", weight: bool = False) -> object:
        weights = np.ones(shape[0]) if weight else None
        return take_batch((np.zeros(shape, dtype), weights), 2).signature

    assert signature(4, 2) == signature(4, 2)
    others = [signature(3, 2), signature(4, 3), signature(4, 2, dtype="int32")]
    assert signature(4, 2) not in [*others, signature(4, 2, weight=True)]


@pytest.mark.parametrize(
    "data",
    [(np.float32(1), np.float32(2)), (np.zeros((4, 2)), np.zeros((3, 1))), (None, None)],
    ids=["scalar", "unequal", "nothing"],
)
def test_data_that_is_not_batched_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match="Expected batched arrays, all with the same leading size"):
        take_batch(data, 2)


def _objects(rows: list[Any]) -> Any:
    array = np.empty(len(rows), object)
    array[:] = rows
    return array


class RaggedTensor:
    """The attributes of a tf.RaggedTensor that are read."""

    row_splits = np.array([0, 2, 5])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (_objects([np.zeros(2), np.zeros(3)]), r"an array of objects with rows of shape \(2,\), "),
        (_objects([[1, 2], [3]]), "an array of objects with rows of 2 values, 1 values"),
        ({"x": _objects([[1]] * 6)}, "1 values and 2 more"),
        (np.array(RaggedTensor(), object), "a RaggedTensor with rows of 2 values, 3 values"),
        ([np.zeros(2), np.zeros(3)], "Convert lists of rows to arrays"),
        (RaggedTensor(), "a RaggedTensor with rows of 2 values, 3 values"),
    ],
)
def test_rows_of_different_lengths_are_refused_with_the_way_out(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        take_batch(batch, 2)
    assert "keras.utils.pad_sequences" in str(caught.value)
    assert take_batch(_objects(["a", "bc"]), 2).num_examples == 2  # texts are no rows


# Transfer: small arrays arrive as those that JAX puts, with the same dtypes and shardings.

DTYPES = ("float32", "float64", "int64", "uint8", "bool", "float16", "complex64")


def topology_of(name: str) -> Topology:
    return Topology(None if name == "default" else find_devices(name.split("+")))


def arrays_for(topology: Topology, *, steps: tuple[int, ...], rows: int = 3) -> list[Any]:
    several = (topology.num_replicas,) if topology.num_replicas > 1 else ()
    shape = (*steps, *several, rows, 4)
    numbers = (np.arange(np.prod(shape)) % 100).reshape(shape)
    return [numbers.astype(dtype) for dtype in DTYPES]


def _require_alike(got: Any, wanted: Any) -> None:
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    assert (got.committed, got.weak_type) == (wanted.committed, wanted.weak_type)
    assert got.sharding.is_equivalent_to(wanted.sharding, got.ndim)


@pytest.mark.parametrize("steps", [(), (5,)])
@pytest.mark.parametrize("name", ["default", "cpu:1", "cpu:1+cpu:0"])
def test_program_gives_what_jax_puts(name: str, steps: tuple[int, ...]) -> None:
    topology = topology_of(name)
    arrays = arrays_for(topology, steps=steps)
    options = {"topology": topology, "many": bool(steps)}
    for got, wanted, array in zip(
        put_arrays(arrays, is_repeated=True, **options),
        put_arrays(arrays, is_repeated=False, **options),
        arrays,
        strict=True,
    ):
        _require_alike(got, wanted)
        np.testing.assert_array_equal(np.asarray(got), array.astype(got.dtype))


@pytest.mark.parametrize("name", ["default", "cpu:1", "cpu:1+cpu:0"])
def test_steps_that_were_put_together_are_what_jax_puts_for_each(name: str) -> None:
    topology = topology_of(name)
    arrays = arrays_for(topology, steps=(5,))
    steps = put_steps(arrays, topology)
    assert len(steps) == 5
    for number, step in enumerate(steps):
        own = [array[number] for array in arrays]
        wanted = put_arrays(own, topology, many=False, is_repeated=False)
        for got, expected in zip(step, wanted, strict=True):
            _require_alike(got, expected)
            np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


@pytest.mark.parametrize("name", ["default", "cpu:0", "cpu:0+cpu:1"])
def test_programs_never_read_the_arrays_of_the_source(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run after the call, when the source may have changed its arrays."""
    given: list[np.ndarray[Any, Any]] = []

    def watched(make: Any) -> Any:
        def make_watched(*places: Any) -> Any:
            made = make(*places)
            programs = [
                lambda *arrays, run=run: (given.extend(arrays), run(*arrays))[1]
                for run in (made if isinstance(made, list) else [made])
            ]
            return programs if isinstance(made, list) else programs[0]

        return make_watched

    for program in ("_programs", "_unstacking"):
        monkeypatch.setattr(module, program, watched(getattr(module, program)))
    topology = topology_of(name)
    one, several = arrays_for(topology, steps=()), arrays_for(topology, steps=(3,))
    put_arrays(one, topology, many=False, is_repeated=True)
    put_steps(several, topology)
    assert put_arrays([], topology, many=False, is_repeated=True) == []
    assert len(given) >= len(one) + len(several)
    assert not any(np.shares_memory(own, array) for own in (*one, *several) for array in given)


@pytest.mark.parametrize(("rows", "is_repeated"), [(3, False), (1 << 14, True)])
def test_few_or_large_arrays_need_no_program(
    rows: int, is_repeated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_programs", None)
    topology = topology_of("cpu:0+cpu:1")
    arrays = arrays_for(topology, steps=(), rows=rows)[:1]
    (got,) = put_arrays(arrays, topology, many=False, is_repeated=is_repeated)
    np.testing.assert_array_equal(np.asarray(got), arrays[0])


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_large_transfers_to_a_gpu_are_followed_by_an_empty_program_on_each_device(
    num_replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    original = module._empty_program

    def noted(device: jax.Device) -> Any:
        return lambda: started.append(original(device)())

    monkeypatch.setattr(module, "_empty_program", noted)
    topology = topology_of("cpu:0" if num_replicas == 1 else "cpu:0+cpu:1")
    large = np.ones((num_replicas, 20_000), "float32")
    put_arrays([large], topology, many=False, is_repeated=False)
    assert started == []  # CPU
    monkeypatch.setattr(module, "_waits_for_programs", lambda topology: True)
    put_arrays([large[:, :8], jax.numpy.asarray(large)], topology, many=False, is_repeated=False)
    assert started == []
    put_arrays([large, large], topology, many=False, is_repeated=False)
    assert [one.devices() for one in started] == [{device} for device in topology.devices or ()]


# Processes that read different data ahead of their programs and leave it early.

_LIMITS = GroupLimits(join_s=120, peer_s=120, stuck_s=600, barrier_s=120)
_ALONE: Any = types.SimpleNamespace(num_local_replicas=1, processes_of_inputs=((0,), (1,)))
_TOGETHER: Any = types.SimpleNamespace(num_local_replicas=1, processes_of_inputs=((0, 1),))
# Process 0 reads so far ahead that it waits for what process 1 never reads.
_BUFFERS = (3, 1)


@pytest.fixture
def members() -> Iterator[list[Group]]:
    groups = joined(2, _LIMITS)
    yield groups
    for group in groups:
        group.abandon()


@pytest.fixture
def prefetchers(members, monkeypatch) -> list[Prefetcher]:
    """Prefetchers of both processes, each with its own 50 batches."""
    both = []
    for index, member in enumerate(members):
        monkeypatch.setattr(size_exchange, "current_group", lambda member=member: member)
        reading = size_exchange.SynchronizedReading(
            "dataset 0 (1)", _ALONE, lambda reader: join_parts([next(reader)])
        )
        reader = as_source([np.full(1 + index, step) for step in range(50)]).open(0)
        both.append(
            Prefetcher(
                lambda reading=reading, reader=reader: reading.next(reader),
                _BUFFERS[index],
                reading.give_up,
            )
        )
    return both


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_loop_that_both_leave_early_ends_at_once(prefetchers, members, order) -> None:
    taken = together(2, lambda i: [prefetchers[i].take().all_lengths for _ in range(5)])
    assert taken == [[(1, 2)] * 5] * 2  # both know the sizes of both
    for index in order:
        prefetchers[index].close()  # waits for its thread
    assert together(2, lambda i: members[i].exchange("after", i)) == [[0, 1]] * 2


def test_loop_closed_by_one_process_raises_when_the_other_needs_a_batch(
    prefetchers, monkeypatch
) -> None:
    monkeypatch.setattr("stratagem.group.member._ERROR_REPORT_S", 0.05)
    together(2, lambda i: prefetchers[i].take())
    prefetchers[1].close()

    def go_on() -> None:
        for step in itertools.count(1):
            assert prefetchers[0].take().arrays[0].tolist() == [step, step]  # padded

    with pytest.raises(RuntimeError, match=r"left the loop over dataset 0 \(1\), but worker"):
        go_on()


def test_batches_on_the_host_are_given_up_when_they_are_left() -> None:
    given_up: list[bool] = []
    reader = as_source([np.arange(2)] * 3).open(0)
    loader = Loader(
        reader,
        lambda reader: join_parts([next(reader)]),
        None,  # nothing moves
        to_device=False,
        give_up=lambda: given_up.append(True),
    )
    batches = loader.host_batches()
    next(batches)
    assert not given_up
    batches.close()
    assert given_up == [True]


@pytest.mark.parametrize("num_other", [3, 4, None])
def test_processes_of_one_replica_read_the_same(num_other, members, monkeypatch) -> None:
    readers = []
    for member, count in zip(members, (3, num_other), strict=True):
        monkeypatch.setattr(size_exchange, "current_group", lambda member=member: member)
        source = as_source([np.zeros(2)] if count is None else [np.zeros(2), np.zeros(count)])
        reading = size_exchange.SynchronizedReading(
            "dataset 0 (1)", _TOGETHER, lambda reader: join_parts([next(reader)])
        )
        readers.append(functools.partial(reading.next, source.open(0)))
    together(2, lambda i: readers[i]())
    if num_other == 3:
        assert together(2, lambda i: readers[i]().all_lengths) == [None, None]
        return
    other = "no batch" if num_other is None else "a batch of 4 examples a replica"
    for error in together(2, lambda i: readers[i]()):
        assert isinstance(error, InvalidArgumentError)
        assert re.search(f"3 examples a replica of dataset 0 .*, and .* {other}", str(error))


# Rows of arrays on devices: order, padding, shardings, and one program for a group of steps.

_X = np.arange(60, dtype="float32").reshape(20, 3)
_Y = np.arange(20, dtype="int32")
_ORDER = np.random.default_rng(0).permutation(20)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The programs that select rows, by their calls."""
    return count_selections(monkeypatch)


def _batches(selections: list[Any], num_replicas: int, device: int = 0) -> list[Any]:
    put = jax.device_put((_X, _Y), jax.devices("cpu")[device])
    x, y = map(DeviceRows, put)
    return [take_batch((x[rows], y[rows]), num_replicas) for rows in selections]


_SELECTIONS = {
    "consecutive": [slice(0, 4), slice(4, 8), slice(8, 12)],
    "one": [slice(8, 12)],
    "short": [slice(18, 20)],
    "with holes": [slice(0, 4), slice(8, 12)],
    "overlapping": [slice(0, 4), slice(2, 6)],
    "in an order": [_ORDER[:4], _ORDER[4:8], _ORDER[8:12]],
    "mixed": [slice(0, 4), _ORDER[:4]],
    "not even": [slice(0, 5), slice(5, 10)],
    "not even, in an order": [_ORDER[:5], _ORDER[5:10]],
}


@pytest.mark.parametrize("name", _SELECTIONS)
@pytest.mark.parametrize(("num_replicas", "device"), [(1, 0), (1, 3), (2, 3), (4, 0)])
def test_rows_are_those_of_arrays_on_the_host(
    name: str, num_replicas: int, device: int, calls: list[Any]
) -> None:
    selections = _SELECTIONS[name]
    topology = mirrored(num_replicas).topology
    placed = place(_batches(selections, num_replicas, device), topology)
    hosts = [take_batch((_X[rows], _Y[rows]), num_replicas) for rows in selections]
    expected = place(hosts, topology)
    assert len(calls) == 1
    assert (placed.lengths, placed.size) == (expected.lengths, expected.size)
    for array, other in zip(placed.arrays, expected.arrays, strict=True):
        np.testing.assert_array_equal(array, other)
        assert array.sharding == other.sharding
        assert array.dtype == other.dtype


def test_columns_with_other_rows_or_on_other_devices_are_selected_apart(calls: list[Any]) -> None:
    x, y = (
        DeviceRows(jax.device_put(rows, jax.devices("cpu")[place]))
        for place, rows in enumerate((_X, _Y))
    )
    placed = place([take_batch((x[:4], y[:4], x[4:8], _Y[:4]), 1)], mirrored(1).topology)
    assert len(calls) == 3
    for array, other in zip(placed.arrays, (_X[:4], _Y[:4], _X[4:8], _Y[:4]), strict=True):
        np.testing.assert_array_equal(array, other)
    calls.clear()
    topology = mirrored(4).topology
    x = DeviceRows(jax.device_put(_X, topology.stacked))  # on all devices, where it stays
    batches = [take_batch(x[start : start + 4], 4) for start in (0, 4)]
    (array,) = place(batches, topology).arrays
    assert len(calls) == 1
    assert array.sharding == topology.stacked_steps
    np.testing.assert_array_equal(array, _X[:8].reshape(2, 4, 1, 3))


def test_rows_of_rows_are_those_of_numpy() -> None:
    rows = DeviceRows(jnp.asarray(_X))
    assert (rows.shape, rows.ndim, len(rows)) == ((20, 3), 2, 20)
    for first in (slice(3, 15), _ORDER[:12], slice(2, 100)):
        for second in (slice(1, 5), slice(None, None, 2), np.array([3, 0, 3]), slice(8, 4)):
            selected = rows[first][second]
            np.testing.assert_array_equal(selected, _X[first][second])
            assert selected.shape == _X[first][second].shape
    cast = DeviceRows(jnp.asarray(_X, "bfloat16"), dtype="float32")
    data = with_selected_rows({"x": cast[4:6], "y": _Y})
    assert data["x"].dtype == np.float32
    np.testing.assert_array_equal(data["x"], _X[4:6])
    assert data["y"] is _Y
    assert not is_on_accelerator(jnp.ones(3))


# Placement of batches on devices: padding, stacking, shardings, and several steps at once.


def test_padding_repeats_the_last_example_of_the_batch() -> None:
    rows = np.arange(10, dtype="float32").reshape(5, 2)
    placed = place([take_batch({"x": rows, "w": None}, 4)], mirrored(4).topology)
    (array,) = (np.asarray(array) for array in placed.arrays)
    assert array.shape == (4, 2, 2)
    assert placed.lengths == (2, 2, 1, 0)
    np.testing.assert_array_equal(array.reshape(8, 2)[5:], [rows[4]] * 3)
    assert placed.value()["w"] is None
    for steps in (1, 3):
        on_host = [take_batch((rows + step,), 4) for step in range(steps)]
        on_device = [  # where take_batch leaves arrays of an accelerator
            dataclasses.replace(one, arrays=[jnp.asarray(array) for array in one.arrays])
            for one in on_host
        ]
        wanted, got = (place(one, mirrored(4).topology).arrays[0] for one in (on_host, on_device))
        np.testing.assert_array_equal(got, wanted)
        assert got.sharding.spec == wanted.sharding.spec


_ROWS = np.arange(24, dtype="float32").reshape(12, 2)
_IN_ONE_ARRAY = {
    "one after the other": [_ROWS[start : start + 4] for start in (0, 4, 8)],
    "backwards": [_ROWS[start : start + 4] for start in (8, 4, 0)],
    "overlapping": [_ROWS[start : start + 4] for start in (0, 2, 4)],
    "with holes": [_ROWS[start : start + 3] for start in (0, 4, 8)],
    "strided": [_ROWS[start::3] for start in (0, 1, 2)],
    "columns": [_ROWS[start : start + 4, :1] for start in (0, 4, 8)],
    "copies": [_ROWS[start : start + 4].copy() for start in (0, 4, 8)],
    "the same": [_ROWS[:4]] * 3,
}


@pytest.mark.parametrize("name", _IN_ONE_ARRAY)
def test_batches_that_lie_in_one_array_are_those_that_were_given(name: str) -> None:
    parts = _IN_ONE_ARRAY[name]
    placed = place([take_batch(part, 1) for part in parts], mirrored(1).topology)
    np.testing.assert_array_equal(placed.arrays[0], np.stack(parts))


def test_uint8_stays_uint8_and_text_stays_on_the_host() -> None:
    data = {"image": np.zeros((3, 2), np.uint8), "name": np.array(["a", "b", "c"])}
    value = place([take_batch(data, 2)], mirrored(2).topology).value()
    on_host = place([take_batch(data, 2)], mirrored(2).topology, to_device=False).value()
    assert isinstance(on_host["image"].stacked, np.ndarray)
    assert value["image"].stacked.dtype == np.uint8
    assert [part.tolist() for part in value["name"].components] == [["a", "b"], ["c"]]


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_steps_that_were_read_at_once_are_placed_as_their_batches(num_replicas: int) -> None:
    rows = np.arange(24, dtype="float32").reshape(3, 4, 2)
    first = take_batch(rows[0], num_replicas)
    steps = HostSteps(first, [rows], 3)
    topology = mirrored(num_replicas).topology
    placed, expected = place(steps, topology), place(steps.batches(), topology)
    np.testing.assert_array_equal(placed.arrays[0], expected.arrays[0])
    assert placed.arrays[0].sharding == expected.arrays[0].sharding
    assert (placed.signature, placed.num_steps) == (expected.signature, 3)


# Sizes into which a worker cuts the stream of its own files.


@settings(deadline=None)
@given(st.integers(1, 100), st.integers(1, 6), st.integers(1, 4))
def test_each_step_uses_one_global_batch(
    global_batch_size: int, num_workers: int, num_replicas: int
) -> None:
    cuts = [
        batch_sizes_for_worker(global_batch_size, num_workers, num_replicas, worker)
        for worker in range(num_workers)
    ]
    assert all(sum(sizes) == global_batch_size for sizes in cuts)
    assert max(map(max, cuts)) - min(map(min, cuts)) <= 1
    assert batch_sizes_for_worker(7, 2, 2, 1) == [2, 1, 2, 2]
    for step in range(num_workers):
        rows = slice(step * num_replicas, (step + 1) * num_replicas)
        assert sum(sum(sizes[rows]) for sizes in cuts) == global_batch_size


def test_sizes_must_be_positive_and_the_worker_must_exist() -> None:
    sizes = {"global_batch_size": 4, "num_workers": 2, "num_replicas_per_worker": 1}
    wrong = [({name: 0}, f"batch_sizes_for_worker received {name}=0") for name in sizes]
    wrong += [({"worker_index": i}, f"={i} is out of range for 2 workers") for i in (-1, 2)]
    for numbers, words in wrong:
        with pytest.raises(ValueError, match=words):
            batch_sizes_for_worker(**{**sizes, "worker_index": 0, **numbers})
