"""A device without free memory: the error's numbers, its options, and the state afterwards."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.execution.programs.program import Program
from stratagem.variables import exhausted_memory

GIB = 2**30
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1.50GiB."


def _fails(message: str = OUT_OF_MEMORY) -> Any:
    def fail(*_: object) -> None:
        raise jax.errors.JaxRuntimeError(message)

    return fail


def _trained(strategy: Any) -> keras.Model:
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(64, name="wide")])
        model.compile("adam", "mse")
    model.fit(np.ones((4, 8), "float32"), np.ones((4, 64), "float32"), verbose=0)
    return model


def _message(model: keras.Model, monkeypatch: pytest.MonkeyPatch, **stats: int) -> str:
    """Returns the message of a failed step on a device with these numbers of its allocator."""
    monkeypatch.setattr(exhausted_memory, "_memory_stats", lambda _: stats)
    monkeypatch.setattr(Program, "_call", _fails())
    with pytest.raises(MemoryError, match="is out of memory: 1,610,612,736 bytes") as caught:
        model.distribute_strategy.run(lambda: model.trainable_variables[0] + 1)
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)
    return str(caught.value)


def test_error_lists_the_largest_variables_with_slots_and_says_what_the_rest_takes(
    monkeypatch,
) -> None:
    model = _trained(sg.OneDeviceStrategy("cpu:0"))
    message = _message(model, monkeypatch, bytes_limit=2 * GIB, bytes_in_use=GIB)
    kernel_bytes = 8 * 64 * 4
    assert f"JAX may use {2 * GIB:,} bytes of it; {GIB:,} are in use." in message
    slots = sum(v.value.nbytes for v in model.optimizer.variables[2:])
    assert f"optimizer slots {slots:,}" in message
    listed = [line.strip() for line in message.splitlines() if line.startswith("  ")]
    path = model.trainable_variables[0].path
    assert listed[0] == f"{path} (8, 64) float32, {kernel_bytes:,} bytes"
    assert len(listed) == 5
    assert [line.endswith("optimizer slot") for line in listed[:3]] == [False, True, True]


@pytest.mark.parametrize(
    ("message", "asked_bytes"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12345 bytes.", 12345),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1.50GiB.", 3 * 2**29),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 77 bytes.", 77),
        ("INTERNAL: Error dispatching computation: Out of memory allocating 4 bytes.", 4),
        ("RESOURCE_EXHAUSTED: Failed to allocate request for 2.00KiB (2048B)", None),
    ],
)
def test_requested_bytes_are_read_from_the_words_of_xla(message, asked_bytes, monkeypatch) -> None:
    strategy = sg.OneDeviceStrategy("cpu:0")
    monkeypatch.setattr(Program, "_call", _fails(message))
    wanted = "an allocation failed" if asked_bytes is None else f"{asked_bytes:,} bytes were"
    with pytest.raises(sg.errors.ResourceExhaustedError, match=wanted):
        strategy.run(lambda: jnp.ones(()))


def test_options_of_several_replicas_name_sharded_state(monkeypatch) -> None:
    one, two = sg.OneDeviceStrategy("cpu:0"), sg.MirroredStrategy(["cpu:0", "cpu:1"])
    options = {}
    for strategy in (one, two):
        options[strategy] = _message(_trained(strategy), monkeypatch)
        monkeypatch.undo()
    assert "shard_state" not in options[one]
    assert 'shard_state="optimizer" or shard_state="all"' in options[two]
    assert "gradient_accumulation_steps" in options[one]
    assert "mixed_bfloat16" in options[one]


def test_half_precision_is_not_advised_if_it_is_used(monkeypatch) -> None:
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        message = _message(_trained(sg.OneDeviceStrategy("cpu:0")), monkeypatch)
    finally:
        keras.config.set_dtype_policy("float32")
    assert "mixed_bfloat16" not in message


def test_memory_of_other_processes_is_named_if_the_own_share_had_been_enough(monkeypatch) -> None:
    model = _trained(sg.OneDeviceStrategy("cpu:0"))
    enough = _message(model, monkeypatch, bytes_limit=4 * GIB, bytes_in_use=GIB)
    monkeypatch.undo()
    short = _message(model, monkeypatch, bytes_limit=2 * GIB, bytes_in_use=GIB)
    assert "nvidia-smi" in enough
    assert "XLA_PYTHON_CLIENT_PREALLOCATE=false" in enough
    assert "nvidia-smi" not in short


def test_pinned_host_memory_has_a_limit_of_its_own(monkeypatch) -> None:
    monkeypatch.setattr(
        Program, "_call", _fails("RESOURCE_EXHAUSTED: Out of host memory trying to allocate 9GiB.")
    )
    with pytest.raises(
        MemoryError, match=r"9,663,676,416 bytes in pinned(.|\n)*HOST_MEMORY_LIMIT_GB"
    ):
        sg.OneDeviceStrategy("cpu:0").run(lambda: jnp.ones(()))


def test_training_goes_on_after_a_failed_step(monkeypatch) -> None:
    model = _trained(sg.MirroredStrategy(["cpu:0", "cpu:1"]))
    before = model.get_weights()
    assert "All variables still have their values" in _message(model, monkeypatch)
    monkeypatch.undo()
    for value, kept in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(value, kept)
    history = model.fit(np.ones((4, 8), "float32"), np.ones((4, 64), "float32"), verbose=0)
    assert np.isfinite(history.history["loss"][0])


def test_variables_that_a_failed_step_had_taken_over_are_counted(monkeypatch) -> None:
    model = _trained(sg.OneDeviceStrategy("cpu:0"))
    model.trainable_variables[0].stored.delete()
    message = _message(model, monkeypatch)
    path = model.trainable_variables[0].path
    assert f"such as {path}: restore a checkpoint" in message
    assert re.search(r"1 of \d+ variables lost their values with the failed step", message)


def test_creation_of_variables_fit_input_and_functions_explain_too(monkeypatch) -> None:
    strategy = sg.OneDeviceStrategy("cpu:0")
    model = _trained(strategy)
    with pytest.raises(MemoryError, match="SG107"), strategy.scope():
        _fails()()
    monkeypatch.setattr(Program, "_call", _fails())
    with pytest.raises(MemoryError, match="SG107"):
        model.fit(np.ones((4, 8), "float32"), np.ones((4, 64), "float32"), verbose=0)
    with pytest.raises(MemoryError, match="SG107"):
        model.evaluate(np.ones((4, 8), "float32"), np.ones((4, 64), "float32"), verbose=0)
    monkeypatch.undo()
    monkeypatch.setattr(jax, "device_put", _fails())
    dataset = strategy.distribute_dataset([np.ones((100_000,), "float32")])
    with pytest.raises(MemoryError, match="SG107"):
        next(iter(dataset))


def test_real_program_without_memory_is_explained() -> None:
    strategy = sg.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        variable = keras.Variable(np.ones(4, "float32"), name="kept")
    with pytest.raises(MemoryError, match="bytes were requested"), strategy.scope():
        jax.block_until_ready(jnp.ones((2**24, 2**21)))
    np.testing.assert_array_equal(variable.value, np.ones(4))


def test_other_errors_pass() -> None:
    with pytest.raises(ValueError, match="other"), sg.OneDeviceStrategy("cpu:0").scope():
        raise ValueError("other")
