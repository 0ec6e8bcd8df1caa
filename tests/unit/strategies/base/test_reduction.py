"""reduce and gather of one value, against NumPy over all its parts."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices.mesh import Topology
from stratagem.errors import InvalidArgumentError
from stratagem.options import ReduceOp
from stratagem.strategies.base import reduction
from stratagem.variables.distributed import Mirrored, PerReplica
from stratagem.variables.regrouping import regroup

TOPOLOGY = Topology(tuple(jax.devices()[:3]))
SUM, MEAN = ReduceOp.SUM, ReduceOp.MEAN


def per_replica(parts):
    return regroup([jnp.asarray(part) for part in parts], TOPOLOGY)


def reduce(op, value, axes, num_replicas=3):
    return reduction.reduce(op, value, axes, num_replicas=num_replicas)


def random_parts(*shapes):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype("float32") for shape in shapes]


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 3, 2)], ids=str)
def test_over_replicas_only(shape, tolerance) -> None:
    parts = random_parts(*[shape] * 3)
    value = per_replica(parts)
    for op, reduced in ((SUM, np.sum), (MEAN, np.mean)):
        got = reduce(op, value, None)
        np.testing.assert_allclose(got, reduced(parts, axis=0), **tolerance("float32"))
        assert len(got.sharding.device_set) == 1


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 1), (0, 2), (-1,), (0, 1, 2)], ids=str)
def test_over_axes_too(axes, tolerance) -> None:
    parts = random_parts(*[(2, 3, 4)] * 3)
    whole = np.stack(parts)
    over = (0, *(axis % 3 + 1 for axis in axes))
    for op, reduced in ((SUM, np.sum), (MEAN, np.mean)):
        got = reduce(op, per_replica(parts), axes)
        np.testing.assert_allclose(got, reduced(whole, axis=over), **tolerance("float32"))


@pytest.mark.parametrize("lengths", [(2, 2, 1), (3, 0, 0), (0, 1, 2), (1, 4, 2)], ids=str)
def test_parts_of_unequal_length(lengths, tolerance) -> None:
    parts = random_parts(*[(length, 2) for length in lengths])
    value = per_replica(parts)
    assert value.lengths == lengths
    whole = np.concatenate(parts)
    for axes, over in (((0,), 0), ((0, 1), None)):
        for op, reduced in ((SUM, np.sum), (MEAN, np.mean)):
            got = reduce(op, value, axes)
            np.testing.assert_allclose(got, reduced(whole, axis=over), **tolerance("float32"))
    np.testing.assert_array_equal(reduction.gather(value, 0, num_replicas=3), whole)


def test_axes_that_leave_the_unequal_one_are_refused() -> None:
    value = per_replica(random_parts((2, 3), (1, 3), (2, 3)))
    with pytest.raises(InvalidArgumentError, match=r"reduce with axis=\(1,\) received parts"):
        reduce(SUM, value, (1,))
    with pytest.raises(InvalidArgumentError, match="reduce with axis=None received parts"):
        reduce(MEAN, value, None)


def test_parts_that_differ_in_other_axes_can_be_reduced_over_these(tolerance) -> None:
    parts = random_parts((2, 1), (2, 3), (2, 2))
    value = per_replica(parts)
    assert value.objects is not None
    for op, reduced in ((SUM, np.sum), (MEAN, np.mean)):
        got = reduce(op, value, (1,))
        expected = reduced(np.concatenate(parts, axis=1), axis=1)
        np.testing.assert_allclose(got, expected, **tolerance("float32"))


@pytest.mark.parametrize(
    ("dtype", "of_sum", "of_mean"),
    [
        ("bool", "int32", "float32"),
        ("int8", "int8", "float32"),
        ("int32", "int32", "float32"),
        ("uint32", "uint32", "float32"),
        ("float16", "float16", "float16"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("complex64", "complex64", "complex64"),
    ],
)
@pytest.mark.parametrize("axes", [None, (0,)], ids=str)
def test_sum_keeps_the_dtype_and_mean_of_integers_is_a_float(dtype, of_sum, of_mean, axes) -> None:
    value = per_replica([jnp.array([1, 0, 1], dtype)] * 3)
    total, mean = reduce(SUM, value, axes), reduce(MEAN, value, axes)
    assert (total.dtype.name, mean.dtype.name) == (of_sum, of_mean)
    wanted = (6, 2 / 3) if axes else ([3, 0, 3], [1, 0, 1])
    np.testing.assert_allclose(np.asarray(total, "complex64"), wanted[0], rtol=1e-2)
    np.testing.assert_allclose(np.asarray(mean, "complex64"), wanted[1], rtol=1e-2)


def test_nothing_at_all_has_sum_zero_and_no_mean() -> None:
    value = per_replica([np.zeros((0, 2), "float32")] * 3)
    np.testing.assert_array_equal(reduce(SUM, value, (0,)), [0.0, 0.0])
    assert np.isnan(reduce(MEAN, value, (0,))).all()


def test_mirrored_and_plain_values_stand_for_themselves() -> None:
    for plain in (jnp.array([2.0, 4.0]), Mirrored(jnp.array([2.0, 4.0])), np.array([2.0, 4.0])):
        np.testing.assert_array_equal(reduce(MEAN, plain, None), [2.0, 4.0])
        assert float(reduce(MEAN, plain, (0,))) == 3.0
        with pytest.raises(ValueError, match=r"(?s)plain value .* to SUM over 3 replicas.*mean"):
            reduce(SUM, plain, (0,))
        np.testing.assert_array_equal(reduce(SUM, plain, None, num_replicas=1), [2.0, 4.0])


@pytest.mark.parametrize("value", [per_replica([1.0, 2.0, 3.0]), 4.0, Mirrored(4.0)], ids=str)
def test_scalar_has_no_axis(value) -> None:
    with pytest.raises(ValueError, match=r"reduce received a scalar and axis=0"):
        reduce(MEAN, value, (0,))


@pytest.mark.parametrize(
    ("axis", "axes"),
    [(None, None), (0, (0,)), (-1, (-1,)), ([0, 1], (0, 1)), ((), ()), ((0,), (0,))],
    ids=str,
)
def test_axes_are_read(axis, axes) -> None:
    assert reduction.parse_axes(axis) == axes


@pytest.mark.parametrize("axis", [1.0, "0", True, [None], (0, 1.0), {0}], ids=repr)
def test_axes_of_another_type_are_refused(axis) -> None:
    with pytest.raises(TypeError, match=r"(?s)reduce received axis=.*None, an int, or a tuple"):
        reduction.parse_axes(axis)


def test_repeated_axis_is_refused() -> None:
    value = per_replica(np.arange(6.0, dtype="float32").reshape(3, 2))
    with pytest.raises(ValueError, match=r"more than once|[Dd]uplicate"):
        reduce(MEAN, value, (0, -1))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather_is_concatenation(axis) -> None:
    parts = random_parts((2, 3), (2, 3), (2, 3))
    got = reduction.gather(per_replica(parts), axis, num_replicas=3)
    np.testing.assert_array_equal(got, np.concatenate(parts, axis=axis))
    assert len(got.sharding.device_set) == 1


def test_gather_takes_parts_that_differ_along_its_axis_only() -> None:
    parts = random_parts((2, 1), (2, 3), (2, 2))
    got = reduction.gather(per_replica(parts), 1, num_replicas=3)
    np.testing.assert_array_equal(got, np.concatenate(parts, axis=1))
    with pytest.raises(InvalidArgumentError, match=r"gather along axis 0 .*received parts"):
        reduction.gather(per_replica(parts), 0, num_replicas=3)


@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16", "complex64"])
def test_gather_keeps_the_dtype(dtype) -> None:
    got = reduction.gather(per_replica([jnp.array([1, 0], dtype)] * 3), 0, num_replicas=3)
    assert got.dtype == jnp.dtype(dtype)
    assert got.shape == (6,)


def test_gather_leaves_plain_values() -> None:
    array = jnp.ones(3)
    assert reduction.gather(array, 0, num_replicas=3) is array
    assert reduction.gather(Mirrored(array), 0, num_replicas=3) is array


def test_part_of_a_compiled_step_outside_merge_call_is_refused() -> None:
    leaked = PerReplica(local=jnp.ones(2))
    for use in (
        lambda: reduce(SUM, leaked, None),
        lambda: reduction.gather(leaked, 0, num_replicas=3),
    ):
        with pytest.raises(ValueError, match="of a compiled step was used outside merge_call"):
            use()
    with pytest.raises(ValueError, match="belongs to a compiled step"):
        sg.MirroredStrategy(["cpu:0", "cpu:1"]).local_results(leaked)


@pytest.fixture(params=[(1, False), (2, False), (2, True)])
def strategy_of_keys(request):
    count, eagerly = request.param
    sg.config.run_eagerly(eagerly)
    yield sg.MirroredStrategy([f"cpu:{index}" for index in range(count)])
    sg.config.run_eagerly(False)


def _bits(keys) -> list[object]:
    return jax.random.key_data(keys).tolist()


def test_mean_of_one_key_on_all_replicas_is_that_key(strategy_of_keys) -> None:
    strategy, keys = strategy_of_keys, jax.random.split(jax.random.key(3), 2)
    state = strategy.run(lambda keys: {"w": jax.numpy.ones(()), "keys": keys}, args=(keys,))
    mean = strategy.reduce("MEAN", state, axis=None)
    assert (float(mean["w"]), _bits(mean["keys"])) == (1.0, _bits(keys))


@pytest.mark.slow
def test_keys_are_gathered(strategy_of_keys) -> None:
    strategy, keys = strategy_of_keys, jax.random.split(jax.random.key(3), 2)
    count = strategy.num_replicas_in_sync
    gathered = strategy.gather(strategy.run(lambda keys: keys, args=(keys,)), axis=-1)
    assert _bits(gathered) == count * _bits(keys)
    inside = strategy.run(lambda k: sg.get_replica_context().all_gather(k, axis=0), args=(keys,))
    assert _bits(strategy.local_results(inside)[-1]) == count * _bits(keys)


def test_keys_are_not_added_up(strategy_of_keys) -> None:
    strategy, key = strategy_of_keys, jax.random.key(3)
    with pytest.raises(TypeError, match="reduce received random keys, which cannot be added"):
        strategy.reduce("MEAN", strategy.run(lambda: key[None]), axis=0)
    with pytest.raises(TypeError, match="all_reduce received random keys, which cannot be added"):
        strategy.run(lambda: sg.get_replica_context().all_reduce("SUM", key))


def test_keys_that_differ_have_no_mean() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    keys = strategy.distribute_values_from_function(
        lambda context: jax.random.key(context.replica_id_in_sync_group)
    )
    with pytest.raises(TypeError, match="reduce received random keys, which cannot be added"):
        strategy.reduce("MEAN", keys, axis=None)


def test_parts_of_a_replica_of_several_processes_count_once(monkeypatch) -> None:
    """Each of two replicas has two processes, and parts of unlike shapes are exchanged."""
    received = [[np.zeros((2, 1))], [np.zeros((2, 1))], [np.ones((1, 3))], [np.ones((1, 3))]]
    group = types.SimpleNamespace(exchange=lambda name, own: received)
    monkeypatch.setattr(reduction, "current_group", lambda: group)
    value = reduction.of_all(PerReplica(objects=(received[0][0],)), num_replicas=2)
    assert [part.shape for part in value.components] == [(2, 1), (1, 3)]
