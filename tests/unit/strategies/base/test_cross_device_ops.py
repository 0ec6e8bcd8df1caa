"""Cross-device ops: built in and of one's own, inside and outside of steps."""

from __future__ import annotations

import copy

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg

FOUR = [f"cpu:{index}" for index in range(4)]
BUILT_IN = {
    "ring": sg.RingAllReduce(),
    "ring in three packs": sg.RingAllReduce(num_packs=3),
    "ring, nothing packed": sg.RingAllReduce(num_packs=0),
    "hierarchical": sg.HierarchicalCopyAllReduce(),
    "one device": sg.ReductionToOneDevice(),
    "one device, accumulating": sg.ReductionToOneDevice("cpu:0", accumulation_fn=sum),
}


class Recording(sg.CrossDeviceOps):
    """Adds, and notes what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        parts = per_replica_value.components
        self.calls.append((reduce_op.name, len(parts)))
        total = sum(jnp.asarray(np.asarray(p)) if not _is_traced(p) else p for p in parts)
        return total / len(parts) if reduce_op is sg.ReduceOp.MEAN else total


def _is_traced(value) -> bool:
    return isinstance(value, jax.core.Tracer)


def trained_weights(strategy, *, eagerly: bool = False) -> list[np.ndarray]:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(2)]
        )
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse", run_eagerly=eagerly)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(22, 6)).astype("float32"), rng.normal(size=(22, 2)).astype("float32")
    model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    return [np.asarray(variable.value) for variable in model.weights]


@pytest.fixture(scope="module")
def expected() -> list[np.ndarray]:
    """Plain Keras."""
    return trained_weights(sg.OneDeviceStrategy("cpu:0"))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(BUILT_IN))
def test_training_by_every_op_gives_the_weights_of_one_device(name, expected) -> None:
    strategy = sg.MirroredStrategy(FOUR, cross_device_ops=BUILT_IN[name])
    for got, wanted in zip(trained_weights(strategy), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", list(BUILT_IN))
def test_sum_by_every_op_may_be_assigned_where_replicas_must_agree(name) -> None:
    strategy = sg.MirroredStrategy(FOUR, cross_device_ops=BUILT_IN[name])
    with strategy.scope():
        total = sg.Variable(jnp.zeros(3))

    def step():
        context = sg.get_replica_context()
        own = jnp.full(3, context.replica_id_in_sync_group, "float32")
        total.assign(context.all_reduce("sum", own))

    strategy.run(step)
    np.testing.assert_array_equal(total.value, [6.0, 6.0, 6.0])


@pytest.mark.slow
@pytest.mark.parametrize("eagerly", [False, True])
def test_ops_of_ones_own_get_the_gradients_of_all_replicas(eagerly, expected) -> None:
    ops = Recording()
    got = trained_weights(sg.MirroredStrategy(FOUR, cross_device_ops=ops), eagerly=eagerly)
    assert ("SUM", 4) in ops.calls
    for one, wanted in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_many_values_come_to_batch_reduce_together() -> None:
    batches = []

    class Batching(Recording):
        def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
            batches.append(len(value_destination_pairs))
            return super().batch_reduce_implementation(reduce_op, value_destination_pairs, options)

    trained_weights(sg.MirroredStrategy(FOUR, cross_device_ops=Batching()))
    assert set(batches) == {4}  # two kernels and two biases


@pytest.mark.parametrize("name", list(BUILT_IN))
def test_sum_and_mean_of_replica_ids(name) -> None:
    """0, 1, 2, 3: 6 and 1.5, in a step, in merge_call and outside."""
    ops = BUILT_IN[name]
    strategy = sg.MirroredStrategy(FOUR, cross_device_ops=ops)

    def step():
        context = sg.get_replica_context()
        own = jnp.float32(context.replica_id_in_sync_group)
        merged = context.merge_call(lambda _, value: ops.reduce("mean", value, "cpu:0"), (own,))
        return own, context.all_reduce("sum", own), context.all_reduce("mean", own), merged

    own, total, mean, merged = strategy.run(step)
    assert [float(part) for part in strategy.local_results(total)] == [6.0] * 4
    assert [float(part) for part in strategy.local_results(mean)] == [1.5] * 4
    assert [float(part) for part in strategy.local_results(merged)] == [1.5] * 4
    for reduced, wanted in [
        (ops.reduce("SUM", own, own), 6.0),
        (ops.reduce(sg.ReduceOp.MEAN, own, jax.devices()[0]), 1.5),
        (strategy.extended.reduce_to("sum", own, "cpu:0"), 6.0),
        *zip(ops.batch_reduce("sum", [(own, "cpu:0"), (total, own)]), [6.0, 24.0], strict=True),
    ]:
        assert isinstance(reduced, sg.Mirrored)
        assert float(reduced) == wanted


def test_ops_of_ones_own_reduce_outside_of_steps_too() -> None:
    ops = Recording()
    strategy = sg.MirroredStrategy(FOUR, cross_device_ops=ops)
    own = strategy.run(lambda: sg.get_replica_context().replica_id_in_sync_group)
    assert int(strategy.extended.reduce_to("sum", own, "cpu:0")) == 6
    assert float(ops.batch_reduce("mean", [(own, "cpu:0")])[0]) == 1.5
    assert ops.calls == [("SUM", 4), ("MEAN", 4)]
    copied = copy.deepcopy(strategy)
    assert copied.cross_device_ops is ops


def test_values_of_unlike_shapes_are_added_at_hand() -> None:
    strategy = sg.MirroredStrategy(FOUR[:2])
    value = strategy.distribute_values_from_function(lambda context: np.float32(2.0))
    assert float(sg.RingAllReduce().reduce("sum", value, "cpu:0")) == 4.0
    assert float(sg.RingAllReduce().reduce("mean", 3.0, "cpu:0")) == 3.0
    accumulating = sg.ReductionToOneDevice(accumulation_fn=lambda parts: max(parts) * 10)
    assert float(accumulating.reduce("sum", value, "cpu:0")) == 20.0
    assert float(accumulating.reduce("mean", value, "cpu:0")) == 10.0


def test_broadcast_gives_a_mirrored_value() -> None:
    value = sg.RingAllReduce().broadcast(jnp.ones(2), "cpu:0")
    assert isinstance(value, sg.Mirrored)
    assert sg.RingAllReduce().broadcast(value, value) is value


OPS = [sg.RingAllReduce, sg.HierarchicalCopyAllReduce, sg.NcclAllReduce]


@pytest.mark.parametrize("cls", OPS)
@pytest.mark.parametrize("num_packs", [-1, 1.5, True, "1"])
def test_bad_numbers_of_packs_are_refused(cls, num_packs) -> None:
    with pytest.raises(ValueError, match="is no number of packs"):
        cls(num_packs)
    assert repr(cls(2)) == f"{cls.__name__}(num_packs=2)"


def test_nccl_is_for_gpus_only() -> None:
    with pytest.raises(ValueError, match="NcclAllReduce was given for devices of platform 'cpu'"):
        sg.MirroredStrategy(FOUR, cross_device_ops=sg.NcclAllReduce())


def test_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="cpu:99"):
        sg.ReductionToOneDevice("cpu:99")
    with pytest.raises(ValueError, match="cpu:99"):
        sg.RingAllReduce().reduce("sum", 1.0, "cpu:99")


@pytest.mark.parametrize("destinations", [None, "", [], (), [1], 3])
def test_bad_destinations_are_refused(destinations) -> None:
    ops = sg.ReductionToOneDevice()
    with pytest.raises(ValueError, match="Expected a variable, a distributed value"):
        ops.reduce("sum", 1.0, destinations)
    with pytest.raises(ValueError, match="destinations="):
        ops.batch_reduce("sum", [(1.0, destinations)])
    with pytest.raises(ValueError, match="destinations="):
        ops.broadcast(1.0, destinations)


@pytest.mark.parametrize("value", [None, sg.PerReplica(objects=())])
def test_missing_values_are_refused(value) -> None:
    with pytest.raises(ValueError, match="for a value"):
        sg.ReductionToOneDevice().reduce("sum", value, "cpu:0")


@pytest.mark.parametrize("pair", [1.0, (1.0,), (1.0, "cpu:0", 2)])
def test_what_is_no_pair_is_refused(pair) -> None:
    with pytest.raises(ValueError, match="among its pairs"):
        sg.ReductionToOneDevice().batch_reduce("sum", [pair])
