"""Plans of small models and steps, compared with arithmetic and with real programs."""

from __future__ import annotations

import dataclasses
import io
import json

import jax
import keras
import numpy as np
import pytest
from rich.console import Console

import stratagem as sg
from stratagem.logs import size_text
from stratagem.planning.result import (
    Plan,
    headline,
    show_plan,
    verdict,
)
from stratagem.planning.schedule import Reduction
from stratagem.planning.targets import parse_target
from tests.unit.test_rendering import require_plain

_WIDTHS = (64, 512, 10)
_NUM_PARAMETERS = 64 * 512 + 512 + 512 * 10 + 10
_BATCH = (np.ones((32, 64), "float32"), np.zeros(32, "int32"))


def _model(optimizer: str = "adam") -> keras.Model:
    model = keras.Sequential(
        [keras.Input(_WIDTHS[:1]), keras.layers.Dense(512, "relu"), keras.layers.Dense(10)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


@pytest.fixture(scope="module")
def plan() -> Plan:
    return sg.plan(_model, _BATCH, "4xH100")


def test_memory_of_variables_is_arithmetic(plan) -> None:
    assert plan.num_parameters == _NUM_PARAMETERS
    memory = plan.memory
    assert memory.parameters_bytes == memory.gradients_bytes == 4 * _NUM_PARAMETERS
    # Adam's two moments, its counter of steps and the learning rate.
    assert memory.optimizer_bytes == 2 * 4 * _NUM_PARAMETERS + 8
    # The totals and counts of the loss and of the accuracy.
    assert memory.other_state_bytes == 16
    assert memory.batch_bytes == memory.next_batch_bytes == 8 * (64 + 1) * 4


def test_messages_and_temporaries_are_the_compilers_that_stands_in(plan) -> None:
    """Gradients must be there, and with eight examples there is little besides."""
    memory = plan.memory
    assert 0.9 * memory.gradients_bytes < memory.temporary_bytes < 4 * memory.gradients_bytes
    assert memory.total_bytes == sum(size for _, size in memory.parts())
    assert plan.fits
    assert {one.kind for one in plan.reductions} == {"all-reduce"}
    assert plan.reduced_bytes == pytest.approx(4 * _NUM_PARAMETERS, rel=0.01)
    assert plan.hidden_share == 0  # of a program for CPUs that is not known
    assert not plan.is_scheduled
    assert plan.compiler == "cpu"
    assert any("jax-cuda12-pjrt" in note for note in plan.notes)
    # Its operations are not those of a GPU.
    assert (plan.num_launches, plan.step.launch_s) == (0, 0)
    assert [time.num_devices for time in plan.scaling] == [1, 2, 4]
    assert plan.step is plan.scaling[-1]
    assert plan.step.step_s > plan.scaling[0].step_s


def test_operations_are_those_of_two_dense_layers(plan) -> None:
    """Forward, and backward by the weights; by the input in the second layer only."""
    first, second = 2 * 8 * 64 * 512, 2 * 8 * 512 * 10
    assert plan.flops == {"float32": 2 * first + 3 * second}
    assert plan.products_s == pytest.approx((2 * first + 3 * second) / (494.7e12 / 2))


def test_step_on_other_sizes_of_machine(plan) -> None:
    """Sizes that the plan has, and 512 hosts of 8 by the formula of rings and halving."""
    assert [plan.step_on(size) for size in (1, 2, 4)] == list(plan.scaling)
    many = plan.step_on(4096)
    link, network, share = 450e9, 50e9, 0.8
    expected_s = sum(
        2 * (7 / 8 * size / link + 511 / 512 * size / 8 / network) / share
        + 2 * (7 * 2e-6 + 9 * 15e-6)
        for size in (one.num_bytes for one in plan.reductions)
    )
    assert many.num_devices == 4096
    assert many.compute_s == plan.step.compute_s
    assert many.reduction_s == pytest.approx(expected_s)
    steps = [plan.step_on(8 * 2**power) for power in range(10)]
    efficiencies = [step.efficiency for step in steps]
    assert efficiencies == sorted(efficiencies, reverse=True)


@pytest.mark.parametrize("num_devices", [0, -8, 12, 4095])
def test_step_on_machines_that_are_not_full(plan, num_devices) -> None:
    with pytest.raises(ValueError, match=f"num_devices={num_devices} does not fill hosts"):
        plan.step_on(num_devices)


def test_plan_is_json(plan) -> None:
    fields = json.loads(json.dumps(plan.to_dict()))
    assert (fields["target"], fields["num_devices"], fields["fits"]) == ("4xH100", 4, True)
    assert fields["memory"]["total_bytes"] == plan.memory.total_bytes
    assert fields["scaling"][-1]["step_s"] == plan.step.step_s
    assert (fields["global_batch"], fields["per_device_batch"]) == (32, 8)
    assert fields["assumptions"]["compute_share"] == 0.5
    assert fields["accelerator"]["name"] == "H100"
    refused = dataclasses.replace(plan, is_refused=True).to_dict()
    assert refused["is_refused_by_compiler"]
    assert "is_refused" not in refused


def test_plan_matches_the_real_step_and_the_model_is_unchanged() -> None:
    """The arrays that are on one of two CPU devices after `fit`."""
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    # The arrays themselves are kept: the id of one that went away would be given to a new one.
    before = jax.live_arrays()
    with strategy.scope():
        model = _model()
    model.fit(*_BATCH, batch_size=32, verbose=0)
    known = {id(array) for array in before}
    live = [array for array in jax.live_arrays() if id(array) not in known]
    shards = [shard for array in live for shard in array.addressable_shards]
    on_first = sum(shard.data.nbytes for shard in shards if shard.device.id == 0)
    weights = [np.asarray(variable.value) for variable in model.weights]
    memory = sg.plan(model, _BATCH, "4xH100").memory
    state = memory.parameters_bytes + memory.optimizer_bytes + memory.other_state_bytes
    assert on_first == pytest.approx(state, rel=0.05)
    assert model.distribute_strategy is strategy
    for value, variable in zip(weights, model.weights, strict=True):
        np.testing.assert_array_equal(value, variable.value)
    model.fit(*_BATCH, batch_size=32, verbose=0)
    assert int(model.optimizer.iterations.value) == 2


def test_model_of_no_strategy_on_one_device() -> None:
    model = _model("sgd")
    plan = sg.plan(model, _BATCH, "1xH100")
    assert plan.memory.optimizer_bytes == 8  # a counter and the learning rate
    assert plan.reductions == ()
    assert [time.step_s for time in plan.scaling] == [plan.products_s]
    assert not model.distribute_strategy.topology.is_abstract
    assert isinstance(model.weights[0].value, jax.Array)


def test_step_of_a_loop_of_ones_own() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        weights = sg.Variable(np.ones((64, 10), "float32"))
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build([weights])

    def step(images, labels):
        def loss_fn():
            logits = images @ weights.value
            per_example = keras.losses.sparse_categorical_crossentropy(
                labels, logits, from_logits=True
            )
            return sg.compute_average_loss(per_example)

        loss, gradients = sg.value_and_grad(loss_fn, [weights])
        optimizer.apply(gradients, [weights])
        return loss

    plan = sg.plan(step, _BATCH, "8xH100", strategy=strategy)
    assert (plan.title, plan.global_batch) == ("step", 32)
    assert plan.memory.parameters_bytes == 4 * 640
    assert plan.memory.optimizer_bytes == 4 * 640 + 8  # the momentum
    assert plan.flops == {"float32": 2 * 2 * 4 * 64 * 10}
    np.testing.assert_array_equal(weights.value, np.ones((64, 10)))  # and it has not run
    strategy.run(step, args=_BATCH)


def test_batch_of_shapes_and_more_devices_than_there_are_here() -> None:
    """The CPU compiler is given sixteen, whatever JAX has started with."""
    num_devices = len(jax.devices())
    shapes = tuple(jax.ShapeDtypeStruct((64, *a.shape[1:]), a.dtype) for a in _BATCH)
    plan = sg.plan(_model, shapes, "16xH100")
    assert (plan.target.num_devices, plan.per_device_batch) == (16, 4)
    assert len(jax.devices()) == num_devices < 16
    assert plan.memory.optimizer_bytes == 2 * 4 * _NUM_PARAMETERS + 8
    assert plan.reduced_bytes == pytest.approx(4 * _NUM_PARAMETERS, rel=0.01)


def test_large_model_takes_no_memory_here() -> None:
    """Its variables and Adam's would be 4.8 GB."""

    def build():
        ids = keras.Input((8,), dtype="int32")
        table = keras.layers.Embedding(10**6, 400)(ids)
        model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.GlobalMaxPool1D()(table)))
        model.compile("adam", "mse")
        return model

    before = sum(array.nbytes for array in jax.live_arrays())
    batch = (np.zeros((4, 8), "int32"), np.zeros((4, 1), "float32"))
    plan = sg.plan(build, batch, "2xH100")
    assert sum(array.nbytes for array in jax.live_arrays()) - before < 10**7
    assert plan.memory.parameters_bytes == 4 * (4 * 10**8 + 401)
    assert plan.memory.optimizer_bytes == 8 * (4 * 10**8 + 401) + 8


