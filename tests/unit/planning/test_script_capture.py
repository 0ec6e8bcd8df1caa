"""Training steps captured from unmodified scripts."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import jax
import keras
import pytest

from stratagem.planning.global_batch import with_global_batch
from stratagem.planning.planner import plan_step
from stratagem.planning.script_capture import capture_script
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


def test_script_that_exits_before_it_trains() -> None:
    argv, search = list(sys.argv), list(sys.path)
    with pytest.raises(RuntimeError, match="exited with 'no training asked for' before it trained"):
        capture_script(_PROGRAMS / "loop.py", ["--never"], parse_target("2xH100"))
    assert (sys.argv, sys.path) == (argv, search)


def test_script_without_a_strategy_is_planned_as_mirrored() -> None:
    target = parse_target("4xH100")
    step = capture_script(_PROGRAMS / "plain.py", [], target)
    assert step.strategy.num_replicas_in_sync == 4
    assert step.arguments.batch.size == 4
    assert sum(variable.trainable for variable in step.trace.written) == 4


def test_script_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError, match=r"Script 'nowhere.py' does not exist"):
        capture_script("nowhere.py", [], parse_target("2xH100"))


def test_error_of_a_script_is_its_own(tmp_path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text("import sys\nassert sys.argv[1:] == ['a']\n{}['missing']\n")
    with pytest.raises(KeyError, match="missing"):
        capture_script(script, ["a"], parse_target("2xH100"))


def test_script_that_names_one_device_uses_one(tmp_path) -> None:
    script = tmp_path / "one.py"
    source = (_PROGRAMS / "loop.py").read_text()
    mirrored, one = 'sg.MirroredStrategy(["cpu:0", "cpu:1"])', 'sg.OneDeviceStrategy("gpu:0")'
    script.write_text(source.replace(mirrored, one))
    target = parse_target("8xH100")
    plan = plan_step(capture_script(script, [], target), target, title="one.py")
    assert (plan.target.name, plan.global_batch, plan.reductions) == ("1xH100", 6, ())
    assert "The plan is for 1 device, as the strategy uses." in plan.notes


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


@pytest.mark.slow
def test_a_billion_parameters_take_no_memory_here() -> None:
    """With Adam's moments they would be 13.7 GB."""
    before = sum(array.nbytes for array in jax.live_arrays())
    script = _EXAMPLES / "plan" / "train_transformer.py"
    policy = keras.config.dtype_policy()
    try:
        with jax.numpy_dtype_promotion("standard"):  # which Keras's attention needs
            step = capture_script(script, [], parse_target("8xH100"))
    finally:
        keras.config.set_dtype_policy(policy)
    trained = [variable for variable in step.trace.written if variable.trainable]
    width, tokens = 2048, 32_000
    # A block: attention and a layer of four times its width, with their biases and norms.
    block = 4 * (width + 1) * width + (width + 1) * 4 * width + (4 * width + 1) * width + 4 * width
    whole = tokens * width + 20 * block + 2 * width + (width + 1) * tokens
    assert sum(math.prod(variable.shape) for variable in trained) == whole
    assert sum(array.nbytes for array in jax.live_arrays()) - before < 10**8


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
