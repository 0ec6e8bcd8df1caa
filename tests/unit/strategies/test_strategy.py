"""Cross-device ops: built in and of one's own, inside and outside of steps."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices import all_reduce
from stratagem.devices.finding import find_devices
from stratagem.devices.mesh import Topology
from stratagem.keras.training.model import lower_training_step
from stratagem.strategies.mirrored import CompileOnlyStrategy
from stratagem.strategies.self_description import (
    DescribedDevice,
    StoredVariableSize,
    StrategyDescription,
)
from stratagem.strategies.strategy import Strategy
from tests.parity.comparison import (
    Scope,
    carried_out,
    differences,
    fitted,
    regression,
    small_regressor,
)
from tests.unit.test_rendering import require_plain

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


def trained(strategy: Any, *, eagerly: bool = False) -> dict[str, Any]:
    def job(scope: Scope) -> dict[str, Any]:
        with scope():
            model = small_regressor()
            model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=eagerly)
        return fitted(model, *regression(22), batch_size=8)

    return carried_out(job, strategy.scope)


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return trained(sg.OneDeviceStrategy("cpu:0"))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(BUILT_IN))
def test_training_by_every_op_gives_the_weights_of_one_device(name, expected) -> None:
    strategy = sg.MirroredStrategy(FOUR, cross_device_ops=BUILT_IN[name])
    assert differences(trained(strategy), expected) == []


@pytest.mark.slow
@pytest.mark.parametrize("eagerly", [False, True])
def test_ops_of_ones_own_get_the_gradients_of_all_replicas(eagerly, expected) -> None:
    ops = Recording()
    got = trained(sg.MirroredStrategy(FOUR, cross_device_ops=ops), eagerly=eagerly)
    assert ("SUM", 4) in ops.calls
    assert differences(got, expected) == []


@pytest.mark.slow
def test_many_values_come_to_batch_reduce_together() -> None:
    batches = []

    class Batching(Recording):
        def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
            batches.append(len(value_destination_pairs))
            return super().batch_reduce_implementation(reduce_op, value_destination_pairs, options)

    trained(sg.MirroredStrategy(FOUR, cross_device_ops=Batching()))
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

    with strategy.scope():
        assigned = sg.Variable(0.0)

    def assign(total: Any) -> None:  # where replicas must agree
        assigned.assign(sg.get_replica_context().all_reduce("sum", total))

    own, total, mean, merged = strategy.run(step)
    strategy.run(assign, args=(own,))
    assert float(assigned) == 6.0
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
    broadcast = sg.RingAllReduce().broadcast(jnp.ones(2), "cpu:0")
    assert isinstance(broadcast, sg.Mirrored)
    assert sg.RingAllReduce().broadcast(broadcast, broadcast) is broadcast


@pytest.mark.parametrize("num_packs", [-1, 1.5, True, "1"])
def test_bad_numbers_of_packs_are_refused(num_packs) -> None:
    error = ValueError if num_packs == -1 else TypeError
    with pytest.raises(error, match="received num_packs="):
        sg.RingAllReduce(num_packs)
    assert repr(sg.NcclAllReduce(2)) == "NcclAllReduce(num_packs=2)"


def test_nccl_is_for_gpus_only() -> None:
    with pytest.raises(ValueError, match="NcclAllReduce was given for devices of platform 'cpu'"):
        sg.MirroredStrategy(FOUR, cross_device_ops=sg.NcclAllReduce())


@pytest.mark.parametrize("destinations", [None, "", [], (), [1], 3])
def test_bad_destinations_are_refused(destinations) -> None:
    ops = sg.ReductionToOneDevice()
    with pytest.raises(ValueError, match="Expected a variable, a distributed value"):
        ops.reduce("sum", 1.0, destinations)
    with pytest.raises(ValueError, match="destinations="):
        ops.batch_reduce("sum", [(1.0, destinations)])
    with pytest.raises(ValueError, match="destinations="):
        ops.broadcast(1.0, destinations)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sg.ReductionToOneDevice("cpu:99"), "cpu:99"),
        (lambda: sg.RingAllReduce().reduce("sum", 1.0, "cpu:99"), "cpu:99"),
        (lambda: sg.RingAllReduce().reduce("sum", None, "cpu:0"), "for a value"),
        (
            lambda: sg.RingAllReduce().reduce("sum", sg.PerReplica(objects=()), "cpu:0"),
            "for a value",
        ),
        *[
            (lambda pair=pair: sg.RingAllReduce().batch_reduce("sum", [pair]), "among its pairs")
            for pair in (1.0, (1.0,), (1.0, "cpu:0", 2))
        ],
    ],
    ids=range(7),
)
def test_other_values_and_devices_are_refused(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# Sums over replicas of several slices: only one stage crosses the slow network.

_REDUCTION = re.compile(
    r'"stablehlo\.(\w+)".*?replica_groups = dense<(.*?)>.*?\}\) : \(tensor<(.*?)xf32>', re.DOTALL
)


@pytest.fixture
def two_slices(monkeypatch) -> None:
    """CPU devices with even numbers form one slice, the others another."""
    monkeypatch.setattr(all_reduce, "num_slices", lambda _: 2)
    monkeypatch.setattr(all_reduce, "slice_of", lambda device: device.id % 2)


@pytest.mark.usefixtures("two_slices")
def test_only_a_part_of_each_gradient_leaves_its_slice() -> None:
    ops = sg.HierarchicalCopyAllReduce(num_packs=0)
    four = ops.communicator(Topology(tuple(jax.devices()[:4])))
    assert four.axis.groups == ((0, 2), (1, 3))
    with CompileOnlyStrategy(jax.devices()[:8], ops).scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, use_bias=False)])
        model.compile("sgd", "mse")
    batch = [jax.ShapeDtypeStruct((8, size), "float32") for size in (64, 32)]
    text = lower_training_step(model, batch).as_text()
    inside = np.array([[0, 2, 4, 6], [1, 3, 5, 7]])
    assert _REDUCTION.findall(text) == [
        ("reduce_scatter", str(inside.tolist()), "4x512"),
        ("all_reduce", str(inside.T.tolist()), "512"),
    ]
    gathered = re.search(r'"stablehlo\.all_gather".*?replica_groups = dense<(.*?)>', text)
    assert gathered is not None
    assert gathered[1] == str(inside.tolist())


# A description as text, HTML and numbers.


def _description(num_variables: int = 2, num_devices: int = 2) -> StrategyDescription:
    names = [f"cpu:{index}" for index in range(num_devices)]
    variables = [
        StoredVariableSize(
            f"<{n}>/kernel[0]", (n, 4), "float32", "copy per replica", 16 * n, {names[0]: 16 * n}
        )
        for n in range(1, num_variables + 1)
    ]
    total = sum(one.num_bytes for one in variables)
    return StrategyDescription(
        title="Some(<devices>)",
        num_replicas=num_devices,
        devices=[
            DescribedDevice(name, index, total if not index else 0)
            for index, name in enumerate(names)
        ],
        variables=variables,
        programs={"fit": 1, "step": 12},
    )


def test_text_has_every_number_and_many_rows_are_left_out_and_counted() -> None:
    described = _description()
    lines = [line.split() for line in str(described).splitlines()]
    for row in (["cpu:0", "0", "48", "B"], ["all", "48", "B"], ["fit", "1"], ["step", "12"]):
        assert row in lines
    texts = require_plain(described._repr_html_()).texts
    assert [texts.count(name) for name in ("cpu:0", "<2>/kernel[0]", "12")] == [1, 1, 1]
    described = _description(num_variables=1000, num_devices=100)
    lines = str(described).splitlines()
    assert len(lines) < 120
    assert lines.count("... 60 more") == lines.count("... 960 more") == 1
    assert any(line.startswith("<1000>/kernel[0]") for line in lines)  # the largest are shown
    assert described.variable_bytes == described.stored_bytes == 16 * 500_500


# The base class of strategies: its topology, and copies of subclasses.


def test_strategy_is_made_from_a_topology() -> None:
    with pytest.raises(TypeError, match=r"topology=\['cpu:0'\] is of type list"):
        Strategy(["cpu:0"])
    assert Strategy(Topology((jax.devices()[1],))).num_replicas_in_sync == 1


def test_a_deep_copy_keeps_what_a_subclass_added() -> None:
    class Named(sg.Strategy):
        def __init__(self) -> None:
            super().__init__(Topology(find_devices(["cpu:0"])))
            self.spare, self.notes = jax.devices("cpu")[1], ["first"]

    strategy = Named()
    copied = copy.deepcopy(strategy)
    assert copied.spare is strategy.spare
    assert copied.notes == ["first"]
    assert copied.notes is not strategy.notes
    assert copied.variables is not strategy.variables


def test_a_pickle_is_refused_with_what_to_send_instead() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        variable = sg.Variable(1.0)
    for one in (strategy, variable):
        with pytest.raises(
            TypeError, match=r"was pickled, alone or with a variable of it[^~]*Fix:"
        ):
            pickle.dumps(one)
    assert copy.deepcopy(strategy).num_replicas_in_sync == 2