@pytest.mark.parametrize(
    ("what", "batch", "error", "message"),
    [
        (_model, [1], TypeError, "a tuple: .x, y. for a model"),
        (3, _BATCH, TypeError, "a compiled Keras model, a function that returns one"),
        (lambda: 3, _BATCH, TypeError, "The function passed to plan returned a int"),
        (lambda x, y: x, _BATCH, ValueError, "plan received a step without a strategy"),
        (lambda: keras.Sequential(), _BATCH, ValueError, "is not compiled with an optimizer"),
        (lambda: _frozen(), _BATCH, ValueError, "has no trainable variable"),
    ],
)
def test_what_cannot_be_planned(what, batch, error, message) -> None:
    with pytest.raises(error, match=message):
        sg.plan(what, batch, "2xH100")


def _frozen() -> keras.Model:
    model = _model()
    model.trainable = False
    return model


@pytest.mark.parametrize("kind", [sg.TPUStrategy, sg.MultiWorkerMirroredStrategy])
def test_sharded_tables_of_lockstep_strategies(kind, monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_TPU_PLATFORM", "cpu")

    def model() -> keras.Model:
        layers = [keras.Input((4,), dtype="int32"), keras.layers.Embedding(2**16, 8)]
        made = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(1)])
        made.compile("adagrad", "mse")
        return made

    strategy = kind(placement={"embeddings": "sharded"})
    shapes = jax.ShapeDtypeStruct((64, 4), "int32"), jax.ShapeDtypeStruct((64, 1), "float32")
    memory = sg.plan(model, shapes, "8xH100", strategy=strategy).memory
    assert memory.parameters_bytes == 4 * (2**16 * 8 / 8 + 4 * 8 + 1)


