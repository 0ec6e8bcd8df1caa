"""Plans with the GPU compiler, without a GPU: `make test-external NAME=gpu-compiler`."""

from __future__ import annotations

import jax
import keras
import pytest

import stratagem as sg
from stratagem.planning.compilers import missing_compiler
from stratagem.planning.result import Plan

pytestmark = pytest.mark.skipif(
    missing_compiler("gpu") is not None,
    reason="JAX's CUDA plugin is not installed: `make test-external NAME=gpu-compiler` has it",
)

_NUM_PARAMETERS = 4 * (2048 * 2048 + 2048) + 2048 * 10 + 10


def _deep() -> keras.Model:
    layers = [keras.layers.Dense(2048, activation="relu") for _ in range(4)]
    model = keras.Sequential([keras.Input((2048,)), *layers, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def _planned(target: str, global_batch: int) -> Plan:
    shapes = (
        jax.ShapeDtypeStruct((global_batch, 2048), "float32"),
        jax.ShapeDtypeStruct((global_batch,), "int32"),
    )
    return sg.plan(_deep, shapes, target)


def test_h100_hides_most_sums_and_memory_matches_arithmetic() -> None:
    plan = _planned("8xH100", 2048)
    memory = plan.memory
    assert plan.compiler == "gpu"
    assert plan.is_scheduled
    assert memory.parameters_bytes == 4 * _NUM_PARAMETERS
    assert memory.optimizer_bytes == 8 * _NUM_PARAMETERS + 8
    # All gradients are there at once before Adam takes the first; activations are a tenth of them.
    assert 0.9 * memory.gradients_bytes < memory.temporary_bytes < 2.2 * memory.gradients_bytes
    assert plan.reduced_bytes == pytest.approx(4 * _NUM_PARAMETERS, rel=0.01)
    assert plan.hidden_share > 0.5
    assert 0 < plan.step.hidden_s <= plan.step.most_hidden_s
    # At least a kernel per product: four layers forward, twice as many backward, and the last.
    assert plan.num_launches > 3 * 5 - 1
    assert plan.step.launch_s == pytest.approx(plan.num_launches * 0.9e-6)
    assert plan.step.compute_s >= max(plan.products_s, plan.memory_s) * (1 - 1e-9)
    assert plan.step.compute_s <= plan.products_s + plan.memory_s
    # Each device reads parameters and slots at least, and writes them.
    assert plan.accessed_bytes > 2 * (memory.parameters_bytes + memory.optimizer_bytes)


@pytest.mark.parametrize("target", ["16xA100", "2xB200", "2xH200", "2xL4"])
def test_other_gpus(target) -> None:
    plan = _planned(target, 512)
    assert plan.compiler == "gpu", plan.notes
    assert plan.memory.parameters_bytes == 4 * _NUM_PARAMETERS
    assert plan.reduced_bytes >= 4 * _NUM_PARAMETERS


def test_shared_state_is_compiled_for_gpus() -> None:
    shapes = (jax.ShapeDtypeStruct((512, 2048), "float32"), jax.ShapeDtypeStruct((512,), "int32"))
    plan = sg.plan(_deep, shapes, "8xH100", shard_state="all")
    kernels = 4 * 2048 * 2048 + 2048 * 10 + 4 * 2048
    assert plan.compiler == "gpu", plan.notes
    assert plan.memory.parameters_bytes == 4 * (kernels / 8 + 10)
    # Gathered weights, or gradients.
    assert plan.memory.temporary_bytes > 0.8 * plan.memory.gradients_bytes
    gathered = sum(one.num_bytes for one in plan.reductions if one.kind == "all-gather")
    assert gathered >= 4 * kernels


def test_state_in_pinned_memory_is_compiled_for_gpus() -> None:
    shapes = (jax.ShapeDtypeStruct((512, 2048), "float32"), jax.ShapeDtypeStruct((512,), "int32"))
    pinned = sg.HybridStrategy(["cpu:0"], placement={"kernel": "pinned_host"})
    plan = sg.plan(_deep, shapes, "8xH100", strategy=pinned)
    kernels, biases = 4 * (4 * 2048 * 2048 + 2048 * 10), 4 * (4 * 2048 + 10)
    assert plan.compiler == "gpu", plan.notes
    assert plan.memory.parameters_bytes == biases
    assert plan.memory.optimizer_bytes == 2 * biases + 8
    assert plan.memory.host_bytes == 3 * kernels
    assert (plan.brought_bytes, plan.put_back_bytes) == (3 * kernels // 8, 3 * kernels // 8)
    # Gathered weights and gradients, and no moments.
    assert plan.memory.total_bytes < 2.2 * plan.memory.gradients_bytes
