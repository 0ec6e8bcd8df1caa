"""Many steps in one call: the results of as many calls."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from stratagem.execution.context.replica import ReplicaBatch
from stratagem.execution.tracing.arguments import Arguments, Leaf


@pytest.fixture(params=[1, 2])
def strategy(request):
    return sg.MirroredStrategy([f"cpu:{index}" for index in range(request.param)])


def test_many_steps_in_one_call_are_as_many_calls(strategy) -> None:
    n = strategy.num_replicas_in_sync
    rows = np.random.default_rng(0).normal(size=(3, n, 2)).astype("float32")
    if n == 1:
        rows = rows[:, 0]  # one replica has no replica axis

    def made():
        with strategy.scope():
            return (
                sg.Variable(np.zeros(2, "float32"), aggregation="sum"),
                sg.Variable(0.0, synchronization="on_read", aggregation="sum"),
            )

    def program_of(total, own):
        def step(x, scale):
            total.assign_add(x * scale)
            own.assign_add(jnp.sum(x))
            return total.value, x * scale, "done"

        return strategy.executor.program(step, _arguments(rows[0]))

    one_by_one, at_once = made(), made()
    single = program_of(*one_by_one)
    results = [single.run(_arguments(part)) for part in rows]
    many = program_of(*at_once).run_many([jnp.asarray(rows)], [2.0])
    for alone, together in zip(one_by_one, at_once, strict=True):
        np.testing.assert_allclose(together.value, alone.value, rtol=1e-6)
    np.testing.assert_allclose(at_once[0].value, 2 * rows.reshape(-1, 2).sum(0), rtol=1e-5)
    np.testing.assert_allclose(at_once[1].value, rows.sum(), rtol=1e-5)
    assert many[2] == "done"
    for which in (0, 1):
        # Behind the replica axis, where there is one.
        expected = np.stack([_whole(result[which]) for result in results], axis=int(n > 1))
        np.testing.assert_allclose(_whole(many[which]), expected, rtol=1e-6)


def _arguments(part):
    """What a step of `(part, 2.0)` is called with, the first of which is split."""
    structure = jax.tree.structure(((0, 0), {}))
    leaves = (Leaf(True, part.shape, part.dtype), Leaf(False, (), jnp.float32.dtype, True))
    return Arguments(structure, leaves, [jnp.asarray(part)], [2.0], ReplicaBatch(size=2))


def _whole(value):
    return np.asarray(value.stacked if isinstance(value, sg.PerReplica) else value)
