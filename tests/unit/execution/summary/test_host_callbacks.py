"""Summaries in loops and branches, and in functions under jax.jit, are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import stratagem as sg
from tests.unit.execution.summary.events import Read


@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
def test_bodies_of_loops_and_branches_write_once(devices: Any, tmp_path: Path) -> None:
    strategy = sg.MirroredStrategy(devices)

    def step(rows: Any) -> Any:
        def body(total: Any, row: Any) -> tuple[Any, None]:
            sg.summary.scalar("row", row, step=row.astype(jnp.int32))
            return total + row, None

        total, _ = jax.lax.scan(body, jnp.zeros(()), rows)
        jax.lax.cond(
            total > 10,
            lambda: jnp.asarray(sg.summary.histogram("large", rows)),
            lambda: jnp.asarray(False),
        )
        return jax.grad(lambda x: (sg.summary.scalar("square", x * x), x * x)[1])(total)

    writer = sg.summary.create_file_writer(tmp_path)
    with writer.as_default(step=4):
        (batch,) = strategy.distribute_dataset([jnp.arange(8.0)])
        strategy.run(step, args=(batch,))
    with sg.summary.record_if(condition=False), writer.as_default(step=5):
        strategy.run(step, args=(batch,))
    writer.close()
    found = Read(tmp_path)
    num_rows = 8 // len(devices)
    total = num_rows * (num_rows - 1) / 2
    assert sorted(found.numbers("row")) == [(row, float(row)) for row in range(num_rows)]
    assert found.numbers("square") == [(4, total * total)]
    assert ("large" in found.tags) is (total > 10)
    if total > 10:
        assert found.tensors("large")[0][1][:, 2].sum() == num_rows


def test_function_under_jit_sees_the_settings_when_it_runs(tmp_path: Path) -> None:
    first, second = (sg.summary.create_file_writer(tmp_path / name) for name in "ab")

    @jax.jit
    def step(value: Any, is_recorded: Any) -> Any:
        sg.summary.scalar("value", value)
        with sg.summary.record_if(is_recorded):
            sg.summary.scalar("sometimes", value)
        return value

    step(1.0, True)
    for number in range(4):
        with (first if number < 2 else second).as_default(step=number):
            step(float(number), number % 2 == 0)
    first.close(), second.close()
    assert Read(tmp_path / "a").numbers("value") == [(0, 0.0), (1, 1.0)]
    assert Read(tmp_path / "b").numbers("value") == [(2, 2.0), (3, 3.0)]
    assert Read(tmp_path / "a").numbers("sometimes") == [(0, 0.0)]
    assert Read(tmp_path / "b").numbers("sometimes") == [(2, 2.0)]


def test_host_function_that_is_differentiated_writes_at_once(tmp_path: Path) -> None:
    variable = sg.Variable(3.0)
    writer = sg.summary.create_file_writer(tmp_path)

    def loss() -> Any:
        sg.summary.scalar("loss", variable * variable)
        return variable * variable

    with writer.as_default(step=1):
        sg.value_and_grad(loss, [variable])
        jax.grad(lambda x: (sg.summary.scalar("plain", x), x)[1])(2.0)
    writer.close()
    assert Read(tmp_path).numbers("loss") == [(1, 9.0)]
    assert Read(tmp_path).numbers("plain") == [(1, 2.0)]
