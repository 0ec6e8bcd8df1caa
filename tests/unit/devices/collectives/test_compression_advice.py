"""Advice of `compression="auto"`: the decision by hand, and that nothing is compressed unasked."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import keras
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

import stratagem as sg
from stratagem.devices.collectives.all_reduce import ChosenAllReduce
from stratagem.devices.collectives.axis import ReplicaAxis
from stratagem.devices.collectives.islands import Islands
from stratagem.devices.collectives.measurement import SIZES_BYTES
from stratagem.devices.collectives.packing import (
    NO_PACKING,
    WITHIN_PROCESS,
    NumberedPacks,
    SizedPacks,
    packing_for,
)
from stratagem.devices.mesh import Topology
from stratagem.execution import compression_advice
from stratagem.execution.communicator import Communicator, MeshCommunicator, SoleCommunicator
from stratagem.execution.compressed.between import IslandSums
from stratagem.execution.compression_advice import (
    FORMS,
    MeasuredLink,
    advice_lines,
    chosen_form,
    coding_times,
    link_of,
    measured_link,
    seconds_of,
)
from stratagem.options import ReduceOp
from stratagem.strategies.base.automatic import AutomaticOps
from stratagem.variables.distributed import Mirrored, PerReplica
from tests.unit.devices.collectives.axes import AXES, messages, on_axis
from tests.unit.devices.collectives.replicas import AXIS, NUM_REPLICAS, on_replicas
from tests.unit.observe.run_events.test_wait_clock import ticking

FREE = dict.fromkeys(FORMS, 0.0)
MATRIX, VECTOR = (1000, 1000), (1000,)


def link(megabytes_per_s: float, coding_s=FREE, latency_s: float = 0.0) -> MeasuredLink:
    return MeasuredLink(latency_s, megabytes_per_s * 1e6, coding_s)


def test_link_follows_from_two_sums() -> None:
    """1 ms and 4 MB/s: of n bytes, two replicas send n in a ring."""
    times_s = {size: 1e-3 + size / 4e6 for size in (4_096, 2**21)}
    found = link_of(times_s, 2, FREE)
    assert found.latency_s == pytest.approx(1e-3)
    assert found.bytes_per_s == pytest.approx(4e6)
    # Four replicas send 3/2 of the bytes in the same time.
    assert link_of(times_s, 4, FREE).bytes_per_s == pytest.approx(6e6)


def test_noise_gives_no_negative_figures() -> None:
    found = link_of({4_096: 2e-3, 2**21: 1e-3}, 2, FREE)
    assert found.latency_s >= 0
    assert found.bytes_per_s > 0


def test_seconds_are_latency_and_bytes_and_coding() -> None:
    """At 1 MB/s, with 10 ms a message and 1 us an element to code."""
    on = link(1, dict.fromkeys(FORMS, 1e-6), latency_s=0.01)
    shapes = [MATRIX, VECTOR]
    assert seconds_of("whole", shapes, on, 2) == pytest.approx(0.01 + 4.004)
    # The vector is summed by itself: 10 ms and 4,000 bytes.
    rest_s = 0.01 + 0.004
    assert seconds_of("bfloat16", shapes, on, 2) == pytest.approx(rest_s + 0.02 + 2 + 1)
    # Blocks of 256: 1,954 of them in each half, with a scale of 4 bytes.
    assert seconds_of("int8", shapes, on, 2) == pytest.approx(rest_s + 0.02 + 2 * 0.508040 + 1)
    assert seconds_of("power_sgd", shapes, on, 2) == pytest.approx(rest_s + 0.02 + 0.032 + 1)
    assert seconds_of("top_k", shapes, on, 2) == pytest.approx(rest_s + 0.01 + 0.08 + 1)
    assert seconds_of("int8", [VECTOR], on, 2) == pytest.approx(rest_s)


@pytest.mark.parametrize(
    ("times_s", "expected"),
    [
        ((9, 8, 8, 8, 8), "whole"),
        ((9, 6, 5, 5, 5), "bfloat16"),
        ((9, 6, 4, 3, 3), "int8"),
        ((9, 9, 6, 5, 4), "top_k"),
        ((9, 5, 3, 1, 1), "power_sgd"),
        ((0, 1, 1, 1, 1), "whole"),
    ],
)
def test_a_more_lossy_form_must_save_a_third(times_s, expected) -> None:
    assert chosen_form(dict(zip(FORMS, times_s, strict=True))) == expected


def test_slow_links_are_worth_it_and_fast_ones_are_not() -> None:
    coding_s = dict.fromkeys(FORMS, 5e-9)
    (*_, slow) = advice_lines([MATRIX], link(1, coding_s), 2)
    (*_, fast) = advice_lines([MATRIX], link(5_000, coding_s), 2)
    assert slow.startswith('It would choose compression="power_sgd"')
    assert fast.startswith("It would send gradients whole")
    # Nothing of a layer's bias can be compressed.
    assert "whole" in advice_lines([VECTOR], link(1, coding_s), 2)[-1]


def test_advice_without_a_link_or_gradients() -> None:
    assert advice_lines([MATRIX], None, 2)[0].endswith("Nothing is measured in one process.")
    assert advice_lines([], link(1), 2)[-1] == "No gradients are summed."


@pytest.mark.slow
def test_coding_is_measured_for_each_form(monkeypatch) -> None:
    monkeypatch.setattr(compression_advice, "time", ticking())
    times_s = coding_times()
    assert set(times_s) == set(FORMS) - {"whole"}
    assert all(time_s > 0 and math.isfinite(time_s) for time_s in times_s.values())


def test_slowest_process_counts(monkeypatch) -> None:
    class Two:
        def exchange(self, name, value):
            own, coding_s = value
            other = {size: 10.0 + int(size) * 1e-3 for size in own}
            return [[own, coding_s], [other, dict.fromkeys(coding_s, 7.0)]]

        def return_to_step(self, number) -> None:
            assert number == 0

    topology = Topology(tuple(jax.devices()[:2]))
    assert measured_link(topology, None) is None  # a process by itself
    monkeypatch.setattr(compression_advice, "current_group", Two)
    monkeypatch.setattr(Topology, "spans_processes", True)
    monkeypatch.setattr(
        compression_advice,
        "measure_times",
        lambda topology, sizes: {"ring": dict.fromkeys(sizes, 1.0)},
    )
    found = measured_link(topology, None)
    assert found is not None
    assert found.latency_s == pytest.approx(10)
    assert found.bytes_per_s == pytest.approx(1e3)
    assert set(found.coding_s.values()) == {7.0}


def _training(compression: str | None) -> tuple[sg.Strategy, keras.Model, list[np.ndarray]]:
    ops = AutomaticOps(sg.CommunicationOptions(compression=compression), link=link(1))
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(64)])
        model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(8, 32)).astype("float32")
    model.fit(x, np.ones((8, 64), "float32"), batch_size=4, verbose=0)
    return strategy, model, model.get_weights()


@pytest.mark.parametrize("name", ["auto", pytest.param("AUTO", marks=pytest.mark.slow)])
def test_auto_says_and_changes_nothing(name, capsys) -> None:
    strategy, model, weights = _training(name)
    plain, same, wanted = _training(None)
    for one, other in zip(weights, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    assert strategy.cross_device_ops.compression is None
    described = strategy.describe(model)
    assert described.advice[-1].startswith("It would choose compression=")
    assert described.advice[-1] in str(described)
    assert described.transfers == plain.describe(same).transfers
    assert plain.describe(same).advice == []
    sg.collectives.explain(strategy)
    assert described.advice[-1] in capsys.readouterr().out


def test_auto_is_for_the_options_only() -> None:
    with pytest.raises(ValueError, match="CompressedAllReduce received compression='auto'"):
        sg.CompressedAllReduce("auto")
    with pytest.raises(ValueError, match="compression='auto' is not a known compression"):
        sg.local_updates.LocalSGD(compression="auto")
    strategy = sg.MultiWorkerMirroredStrategy(
        communication_options=sg.CommunicationOptions(compression="auto")
    )
    assert strategy.describe().advice[0].endswith("Nothing is measured in one process.")


# Communicators: a single replica, and a replica of a mesh.

STRATEGY = object()
VALUES = np.array([[1.0, 2.0], [3.0, 5.0], [7.0, 9.0]], np.float32)


@pytest.fixture
def sole() -> SoleCommunicator:
    return SoleCommunicator()


@pytest.fixture
def mesh() -> MeshCommunicator:
    return MeshCommunicator(ChosenAllReduce(ReplicaAxis(AXIS, NUM_REPLICAS)))


def test_both_are_communicators_of_a_number_of_replicas(sole, mesh) -> None:
    assert isinstance(sole, Communicator)
    assert isinstance(mesh, Communicator)
    assert (sole.num_replicas, mesh.num_replicas) == (1, 3)


@pytest.mark.parametrize("value", [2.5, np.float32(2.5), jnp.ones(2), jnp.ones(2, jnp.bfloat16)])
@pytest.mark.parametrize("op", list(ReduceOp))
def test_sole_replica_gets_its_own_floats_back(sole, op, value) -> None:
    assert sole.all_reduce(op, value) is value


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint8", "bool", "float32", "bfloat16"])
def test_sole_replica_gets_the_dtypes_that_several_get(sole, mesh, dtype) -> None:
    value = np.ones((3, 2), getattr(ml_dtypes, dtype, dtype))
    for op in ReduceOp:
        several = on_replicas(lambda x, op=op: mesh.all_reduce(op, x), value)
        alone = sole.all_reduce(op, jnp.asarray(value[0]))
        assert alone.dtype == several.dtype
        np.testing.assert_array_equal(alone.astype(jnp.float32), [1.0, 1.0])


def test_sole_replica_gathers_its_own_true_rows(sole) -> None:
    rows = np.arange(6).reshape(3, 2)
    np.testing.assert_array_equal(sole.all_gather(rows, 0, None), rows)
    np.testing.assert_array_equal(sole.all_gather(rows, 0, (2,)), rows[:2])
    np.testing.assert_array_equal(sole.all_gather(rows, 1, (1,)), rows[:, :1])


def test_sole_replica_merges_with_plain_values_and_results(sole) -> None:
    def merge(strategy, value, *, scale):
        assert strategy is STRATEGY
        assert value == 2.0
        return {"mirrored": Mirrored(scale * value), "plain": [value, None, "text"]}

    result = sole.merge(STRATEGY, merge, (2.0,), {"scale": 3.0})
    assert result == {"mirrored": 6.0, "plain": [2.0, None, "text"]}


def test_mesh_replica_reduces_and_gathers_over_its_axis(mesh) -> None:
    def step(value):
        return {
            "sum": mesh.all_reduce(ReduceOp.SUM, value),
            "mean": mesh.all_reduce(ReduceOp.MEAN, value),
            "all": mesh.all_gather(value, 0, None),
            "true": mesh.all_gather(value, 0, (1, 0, 2)),
        }

    result = on_replicas(step, VALUES)
    for replica in range(NUM_REPLICAS):
        np.testing.assert_allclose(result["sum"][replica], [11.0, 16.0])
        np.testing.assert_allclose(result["mean"][replica], [11.0 / 3, 16.0 / 3], rtol=1e-6)
        np.testing.assert_array_equal(result["all"][replica], [1, 2, 3, 5, 7, 9])
        np.testing.assert_array_equal(result["true"][replica], [1, 7, 9])


def test_mesh_replica_merges_with_views_of_its_arrays_and_everything_else_as_it_is(mesh) -> None:
    seen = []

    def merge(strategy, value, others, *, name):
        seen.append((strategy, others, name))
        assert isinstance(value, PerReplica)
        assert value.stacked is None
        return {"back": value, "mirrored": Mirrored(2 * value.local), "name": name}

    def step(value):
        result = mesh.merge(STRATEGY, merge, (value, [1.5, None]), {"name": "text"})
        assert result.pop("name") == "text"
        return result

    result = on_replicas(step, VALUES)
    assert seen == [(STRATEGY, [1.5, None], "text")]
    np.testing.assert_array_equal(result["back"], VALUES)
    np.testing.assert_array_equal(result["mirrored"], 2 * VALUES)


def test_mesh_replica_gets_its_part_of_a_per_replica_from_outside_the_step(mesh) -> None:
    outside = PerReplica(stacked=jnp.asarray([10.0, 20.0, 30.0]))

    def merge(_, value):
        assert value is outside
        return [value, outside]

    result = on_replicas(lambda _: mesh.merge(STRATEGY, merge, (outside,), {}), VALUES)
    np.testing.assert_array_equal(result, [[10, 20, 30]] * 2)


def test_mesh_replica_cannot_get_its_part_of_python_objects(mesh) -> None:
    objects = PerReplica(objects=("a", "b", "c"))
    words = r"merge_call returned PerReplica\[a \| b \| c\](?s:.)*config.run_eagerly"
    with pytest.raises(ValueError, match=words):
        on_replicas(lambda _: mesh.merge(STRATEGY, lambda _: objects, (), {}), VALUES)


def test_mesh_replicas_merge_under_a_transformation(mesh) -> None:
    """The derivative of the sum over replicas of x ** 2, each replica by its own x."""

    def step(value):
        def loss(x):
            return mesh.merge(
                STRATEGY,
                lambda _, view: Mirrored(mesh.all_reduce(ReduceOp.SUM, view.local)),
                (jnp.vdot(x, x),),
                {},
            )

        return jax.grad(loss)(value)

    np.testing.assert_allclose(on_replicas(step, VALUES), 3 * 2 * VALUES)


@pytest.mark.parametrize(("packs", "expected"), [(False, 3), (True, 1)])
def test_values_among_groups_are_packed_if_asked(packs, expected) -> None:
    axis = ReplicaAxis("row", 4)
    whole = MeshCommunicator(ChosenAllReduce(axis, packing=SizedPacks(100, 100)))
    parts = [np.arange(4.0 * size, dtype=np.float32).reshape(4, size) for size in (2, 3, 5)]

    def add(values):
        return whole.among(((0, 2), (1, 3)), packs=packs).all_reduce_many(ReduceOp.SUM, values)

    for part, total in zip(parts, on_axis(axis, add, parts), strict=True):
        np.testing.assert_array_equal(total, np.tile(part[:2] + part[2:], (2, 1)))
    program = jax.make_jaxpr(add, axis_env=[("row", 4)])([part[0] for part in parts])
    assert str(program).count("psum") == expected


# Packing of arrays into messages.


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 100), st.sampled_from("fi")), max_size=30),
    st.integers(1, 120),
    st.integers(1, 200),
)
def test_every_array_travels_once_and_no_pack_is_too_large(arrays, max_array, pack) -> None:
    sizes, kinds = [size for size, _ in arrays], [kind for _, kind in arrays]
    packs = SizedPacks(max_array, pack).packs(sizes, kinds)
    assert sorted(place for places in packs for place in places) == list(range(len(arrays)))
    for places in packs:
        assert len({kinds[place] for place in places}) == 1
        if len(places) > 1:
            assert all(sizes[place] <= max_array for place in places)
            assert sum(sizes[place] for place in places) <= pack


def test_many_small_arrays_of_a_kind_are_sent_alone() -> None:
    packing = SizedPacks(max_array_bytes=10, pack_bytes=100, max_num_arrays=2)
    sizes, kinds = [1, 2, 3, 4, 50, 5], ["f", "f", "i", "f", "i", "i"]
    assert sorted(packing.packs(sizes, kinds)) == [[0], [1], [2, 5], [3], [4]]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 100), st.sampled_from("fi")), max_size=30), st.integers(1, 5)
)
def test_numbered_packs_hold_neighbours_and_are_of_about_one_size(arrays, num_packs) -> None:
    sizes, kinds = [size for size, _ in arrays], [kind for _, kind in arrays]
    packs = NumberedPacks(num_packs).packs(sizes, kinds)
    assert sorted(place for places in packs for place in places) == list(range(len(arrays)))
    for kind in set(kinds):
        of_kind = [places for places in packs if kinds[places[0]] == kind]
        assert len(of_kind) <= num_packs
        assert [place for places in of_kind for place in places] == [
            place for place, other in enumerate(kinds) if other == kind
        ]
        share = sum(size for size, other in arrays if other == kind) / num_packs
        largest = max(size for size, other in arrays if other == kind)
        assert all(sum(sizes[place] for place in places) <= share + largest for places in of_kind)


@pytest.mark.parametrize(("packing", "count"), [(NO_PACKING, 4), (WITHIN_PROCESS, 2)])
def test_rules_in_use(packing, count) -> None:
    sizes = [4, 2**16, 8, 2**20]
    assert len(packing.packs(sizes, ["float32"] * 4)) == count


def test_choice_follows_the_platform_the_processes_and_the_option() -> None:
    assert packing_for("gpu", spans_processes=True, bytes_per_pack=100) == NO_PACKING
    assert packing_for("cpu", spans_processes=False, bytes_per_pack=100) == WITHIN_PROCESS
    assert packing_for("cpu", spans_processes=True, bytes_per_pack=100) == SizedPacks(100, 100)
    chosen = packing_for("cpu", spans_processes=True, bytes_per_pack=0)
    assert 2**16 < chosen.pack_bytes < 2**20


@pytest.mark.parametrize(
    ("latency_s", "byte_s", "expected"),
    [
        (1e-3, 1.7e-9, 2**18),  # loopback, where a sum takes its processors' time
        (5e-4, 8e-9, 2**18),  # 1 Gbit/s
        (5e-4, 8e-8, 2**18),  # 100 Mbit/s
        (0.1, 8e-9, 2**24),  # 1 Gbit/s, 50 ms
        (0.004, 8e-9, 2**24),
    ],
)
def test_packs_are_large_where_a_message_takes_long_by_itself(latency_s, byte_s, expected) -> None:
    times_s = {size: latency_s + byte_s * size for size in SIZES_BYTES}
    packing = packing_for("cpu", spans_processes=True, bytes_per_pack=0, times_s=times_s)
    assert packing == SizedPacks(expected, expected)
    asked = packing_for("cpu", spans_processes=True, bytes_per_pack=100, times_s=times_s)
    assert asked == SizedPacks(100, 100)


# All-reduce with bfloat16 messages: its error, its gradients and the size of its messages.


@pytest.mark.parametrize("count", [2, 3, 6])
def test_bfloat16_is_off_by_no_more_than_is_stated_and_the_same_everywhere(count) -> None:
    axis = AXES[count]
    rng = np.random.default_rng(0)
    parts = (rng.normal(size=(count, 1001)) * 10.0 ** rng.integers(-3, 4, 1001)).astype(np.float32)
    reduction = ChosenAllReduce(axis, packing=NumberedPacks(1), in_bfloat16=True)
    got = on_axis(axis, lambda part: reduction.many(ReduceOp.SUM, [part])[0], parts)
    np.testing.assert_array_equal(got, [got[0]] * count)
    exact = parts.astype(np.float64)
    bound = 2.0**-8 * (np.abs(exact).sum(0) + np.abs(exact.sum(0)))
    error = np.abs(got[0] - exact.sum(0))
    assert np.all(error <= bound * 1.01)
    assert error.max() > 0
    at_hand = reduction.parts(ReduceOp.SUM, list(parts), are_gradients=True)
    np.testing.assert_array_equal(at_hand, got[0])


def test_bfloat16_is_for_gradients_of_float32_and_halves_their_messages() -> None:
    reduction = ChosenAllReduce(AXES[2], in_bfloat16=True)
    parts = np.array([[1.0], [2.0**-10]], np.float32)
    single = on_axis(AXES[2], lambda part: reduction.one(ReduceOp.SUM, part), parts)
    np.testing.assert_array_equal(single, [[1.0 + 2.0**-10]] * 2)
    assert float(reduction.parts(ReduceOp.SUM, list(parts), are_gradients=False)[0]) > 1
    assert messages(reduction, np.ones(3, np.int32)) == ["psum"]
    assert messages(reduction, np.ones(3, np.float32)) == ["all_to_all", "all_gather"]
    mesh = Mesh(np.array(jax.devices()[:2]), ("row",))
    spec = PartitionSpec("row")
    mapped = jax.shard_map(
        lambda part: reduction.many(ReduceOp.SUM, [part[0]])[0][None],
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    text = jax.jit(mapped).lower(np.ones((2, 64), np.float32)).compile().as_text()
    sent = [line for line in text.splitlines() if " all-gather(" in line or " all-to-all(" in line]
    assert len(sent) == 2
    assert all("u16[" in line.split(" = ")[1].split("(%")[0] for line in sent)


def test_bfloat16_is_added_as_float32_where_replicas_have_several_devices() -> None:
    """Else XLA:CPU ends the process."""
    topology = Topology.of_groups([jax.devices()[:2], jax.devices()[2:4]])
    axis = ReplicaAxis.of(topology)
    assert axis.adds_wide
    assert not ReplicaAxis.of(Topology(tuple(jax.devices()[:2]))).adds_wide
    add = jax.shard_map(
        lambda x: ChosenAllReduce(axis).one(ReduceOp.SUM, x),
        mesh=topology.mesh,
        in_specs=PartitionSpec("replica"),
        out_specs=PartitionSpec(),
        axis_names={"replica"},
        check_vma=False,
    )
    parts = jnp.array([[1.0], [2.0**-8]], jnp.bfloat16)
    total = jax.jit(add)(parts)
    assert total.dtype == jnp.bfloat16
    assert float(total[0, 0]) == np.float32(1 + 2.0**-8).astype(ml_dtypes.bfloat16)


# Islands: their replicas, and sums between them of which each replica sends a part.

SHAPES = [(5, 3), (), (8,), (0,)]  # of a size that islands do not divide, too


def test_members_are_consecutive_and_peers_have_one_place() -> None:
    islands = Islands(6, 2)
    assert islands.count == 3
    assert islands.members == ((0, 1), (2, 3), (4, 5))
    assert islands.peers == ((0, 2, 4), (1, 3, 5))


@pytest.mark.parametrize("packing", [NO_PACKING, SizedPacks(40, 40)])
@pytest.mark.parametrize(("count", "size"), [(4, 2), (6, 2), (6, 3), (3, 1), (4, 4)])
def test_sums_are_those_of_one_array_per_island(count, size, packing) -> None:
    axis, islands = ReplicaAxis("row", count), Islands(count, size)
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(islands.count, *shape)).astype("float32") for shape in SHAPES]
    own = [np.repeat(array, size, 0) for array in arrays]  # equal on the replicas of an island

    def replica(*values):
        communicator = MeshCommunicator(ChosenAllReduce(axis, packing=packing))
        sums = IslandSums(islands, communicator, jax.lax.axis_index("row"))

        def add(parts):
            return sums.between.all_reduce_many(ReduceOp.SUM, parts)

        return sums.by_parts(add, values), sums.sent_equal(values[0]), sums.island_id

    totals, of_place, ids = on_axis(axis, replica, *own)
    for total, array in zip(totals, arrays, strict=True):
        np.testing.assert_array_equal(total, np.broadcast_to(total[0], total.shape))
        np.testing.assert_allclose(total[0], array.sum(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(of_place, own[0])
    np.testing.assert_array_equal(ids, np.arange(count) // size)


def test_part_of_an_array_is_sent_between_islands() -> None:
    """A link between islands carries an array once, whatever the replicas of an island."""
    axis, islands = ReplicaAxis("row", 4), Islands(4, 2)
    sizes = []

    def replica(value):
        communicator = MeshCommunicator(ChosenAllReduce(axis))
        sums = IslandSums(islands, communicator, jax.lax.axis_index("row"))

        def add(parts):
            sizes.append([part.size for part in parts])
            return sums.between.all_reduce_many(ReduceOp.SUM, parts)

        return sums.by_parts(add, [value])

    on_axis(axis, replica, np.ones((4, 10), np.float32))
    assert sizes == [[5]]
