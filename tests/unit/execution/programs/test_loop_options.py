"""Compiler options of loops over steps, on devices that claim to be GPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices.mesh import Topology
from stratagem.execution.context.replica import ReplicaBatch
from stratagem.execution.programs import program
from stratagem.execution.programs.program import loop_options
from stratagem.execution.tracing.arguments import Arguments, Leaf

ROWS = np.arange(6, dtype="float32").reshape(3, 2)


@pytest.fixture
def strategy(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr(Topology, "platform", "gpu")
    return sg.OneDeviceStrategy("cpu:0")


def test_slices_are_not_copied_on_a_second_stream(strategy) -> None:
    assert loop_options(strategy.topology) == {
        "xla_disable_hlo_passes": "dynamic-slice-copy-fusion-async-wrapper"
    }


def test_other_devices_have_the_defaults() -> None:
    assert loop_options(sg.OneDeviceStrategy("cpu:0").topology) is None


def test_passes_that_the_user_disables_stay_disabled(strategy, monkeypatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_disable_hlo_passes=one,two")
    options = loop_options(strategy.topology)
    assert options is not None
    assert options["xla_disable_hlo_passes"].startswith("one,two,dynamic-slice-")


def test_only_loops_have_the_options(strategy, monkeypatch) -> None:
    monkeypatch.setattr(program, "loop_options", lambda topology: {"xla_of_this_test": "1"})
    doubled = _doubled(strategy)
    np.testing.assert_array_equal(doubled.run(_arguments()), 2 * ROWS[0])
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_of_this_test"):
        doubled.run_many([jnp.asarray(ROWS)], [])


def test_a_loop_runs_with_them(strategy) -> None:
    results = _doubled(strategy).run_many([jnp.asarray(ROWS)], [])
    np.testing.assert_array_equal(results, 2 * ROWS)


def test_a_loop_within_a_compiled_function_has_none(strategy) -> None:
    doubled = _doubled(strategy)
    doubled.run_many([jnp.asarray(ROWS)], [])  # with options

    @jax.jit
    def outer(rows):
        assert loop_options(strategy.topology) is None
        return doubled.run_many([rows], [])

    np.testing.assert_array_equal(outer(jnp.asarray(ROWS)), 2 * ROWS)


def test_a_loop_within_a_function_of_the_library_has_none(strategy) -> None:
    @sg.function
    def outer(row):
        assert loop_options(strategy.topology) is None
        return strategy.run(lambda x: 2 * x, args=(row,))

    np.testing.assert_array_equal(outer(jnp.asarray(ROWS[0])), 2 * ROWS[0])


def _doubled(strategy):
    return strategy.executor.program(lambda row: 2 * row, _arguments())


def _arguments():
    structure = jax.tree.structure(((0,), {}))
    row = jnp.asarray(ROWS[0])
    leaves = (Leaf(True, row.shape, row.dtype),)
    return Arguments(structure, leaves, [row], [], ReplicaBatch(size=2))
