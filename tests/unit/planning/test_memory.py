"""Plans with sharded state and with replicas of several devices, compared with real programs."""

from __future__ import annotations

import gc
import io
from typing import Any

import jax
import keras
import numpy as np
import pytest
from rich.console import Console

import stratagem as sg
from stratagem.devices.finding import planning_for
from stratagem.devices.mesh import Topology
from stratagem.keras.training.planned_models import training_step
from stratagem.planning.memory import device_bytes, step_programs
from stratagem.planning.result import Plan, show_plan
from stratagem.planning.targets import parse_target

_WIDTH, _HIDDEN, _CLASSES = 64, 512, 8
_BATCH = (np.ones((32, _WIDTH), "float32"), np.zeros(32, "int32"))
_KERNELS = _WIDTH * _HIDDEN + _HIDDEN * _CLASSES
_BIASES = _HIDDEN + _CLASSES
_LAYOUTS = {
    ".*hidden/kernel": (None, "logical"),
    ".*hidden/bias": ("logical",),
    ".*output/kernel": ("logical", None),
}


def _model() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((_WIDTH,)),
            keras.layers.Dense(_HIDDEN, "relu", name="hidden"),
            keras.layers.Dense(_CLASSES, name="output"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def _names(count: int) -> list[str]:
    return [f"cpu:{index}" for index in range(count)]


def _pairs(**options: Any) -> sg.MirroredStrategy:
    names = _names(4)
    return sg.MirroredStrategy([names[:2], names[2:]], **options)


def _sharing(shard_state: str, count: int) -> sg.MirroredStrategy:
    return sg.MirroredStrategy(_names(count), shard_state=shard_state)


def _divided() -> sg.MirroredStrategy:
    return _pairs(layout_map=_LAYOUTS)


def _trained_arrays(strategy: sg.Strategy) -> tuple[keras.Model, dict[int, int]]:
    """Bytes of all arrays that are there after `fit` and were not before, by device."""
    before = jax.live_arrays()  # kept themselves: an id of one that went would be given again
    with strategy.scope():
        model = _model()
    model.fit(*_BATCH, batch_size=32, verbose=0)
    gc.collect()  # arrays in cycles, such as whole ones that were divided
    known = {id(array) for array in before}
    live = [array for array in jax.live_arrays() if id(array) not in known]
    held: dict[int, int] = {}
    for shard in (shard for array in live for shard in array.addressable_shards):
        held[shard.device.id] = held.get(shard.device.id, 0) + shard.data.nbytes
    return model, held


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "target", "wanted"),
    [
        # Parameters; then Adam's moments, its counter and the learning rate.
        (("optimizer", 2), "2xH100", (4 * (_KERNELS + _BIASES), 8 * (_KERNELS / 2 + _BIASES) + 8)),
        (("all", 4), "4xH100", (_KERNELS + 4 * _BIASES, 2 * (_KERNELS + 4 * _BIASES) + 8)),
        (
            (),  # layouts: all but the last bias in halves
            "4xH100",
            (
                4 * ((_KERNELS + _HIDDEN) / 2 + _CLASSES),
                8 * ((_KERNELS + _HIDDEN) / 2 + _CLASSES) + 8,
            ),
        ),
    ],
)
def test_held_bytes_match_arithmetic_and_arrays_after_fit(strategy, target, wanted) -> None:
    model, held = _trained_arrays(_sharing(*strategy) if strategy else _divided())
    weights = [np.asarray(variable.value) for variable in model.weights]
    plan = sg.plan(model, _BATCH, target)  # like the strategy of the model
    memory = plan.memory
    assert (memory.parameters_bytes, memory.optimizer_bytes) == wanted
    assert memory.other_state_bytes == 16  # totals and counts of the loss and of the accuracy
    assert held.keys() == set(range(plan.target.num_devices))
    for on_device in held.values():
        assert on_device == pytest.approx(memory.state_bytes, rel=0.02)
    assert plan.shard_state == (strategy[0] if strategy else None)
    for value, variable in zip(weights, model.weights, strict=True):
        np.testing.assert_array_equal(value, variable.value)
    model.fit(*_BATCH, batch_size=32, verbose=0)
    assert int(model.optimizer.iterations.value) == 2


@pytest.fixture(scope="module")
def mirrored() -> Plan:
    return sg.plan(_model, _BATCH, "4xH100")


