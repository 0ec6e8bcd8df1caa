"""Training steps captured from unmodified scripts."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem import planning
from stratagem.devices.finding import planning_for
from stratagem.execution.tracing.functionalize import CapturedStep
from stratagem.planning import compilers
from stratagem.planning.candidates import Form
from stratagem.planning.captured_steps import capture_script, with_global_batch
from stratagem.planning.choices import PlanSearch
from stratagem.planning.compilers import compile_step, missing_compiler
from stratagem.planning.planner import plan_step
from stratagem.planning.targets import parse_target

_PROGRAMS = Path(__file__).parent / "programs"
_EXAMPLES = Path(__file__).parents[3] / "examples"


def test_first_step_that_trains_is_taken(capsys) -> None:
    """The evaluation before it gives zeros, and nothing behind it runs."""
    step = capture_script(_PROGRAMS / "loop.py", [], parse_target("4xH100"))
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == ["replicas 4", "evaluated 0.0", "ended"]
    assert step.fn.__name__ == "train"
    assert step.strategy.num_replicas_in_sync == 4
    # A script that takes so many examples for each replica does so for those of the target.
    assert step.arguments.batch.size == 6
    assert [variable.shape for variable in step.trace.written if variable.trainable] == [(8, 4)]
    assert len(step.optimizers) == 1


def test_another_global_batch() -> None:
    step = capture_script(_PROGRAMS / "loop.py", [], parse_target("4xH100"))
    plan = plan_step(with_global_batch(step, 64), parse_target("4xH100"), title="loop.py")
    assert (plan.global_batch, plan.per_device_batch) == (64, 16)
    assert plan.memory.batch_bytes == 16 * 8 * 4
    # By the weights only: nothing stands before this layer.
    assert plan.flops == {"float32": 2 * 2 * 16 * 8 * 4}
    for wrong in (0, 30):
        with pytest.raises(ValueError, match=r"of (0|30) cannot be split over 4 replicas"):
            with_global_batch(step, wrong)


def test_step_without_a_batch_takes_no_other(tmp_path) -> None:
    script = tmp_path / "counts.py"
    script.write_text(
        "import stratagem as sg\n"
        "strategy = sg.MirroredStrategy()\n"
        "with strategy.scope():\n"
        "    total = sg.Variable(0.0, aggregation=sg.VariableAggregation.SUM)\n"
        "strategy.run(lambda: total.assign_add(1.0 * total.value))\n"
    )
    step = capture_script(script, [], parse_target("2xH100"))
    with pytest.raises(ValueError, match="but the step takes no batch"):
        with_global_batch(step, 8)


def test_script_that_exits_or_fails_before_it_trains(tmp_path) -> None:
    argv, search = list(sys.argv), list(sys.path)
    target = parse_target("2xH100")
    with pytest.raises(RuntimeError, match="exited with 'no training asked for' before it trained"):
        capture_script(_PROGRAMS / "loop.py", ["--never"], target)
    script = tmp_path / "wrong.py"
    script.write_text("import sys\nassert sys.argv[1:] == ['a']\n{}['missing']\n")
    with pytest.raises(KeyError, match="missing"):
        capture_script(script, ["a"], target)
    with pytest.raises(FileNotFoundError, match=r"Script 'nowhere.py' does not exist"):
        capture_script("nowhere.py", [], target)
    assert (sys.argv, sys.path) == (argv, search)


def test_script_without_a_strategy_is_planned_as_mirrored() -> None:
    target = parse_target("4xH100")
    step = capture_script(_PROGRAMS / "plain.py", [], target)
    assert step.strategy.num_replicas_in_sync == 4
    assert step.arguments.batch.size == 4
    assert sum(variable.trainable for variable in step.trace.written) == 4


def test_script_that_names_one_device_uses_one(tmp_path) -> None:
    script = tmp_path / "one.py"
    source = (_PROGRAMS / "loop.py").read_text()
    mirrored, one = 'sg.MirroredStrategy(["cpu:0", "cpu:1"])', 'sg.OneDeviceStrategy("gpu:0")'
    script.write_text(source.replace(mirrored, one))
    target = parse_target("8xH100")
    plan = plan_step(capture_script(script, [], target), target, title="one.py")
    assert (plan.target.name, plan.global_batch, plan.reductions) == ("1xH100", 6, ())
    assert "The plan is for 1 device, as the strategy uses." in plan.notes


@pytest.mark.parametrize(
    ("name", "arguments", "batch", "num_parameters"),
    [
        pytest.param(
            "01_train_digits.py",
            ["--devices", "cpu:0,cpu:1"],
            128,
            320 + 18_496 + 36_928 + 10_250,
            marks=pytest.mark.slow,
        ),
        ("02_custom_loop.py", [], 64, 160 + 9_280 + 650),
    ],
)
def test_examples_are_planned(name, arguments, batch, num_parameters) -> None:
    target = parse_target("8xH100")
    step = capture_script(_EXAMPLES / name, arguments, target)
    plan = plan_step(step, target, title=name)
    assert (plan.global_batch, plan.num_parameters) == (batch, num_parameters)
    assert plan.reduced_bytes >= 4 * num_parameters
    # Adam's moments, and its counter with the learning rate: of a schedule there is no variable.
    assert plan.memory.optimizer_bytes - 8 * num_parameters == (4 if name.startswith("01") else 8)


# Selection of the compiler, and its fallbacks.

_TARGET = parse_target("2xH100")


@pytest.fixture(scope="module")
def step() -> CapturedStep:
    return capture_script(Path(__file__).parent / "programs" / "loop.py", [], _TARGET)


@pytest.fixture
def has_plugin(monkeypatch) -> None:
    monkeypatch.setattr(compilers, "missing_compiler", lambda platform: None)


def test_plugin_that_is_not_installed_is_named(monkeypatch) -> None:
    monkeypatch.setattr(compilers.importlib.util, "find_spec", lambda name: None)
    assert missing_compiler("gpu") == "pip install jax-cuda12-pjrt"
    assert missing_compiler("tpu") == "pip install libtpu"


@pytest.mark.parametrize("module", ["jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"])
def test_either_plugin_for_cuda_is_enough(module, monkeypatch) -> None:
    monkeypatch.setattr(
        compilers.importlib.util, "find_spec", lambda name: name if name == module else None
    )
    assert missing_compiler("gpu") is None
    assert missing_compiler("tpu") is not None


@dataclasses.dataclass(frozen=True)
class _AttachedDevice:
    id: int
    device_kind: str


@pytest.mark.parametrize(
    ("kind", "num_attached", "target", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 2, "1xH100", [0]),
        ("NVIDIA H100 80GB HBM3", 2, "2xH100", [0, 1]),
        ("NVIDIA H100 80GB HBM3", 2, "8xH100", []),
        ("NVIDIA H100 80GB HBM3", 16, "16xH100", []),
        ("NVIDIA A100-SXM4-80GB", 8, "1xH100", []),
    ],
)
def test_attached_devices_of_the_kind_compile(
    kind, num_attached, target, expected, monkeypatch
) -> None:
    attached = [_AttachedDevice(index, kind) for index in range(num_attached)]
    monkeypatch.setattr(compilers.jax, "local_devices", lambda: attached)
    found = compilers.attached_devices(parse_target(target))
    assert [device.id for device in found] == expected


@pytest.mark.parametrize(
    ("message", "is_refused", "note"),
    [
        (
            "RESOURCE_EXHAUSTED: out of memory in memory space hbm.\n"
            "Used 19.45G of 15.75G hbm. Exceeded hbm capacity by 3.70G.\n",
            True,
            "Used 19.45G of 15.75G hbm",
        ),
        (
            "UNIMPLEMENTED: no library for it\nmore",
            False,
            "Compiled for CPU: the compiler for GPU failed (UNIMPLEMENTED: no library for it).",
        ),
    ],
)
def test_step_that_the_compiler_refuses(
    step, has_plugin, monkeypatch, message, is_refused, note
) -> None:
    def refuse(target):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(compilers, "devices_of", refuse)
    compiled = compile_step(step, _TARGET)
    assert (compiled.is_refused, compiled.compiler) == (is_refused, "cpu")
    assert note in compiled.notes[0]
    (program,) = compiled.programs
    assert program.memory.argument_bytes > 0


def test_refused_steps_share_the_devices_to_compile_for(has_plugin, monkeypatch) -> None:
    """Else, each setting of a search would leave a client of XLA with its threads."""
    made, library = [], importlib.import_module("jaxlib.xla_client")
    make = library.make_cpu_client
    monkeypatch.setattr(
        library, "make_cpu_client", lambda **options: made.append(options) or make(**options)
    )

    def refuse(target):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(compilers, "devices_of", refuse)
    module = sys.modules[planning.search.__module__]
    monkeypatch.setattr(module, "missing_compiler", lambda platform: None)
    # So many devices that no other test has asked for them.
    found = planning.search(_model, (np.ones((24, 8)), np.ones((24, 8))), "24xL4", count=2)
    assert [choice.plan.is_refused for choice in found.choices] == [True, True]
    assert made == [{"num_devices": 24}]


# Names of targets, and the table of accelerators.


@pytest.mark.parametrize(
    ("text", "name", "num_devices", "num_groups"),
    [
        ("8xH100", "8xH100", 8, 1),
        ("h100", "1xH100", 1, 1),
        ("64xH100", "64xH100", 64, 8),
        ("4xl4", "4xL4", 4, 1),
        ("v5e:4x4", "v5e:4x4", 16, 1),
        (" v5p:2x2x1 ", "v5p:2x2x1", 4, 1),
        ("2xv6e:16x16", "2xv6e:16x16", 512, 2),
        ("1xV4:2x2x2", "v4:2x2x2", 8, 1),
    ],
)
def test_machine_of_a_name(text, name, num_devices, num_groups) -> None:
    target = parse_target(text)
    assert (target.name, target.num_devices, target.num_groups) == (name, num_devices, num_groups)
    assert parse_target(target.name) == target


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        *[
            (text, ValueError, r"(is not a known machine|names a TPU without)(?s:.)*v5e:4x4")
            for text in ("8xH101", "v5e", "8", "x", "", "8xH100:2x2", "v7:2x2", "8 x H100")
        ],
        *[(text, ValueError, "has no devices") for text in ("0xH100", "v5e:0x4", "0xv5e:2x2")],
        ("12xH100", ValueError, r"12 GPUs do not fill hosts of 8(?s:.)*use 8 or 16"),
        (8, TypeError, "is of type int"),
    ],
)
def test_unknown_machine_is_refused(text, error, words) -> None:
    with pytest.raises(error, match=words):
        parse_target(text)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8xH100", [1, 2, 4, 8]),
        ("6xH100", [1, 2, 4, 6]),
        ("64xH100", [1, 2, 4, 8, 16, 32, 64]),
        ("24xH100", [1, 2, 4, 8, 16, 24]),
        ("2xv5e:4x4", [1, 2, 4, 8, 16, 32]),
        ("1xL4", [1]),
    ],
)
def test_sizes_to_scale_over(text, sizes) -> None:
    target = parse_target(text)
    assert target.sizes() == sizes
    assert [target.of_size(size).num_devices for size in sizes] == sizes
    assert target.of_size(sizes[-1]) == target
    if target.num_groups > 1 or target.accelerator.platform == "tpu":
        assert target.of_size(2 * sizes[-1]).num_groups == 2 * target.num_groups


def test_topology_has_hosts_and_slices() -> None:
    devices = parse_target("2xv5e:4x4").topology.devices
    assert [device.slice_index for device in devices] == [0] * 16 + [1] * 16
    assert devices[31].process_index == 3
    assert (str(devices[31]), devices[0].device_kind) == ("tpu:31", "TPU v5 lite")


# Searches for small models: what is best, what is refused, and what is printed.

_BATCH = (np.ones((16, 8), "float32"), np.ones((16, 8), "float32"))


def _model(count: int = 1) -> keras.Model:
    x = inputs = keras.Input((8,))
    for _ in range(count):
        layers = [keras.layers.Dense(8, dtype="mixed_bfloat16") for _ in range(2)]
        x = keras.Sequential(layers)(x)
    model = keras.Model(inputs, x)
    model.compile("adam", "mse")
    return model


@pytest.fixture(scope="module")
def found() -> PlanSearch:
    return planning.search(lambda: _model(2), _BATCH, "4xH100", count=3, compiles=False)


def test_a_small_model_is_replicated_as_it_is(found) -> None:
    assert found.best.code == "strategy = sg.MirroredStrategy()"
    assert found.best.candidate.mesh == (4, 1, 1)
    assert found.best.fits
    # Four policies; replicated, and two states on two meshes.
    assert found.num_candidates == 4 * (1 + 2 * 2)
    assert len(found.choices) == 3
    data = json.loads(json.dumps(found.to_dict()))
    assert data["choices"][0]["mesh"] == {"replica": 4, "shard": 1, "model": 1}
    assert data["choices"][0]["is_compiled"] is False
    text = str(found)
    assert "the best 3 of 20 settings" in text
    assert "1  strategy = sg.MirroredStrategy()" in text


@pytest.mark.parametrize("is_of_keras", [True, False])
def test_layouts_divide_weights_and_their_slots(is_of_keras: bool) -> None:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(4096, name="wide")])
        model.compile("adam", "mse")
        return model

    layout_map: Any = {".*wide/kernel": (None, "logical")}
    with planning_for(parse_target("4xH100").topology):
        if is_of_keras:
            mesh = keras.distribution.DeviceMesh((2, 2), ("batch", "model"))
            layout_map = keras.distribution.LayoutMap(mesh)
            layout_map[".*wide/kernel"] = (None, "model")
        strategy = sg.MirroredStrategy(devices_per_replica=2, layout_map=layout_map)
    batch = (np.ones((16, 256), "float32"), np.ones((16, 4096), "float32"))
    found = planning.search(build, batch, "4xH100", count=100, strategy=strategy, compiles=False)
    state = {
        choice.candidate.mesh: choice.memory_bytes
        for choice in found.choices
        if choice.candidate.shard_state is None and choice.candidate.form == Form()
    }
    assert {mesh[2] for mesh in state} >= {1, 2}
    # Of the weight, its gradient and two slots, a device has half.
    halved = 4 * 4 * 256 * 4096 / 2
    assert state[4, 1, 1] - state[2, 1, 2] == pytest.approx(halved, rel=0.05)


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="search for 0 results"):
        planning.search(_model(), _BATCH, "2xH100", count=0)
    with pytest.raises(TypeError, match="is of type list"):
        planning.search(_model(), [*_BATCH], "2xH100")
    with pytest.raises(TypeError, match="received or built"):
        planning.search(lambda: 1, _BATCH, "2xH100")
    with pytest.raises(ValueError, match="batch of 16 cannot be split over 7"):
        planning.search(_model(), _BATCH, "7xH100")


# Notes on the part of a machine that a step uses.

_USED_BATCH = (np.ones((32, 64), "float32"), np.zeros((32, 1), "float32"))


def _used_model() -> keras.Model:
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32)])
    model.compile("sgd", "mse")
    return model


def test_replicas_span_hosts() -> None:
    layout_map = {".*kernel": (None, "logical")}
    with planning_for(parse_target("16xH100").topology):
        strategy = sg.MultiWorkerMirroredStrategy(devices_per_replica=16, layout_map=layout_map)
    plan = sg.plan(_used_model, _USED_BATCH, "16xH100", strategy=strategy)
    assert (plan.num_replicas, plan.devices_per_replica) == (1, 16)
    assert not any("process" in note for note in plan.notes)


@pytest.mark.parametrize("place", ["sharded", "central"])
def test_process_does_not_span_hosts(place: str) -> None:
    strategy = sg.HybridStrategy(["cpu:0", "cpu:1"], placement={"kernel": place})
    notes = " ".join(sg.plan(_used_model, _USED_BATCH, "16xH100", strategy=strategy).notes)
    assert ("needs a process that has all devices" in notes) == (place == "central")