def test_model_of_parameter_servers() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = _model()
    strategy.executor.schedules = True  # as theirs do
    with pytest.raises(ValueError, match="a strategy whose replicas run in lockstep"):
        sg.plan(model, _BATCH, "2xH100")
    apart = sg.LocalUpdateStrategy(devices=["cpu:0", "cpu:1"])
    with pytest.raises(ValueError, match=r"no copy for each replica(?s:.)*makes and compiles"):
        sg.plan(_model(), _BATCH, "4xH100", strategy=apart)


def test_eager_steps_cannot_be_planned() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    sg.config.run_eagerly(True)
    try:
        with pytest.raises(ValueError, match="Cannot run a step op by op on"):
            sg.plan(lambda x, y: x.sum(), _BATCH, "2xH100", strategy=strategy)
    finally:
        sg.config.run_eagerly(False)


@pytest.mark.slow
def test_local_updates_send_in_one_of_many_steps() -> None:
    strategy = sg.LocalUpdateStrategy(sg.local_updates.DiLoCo(period=50), ["cpu:0", "cpu:1"])
    plan = sg.plan(_model, _BATCH, "4xH100", strategy=strategy)
    lockstep = sg.plan(_model, _BATCH, "4xH100")
    assert {one.times for one in plan.reductions} == {1 / 50}
    assert plan.reduced_bytes == round(4 * _NUM_PARAMETERS / 50)
    assert plan.step.reduction_s < lockstep.step.reduction_s / 25
    assert "every 50 steps" in str(plan)
    json.dumps(plan.to_dict())


# Tables of a plan.

_GIB = 2**30


@pytest.fixture(scope="module")
def report() -> Plan:
    def build():
        model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(256)])
        model.compile("adam", "mse")
        return model

    return sg.plan(build, (np.ones((8, 256)), np.ones((8, 256))), "2xH100")