@pytest.mark.slow
@pytest.mark.parametrize("shard_state", ["optimizer", "all"])
def test_replicated_plan_shows_sharded_sizes(mirrored, shard_state) -> None:
    """For a model without a strategy, and for one created by a function."""
    plan = sg.plan(_model, _BATCH, "4xH100", shard_state=shard_state)
    of_model = sg.plan(_model(), _BATCH, "4xH100", shard_state=shard_state)
    assert plan.memory.state_bytes == mirrored.shared_state_bytes[shard_state]
    assert plan.memory == of_model.memory
    assert plan.shared_state_bytes == {}
    assert plan.memory.state_bytes < mirrored.memory.state_bytes
    assert plan.flops == mirrored.flops
    assert of_model.to_dict()["shard_state"] == shard_state
    assert plan.memory.total_bytes == sum(size for _, size in plan.memory.parts())


def test_all_parameters_are_gathered_and_gradients_are_summed() -> None:
    plan = sg.plan(_model, _BATCH, "4xH100", shard_state="all")
    sent: dict[str, int] = {}
    for one in plan.reductions:
        sent[one.kind] = sent.get(one.kind, 0) + one.num_bytes * one.times
    assert sent["all-gather"] >= 4 * _KERNELS
    gradients = sent.get("all-reduce", 0) + sent.get("reduce-scatter", 0)
    assert gradients == pytest.approx(4 * (_KERNELS + _BIASES), rel=0.01)
    # Gathered arrays and gradients coexist for a while.
    assert plan.memory.temporary_bytes > plan.memory.gradients_bytes


def test_replicas_of_several_devices_have_their_part_of_the_batch(mirrored) -> None:
    plan = sg.plan(_model, _BATCH, "4xH100", strategy=_divided())
    assert (plan.num_replicas, plan.devices_per_replica, plan.per_device_batch) == (2, 2, 16)
    assert plan.memory.batch_bytes == 2 * mirrored.memory.batch_bytes
    # Twice the examples, on two devices.
    assert plan.flops == mirrored.flops
    # From one replica on, whose devices exchange what its layers sum.
    assert [time.num_devices for time in plan.scaling] == [2, 4]
    inside, between = _by_size(plan)
    assert inside > 0
    halves = 4 * ((_KERNELS + _HIDDEN) / 2 + _CLASSES)
    assert between == pytest.approx(halves, rel=0.05)
    assert 0 < plan.scaling[0].reduction_s < plan.scaling[1].reduction_s
    assert any("the devices of a replica split its products evenly" in note for note in plan.notes)


def _by_size(plan: Plan) -> tuple[int, int]:
    """Bytes that are sent within replicas of adjacent_groups, and between these."""
    inside = between = 0
    for one in plan.reductions:
        if one.groups and one.groups[0] == (0, 1):
            inside += one.num_bytes * one.times
        else:
            between += one.num_bytes * one.times
    return inside, between


_NUM_ROWS, _ROW = 2**14, 32


def _table() -> keras.Model:
    ids = keras.Input((8,), dtype="int32")
    rows = keras.layers.Embedding(_NUM_ROWS, _ROW)(ids)
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.GlobalMaxPool1D()(rows)))
    model.compile("adagrad", "mse")
    return model


_IDS = (np.zeros((16, 8), "int32"), np.zeros((16, 1), "float32"))


def test_a_large_model_with_a_shared_table_takes_no_memory_here(monkeypatch) -> None:
    """Whether the table's optimizer leaves rows alone is tried without all that it keeps."""
    made: list[int] = []
    full = jax.numpy.full

    def counted(shape, *args, **kwargs):
        made.append(int(np.prod(shape)))
        return full(shape, *args, **kwargs)

    monkeypatch.setattr("stratagem.keras.numerics.optimizer.jnp.full", counted)
    plan = sg.plan(_table, _IDS, "2xH100", shard_state="all")
    assert max(made) == 1
    table = 4 * _NUM_ROWS * _ROW
    assert plan.memory.parameters_bytes == pytest.approx(table / 2, rel=0.001)
    assert plan.memory.optimizer_bytes == pytest.approx(table / 2, rel=0.001)
    assert plan.reduced_bytes < 0.05 * table  # only rows are gathered
    assert plan.memory.temporary_bytes < 1.1 * table


