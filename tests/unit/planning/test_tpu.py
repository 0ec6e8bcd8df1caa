"""Plans with the TPU compiler: need libtpu, but no TPU (`make test-external NAME=tpu`)."""

from __future__ import annotations

import jax
import keras
import pytest

import stratagem as sg
from stratagem.planning.result import Plan

pytest.importorskip("libtpu", reason="no libtpu: `make test-external NAME=tpu` has it")

_NUM_PARAMETERS = 1024 * 4096 + 4096 + 4096 * 1024 + 1024


@pytest.fixture(autouse=True)
def _others_may_compile_too(monkeypatch) -> None:
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


def _dense(width: int = 4096) -> keras.Model:
    model = keras.Sequential(
        [keras.Input((1024,)), keras.layers.Dense(width, "relu"), keras.layers.Dense(1024)]
    )
    model.compile("adam", "mse")
    return model


def _planned(target: str, width: int = 4096) -> Plan:
    shapes = (jax.ShapeDtypeStruct((256, 1024), "float32"),) * 2
    return sg.plan(lambda: _dense(width), shapes, target)


def test_one_slice() -> None:
    plan = _planned("v5e:2x4")
    assert plan.compiler == "tpu", plan.notes
    memory = plan.memory
    assert memory.parameters_bytes == 4 * _NUM_PARAMETERS
    assert memory.optimizer_bytes == 8 * _NUM_PARAMETERS + 8
    # Some gradients are in the chip's fast memory, which is none of these 16 GiB.
    assert memory.temporary_bytes > 0.4 * memory.gradients_bytes
    assert plan.reduced_bytes == pytest.approx(4 * _NUM_PARAMETERS, rel=0.01)
    assert plan.accessed_bytes > 2 * (memory.parameters_bytes + memory.optimizer_bytes)
    assert plan.step.num_devices == 8


def test_two_slices_exchange_a_part_of_each_chip() -> None:
    """Summed within a slice, the parts between slices, and gathered within."""
    plan = _planned("2xv5e:2x4")
    assert plan.compiler == "tpu", plan.notes
    between = sum(one.num_bytes for one in plan.reductions if one.leaves_slice)
    inside = [one for one in plan.reductions if not one.leaves_slice]
    within = sum(one.num_bytes for one in inside if one.kind != "all-gather")
    assert within == pytest.approx(
        sum(one.num_bytes for one in inside if one.kind == "all-gather"), rel=0.01
    )
    assert within == pytest.approx(4 * _NUM_PARAMETERS, rel=0.01)
    assert between == pytest.approx(within / 8, rel=0.02)
    assert plan.scaling[-1].reduction_s > plan.scaling[-2].reduction_s


def test_what_does_not_fit_is_refused_by_the_compiler() -> None:
    """Parameters, moments and gradients of 1.6 G elements are 26 GB; a v5e has 16 GiB."""
    plan = _planned("v5e:2x2", width=800_000)
    assert plan.is_refused
    assert not plan.fits
    assert plan.compiler == "cpu"
    assert any("rejects the step because it does not fit" in note for note in plan.notes)


def test_shared_state_is_compiled_for_tpus() -> None:
    shapes = (jax.ShapeDtypeStruct((256, 1024), "float32"),) * 2
    plan = sg.plan(_dense, shapes, "v5e:2x4", shard_state="all")
    assert plan.compiler == "tpu", plan.notes
    assert plan.memory.parameters_bytes == 4 * _NUM_PARAMETERS / 8
    assert plan.memory.optimizer_bytes == 8 * _NUM_PARAMETERS / 8 + 8
    assert any(one.kind == "all-gather" for one in plan.reductions)


def test_tables_in_parts_are_compiled_for_tpus(monkeypatch) -> None:
    """As a strategy for TPUs keeps them; of the table only rows are sent."""
    monkeypatch.setenv("STRATAGEM_TPU_PLATFORM", "cpu")
    num_rows, width = 2**20, 64

    def model() -> keras.Model:
        layers = [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(num_rows, width),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
        model = keras.Sequential(layers)
        model.compile("adagrad", "mse")
        return model

    strategy = sg.TPUStrategy(placement={"embeddings": "sharded"})
    shapes = jax.ShapeDtypeStruct((64, 4), "int32"), jax.ShapeDtypeStruct((64, 1), "float32")
    plan = sg.plan(model, shapes, "v5e:2x4", strategy=strategy)
    assert plan.compiler == "tpu", plan.notes
    table = 4 * num_rows * width
    assert plan.memory.parameters_bytes == table / 8 + 4 * (4 * width + 1)
    assert plan.memory.total_bytes < table
    assert 0 < sum(one.num_bytes for one in plan.reductions) < table / 100


def test_state_in_pinned_memory_is_brought_over_in_parts() -> None:
    """Each chip has a part of it there, and gathers in its own memory what it computes with."""
    shapes = (jax.ShapeDtypeStruct((256, 1024), "float32"),) * 2
    pinned = sg.HybridStrategy(["cpu:0"], placement={"kernel": "pinned_host"})
    plan = sg.plan(_dense, shapes, "v5e:2x4", strategy=pinned)
    assert plan.compiler == "tpu", plan.notes
    kernels, biases = 4 * 2 * 1024 * 4096, 4 * (1024 + 4096)
    assert plan.memory.parameters_bytes == biases
    assert plan.memory.optimizer_bytes == 2 * biases + 8
    assert plan.memory.host_bytes == 3 * kernels
    assert (plan.brought_bytes, plan.put_back_bytes) == (3 * kernels // 8, 3 * kernels // 8)
    copies = _planned("v5e:2x4").memory
    assert plan.memory.total_bytes < 0.6 * copies.total_bytes
    kinds = [one.kind for one in plan.reductions if one.num_bytes > biases]
    assert sorted(kinds) == ["all-gather"] * 2 + ["reduce-scatter"] * 2