def _with_temporaries(report: Plan, num_bytes: int, **fields) -> Plan:
    memory = dataclasses.replace(report.memory, temporary_bytes=num_bytes)
    return dataclasses.replace(report, memory=memory, **fields)


def _shown(report: Plan) -> str:
    text = io.StringIO()
    show_plan(report, Console(width=160, file=text))
    return text.getvalue()


def test_tables_have_the_figures_of_the_plan(report) -> None:
    text = _shown(report)
    assert f"{report.title} on 2xH100: 65.8 k parameters, global batch 8, 4 per device" in text
    assert size_text(report.memory.total_bytes) in text
    assert "all-reduce" in text
    assert "unknown" in text
    assert "0.5 of peak FLOP/s in matrix products" in text
    assert "pip install jax-cuda12-pjrt" in text


def test_kernel_starts_are_in_the_computing_time(report) -> None:
    assert "kernel starts" not in _shown(report)
    (first, *_) = report.scaling
    longer = dataclasses.replace(first, compute_s=1.5, launch_s=0.25)
    text = _shown(dataclasses.replace(report, num_launches=1234, scaling=(longer,)))
    assert "'compute' includes 1234 kernel starts per step, 250.0 ms." in text
    (row,) = [line for line in text.splitlines() if line.startswith("│       1 │")]
    assert "1.75 s" in row


def test_messages_are_listed_by_where_they_go(report) -> None:
    reductions = (
        Reduction("a", 4000, (), "reduce-scatter", ((0, 1, 2, 3), (4, 5, 6, 7))),
        Reduction("b", 1000, ("dot.1",), leaves_slice=True),
        Reduction("c", 8, (), groups=((0, 1, 2, 3, 4, 5, 6, 7),)),
    )
    two_slices = dataclasses.replace(
        report, target=parse_target("2xv5e:2x2"), reductions=reductions, is_scheduled=True
    )
    lines = _shown(two_slices).splitlines()
    (within,) = [line for line in lines if "reduce-scatter, within slices" in line]
    (between,) = [line for line in lines if "all-reduce, between slices" in line]
    assert "3.9 KiB" in within
    assert "100%" in between
    assert any("all-reduce, all devices" in line for line in lines)


@pytest.mark.parametrize(
    ("temporary_bytes", "fields", "text"),
    [
        (0, {}, "Fits: "),
        (70 * _GIB, {}, "Fits only with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95"),
        (90 * _GIB, {}, "Does not fit: 90.00 GiB"),
        (0, {"is_refused": True}, "Does not fit: the compiler rejects it"),
    ],
)
def test_verdict(report, temporary_bytes, fields, text) -> None:
    changed = _with_temporaries(report, temporary_bytes, **fields)
    assert verdict(changed).startswith(text)
    assert changed.fits == text.startswith("Fits: ")


def test_plan_that_does_not_fit_shows_sharded_sizes(report) -> None:
    """Adam's moments and the weights of 256 x 256 in halves; 4 * 256 + 16 bytes in copies."""
    assert "Sharded over" not in _shown(report)
    text = _shown(_with_temporaries(report, 90 * _GIB))
    weights = 4 * 256 * 256
    copied = size_text(report.memory.state_bytes)
    assert f"Variables take {copied} per device" in text
    halves = [report.memory.state_bytes - weights, report.memory.state_bytes - 3 * weights // 2]
    assert list(report.shared_state_bytes.values()) == halves
    told = " or ".join(
        f"{size_text(size)} (shard_state={name})"
        for name, size in zip(("optimizer", "all"), halves, strict=True)
    )
    assert told in text.replace("\n", " ")


def test_plan_prints_its_tables(report) -> None:
    text = str(report)
    for line in (headline(report), verdict(report), "Communication per step", "all-reduce"):
        assert line in text
    assert max(map(len, text.splitlines())) <= 120
    assert repr(report) == f"<Plan: {headline(report)}. {verdict(report)}>"
    texts = require_plain(report._repr_html_()).texts
    assert texts[:2] == [headline(report), verdict(report)]
    assert size_text(report.memory.total_bytes) in texts
    assert headline(dataclasses.replace(report, shard_state="all")).startswith(
        f"{report.title} on 2xH100, shard_state=all: 65.8 k parameters"
    )
    one = headline(dataclasses.replace(report, num_replicas=1))
    assert "1 replica of 2 devices: " in one
    assert one.endswith("8 per replica")
