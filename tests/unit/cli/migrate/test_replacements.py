"""Counterparts of other libraries that belong to JAX or Keras, used as the migration table says."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg


def test_print_of_a_step_shows_values(capfd: pytest.CaptureFixture[str]) -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])

    def step(value: jax.Array) -> None:
        jax.debug.print("value {}", 2 * value)

    strategy.run(step, args=(jnp.asarray(3),))
    jax.effects_barrier()
    assert capfd.readouterr().out.splitlines() == ["value 6"] * 2


def test_operations_of_keras_replace_its_backend() -> None:
    rows = np.arange(6.0, dtype="float32").reshape(2, 3)
    np.testing.assert_allclose(keras.ops.mean(rows, axis=1), rows.mean(axis=1))
    np.testing.assert_allclose(keras.ops.square(rows), rows**2)
    assert not hasattr(keras.backend, "mean")


def test_program_without_a_cluster_is_process_0_of_1() -> None:
    assert (jax.process_index(), jax.process_count()) == (0, 1)


def test_profile_of_a_block_is_written(tmp_path: Path) -> None:
    with jax.profiler.trace(tmp_path):
        jnp.ones(3).block_until_ready()
    assert [path for path in tmp_path.rglob("*") if path.is_file()]