def test_only_variables_of_a_rule_are_sharded() -> None:
    strategy = sg.HybridStrategy(_names(2), placement={"embeddings": "sharded"})
    with strategy.scope():
        model = _table()
    plan = sg.plan(model, _IDS, "4xH100")
    kept = _NUM_ROWS * _ROW + 4 * (_ROW + 1)
    assert plan.memory.parameters_bytes == kept
    assert plan.memory.optimizer_bytes == kept + 8
    assert plan.shared_state_bytes == {}


def test_rule_for_nothing_is_reported() -> None:
    strategy = sg.HybridStrategy(_names(2), placement={"tables": "sharded"})
    with pytest.raises(ValueError, match="has rules that match no variable: 'tables'"):
        sg.plan(_table, _IDS, "2xH100", strategy=strategy)


def test_device_holds_only_the_host_variables_it_receives() -> None:
    strategy = sg.CentralStorageStrategy(_names(2))
    with strategy.scope():
        model = _model()
    plan = sg.plan(model, _BATCH, "2xH100")
    memory = plan.memory
    parameters = 4 * (_KERNELS + _BIASES)
    assert (memory.parameters_bytes, memory.optimizer_bytes) == (0, 0)
    # Weights and Adam's moments; gradients and what the update makes of them come and go.
    assert 3 * parameters + 16 <= memory.host_bytes - parameters < 6 * parameters
    assert plan.from_host_bytes == pytest.approx(parameters, rel=0.001)
    assert plan.to_host_bytes == pytest.approx(parameters, rel=0.001)
    assert memory.temporary_bytes > 2 * parameters
    assert plan.shared_state_bytes == {}


@pytest.mark.parametrize(
    ("count", "target"), [(2, "2xH100"), pytest.param(1, "16xH100", marks=pytest.mark.slow)]
)
def test_device_copies_its_shard_of_pinned_variables(count, target) -> None:
    """Also on more devices than there are here."""
    strategy = sg.CentralStorageStrategy(_names(count), "pinned_host")
    with strategy.scope():
        model = _model()
    plan = sg.plan(model, _BATCH, target)
    kernels, num_devices = 4 * _KERNELS, plan.target.num_devices
    assert plan.memory.parameters_bytes == 4 * _BIASES
    assert plan.memory.optimizer_bytes == 8 * _BIASES + 8
    assert plan.memory.host_bytes == 3 * kernels
    assert plan.brought_bytes == plan.put_back_bytes == 3 * kernels // num_devices
    assert (plan.from_host_bytes, plan.to_host_bytes) == (0, 0)
    # Gathered arrays, or gradients; a full copy would be three times as large.
    assert plan.memory.total_bytes < 2.5 * kernels
    text = io.StringIO()
    show_plan(plan, Console(file=text, width=400))
    assert "host memory for variables" in text.getvalue()
    assert "per device from pinned host memory" in text.getvalue()


def test_a_table_on_the_host_gives_rows() -> None:
    strategy = sg.HybridStrategy(_names(2), placement={"embeddings": "central"})
    plan = sg.plan(_table, _IDS, "2xH100", strategy=strategy)
    table, rows = 4 * _NUM_ROWS * _ROW, 8 * 8 * _ROW * 4
    assert plan.memory.parameters_bytes == 4 * (_ROW + 1)
    assert 2 * table <= plan.memory.host_bytes
    assert plan.from_host_bytes == rows
    assert plan.memory.total_bytes < 0.2 * table


def test_program_of_a_step_with_a_shared_table() -> None:
    """It is lowered from where its arguments lie on other devices; variables stay."""
    with planning_for(parse_target("2xH100").topology):
        planned = sg.MirroredStrategy(shard_state="all")
    with planned.scope():
        model = _table()
    devices = Topology(tuple(jax.devices()[:2]))
    with training_step(model, _IDS, planned) as step, step_programs(step, devices) as programs:
        assert [one.name for one in programs] == ["replicas"]
        (program,) = programs
        text = program.function.lower(*program.shapes).as_text()
    assert {one.store.topology for one in model.weights if one.store} == {planned.topology}
    assert "all_gather" in text  # the ids: rows are exchanged within
    halves = 4 * _NUM_ROWS * _ROW // 2
    sizes = sorted(map(device_bytes, program.lasting))
    assert sizes[-2:] == [halves, halves]  # the table and what Adagrad keeps
    assert sum(sizes[:-2]) < 2000 + 8 * 8 * 4  # of the batch a part
