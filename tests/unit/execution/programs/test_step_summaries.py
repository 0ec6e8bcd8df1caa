"""Summaries of a step are written once, by replica 0, with what is set when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from stratagem.execution.summary.writer import write_pending
from tests.unit.execution.summary.events import Read

_TABLE = {"table": "central"}
STRATEGIES = {
    "default": lambda: sg.get_strategy(),
    "one_device": lambda: sg.OneDeviceStrategy("cpu:1"),
    "mirrored_1": lambda: sg.MirroredStrategy(["cpu:0"]),
    "mirrored_2": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"]),
    "mirrored_4": lambda: sg.MirroredStrategy([f"cpu:{i}" for i in range(4)]),
    "groups": lambda: sg.MirroredStrategy([["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]),
    "optimizer_in_parts": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"], shard_state="optimizer"),
    "all_in_parts": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"], shard_state="all"),
    "central_storage": lambda: sg.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:2"),
    "hybrid_central": lambda: sg.HybridStrategy(["cpu:0", "cpu:1"], placement={"w": "central"}),
    "hybrid_sharded": lambda: sg.HybridStrategy(["cpu:0", "cpu:1"], placement={"w": "sharded"}),
}
NUM_STEPS = 4
BATCHES = [np.arange(8, dtype=np.float32) + 10 * step for step in range(NUM_STEPS)]


class Program:
    """A step of training with summaries of all kinds, and what it should write."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.weight = sg.Variable(np.full(4, 2.0, np.float32), name="w")
            self.count = sg.Variable(0, dtype="int32", trainable=False, name="count")
        self.num_replicas = strategy.num_replicas_in_sync

    def step(self, rows: Any) -> Any:
        total = jnp.sum(rows)

        def loss_fn() -> Any:
            loss = jnp.sum(self.weight.value) * total
            sg.summary.scalar("loss", loss)  # in what is differentiated
            sg.summary.text("remark", "made in the step")
            return loss

        loss, (gradient,) = sg.value_and_grad(loss_fn, [self.weight])
        sg.summary.histogram("rows", rows, buckets=4)
        sg.summary.image("picture", jnp.reshape(rows, (1, 1, -1, 1)) / 100)
        with sg.summary.record_if(self.count.value % 2 == 1):
            sg.summary.scalar("odd", total)
            sg.summary.histogram("odd_rows", rows)
        self.weight.assign_add(gradient / total)
        self.count.assign_add(1)
        return loss

    def own_rows(self, step: int) -> np.ndarray:
        """What replica 0 has of a batch."""
        return np.split(BATCHES[step], self.num_replicas)[0]

    def loss(self, step: int) -> float:
        """Of replica 0. Replicas' gradients differ by the sum of their rows alone."""
        return float(4 * (2 + step * self.gain) * self.own_rows(step).sum())

    @property
    def gain(self) -> float:
        """What a step adds to each element of the weight: SUM of ones, or their MEAN."""
        return 1.0

    def check(self, found: Read, steps: list[int]) -> None:
        """Compares what was written with NumPy."""
        assert found.numbers("loss") == [(s, pytest.approx(self.loss(s))) for s in steps]
        remarks = [value.item() for _, value in found.tensors("remark")]
        assert remarks == [b"made in the step"] * len(steps)
        assert found.steps("rows") == steps
        for step, table in found.tensors("rows"):
            counts, edges = np.histogram(self.own_rows(step), bins=4)
            np.testing.assert_array_equal(table[:, 2], counts)
            np.testing.assert_allclose([*table[:, 0], table[-1, 1]], edges, rtol=1e-6)
        for step, (picture,) in found.images("picture"):
            wanted = np.floor(self.own_rows(step) / np.float32(100) * np.float32(255.5))
            np.testing.assert_array_equal(picture[0], np.minimum(wanted, 255))
        odd = [step for step in steps if step % 2]
        assert found.numbers("odd") == [(s, self.own_rows(s).sum()) for s in odd]
        assert found.steps("odd_rows") == odd
        assert [table[:, 2].sum() for _, table in found.tensors("odd_rows")] == [
            len(self.own_rows(0))
        ] * len(odd)


def program_of(name: str) -> Program:
    strategy = STRATEGIES[name]()

    class Mean(Program):
        def __init__(self, strategy: Any) -> None:
            super().__init__(strategy)
            with strategy.scope():
                self.weight = sg.Variable(np.full(4, 2.0, np.float32), name="w", aggregation="mean")
                self.count = sg.Variable(
                    0, dtype="int32", trainable=False, aggregation="only_first_replica"
                )

    return Mean(strategy)


@pytest.mark.parametrize("name", STRATEGIES)
def test_steps_write_what_replica_0_computed(name: str, tmp_path: Path) -> None:
    program = program_of(name)
    writer = sg.summary.create_file_writer(tmp_path)
    with writer.as_default(step=program.count):
        for batch in program.strategy.distribute_dataset(BATCHES):
            program.strategy.run(program.step, args=(batch,))
    writer.close()
    program.check(Read(tmp_path), [*range(NUM_STEPS)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one_device", "mirrored_2", "all_in_parts", "central_storage"])
def test_many_steps_of_a_call_write_each(name: str, tmp_path: Path) -> None:
    program = program_of(name)
    writer = sg.summary.create_file_writer(tmp_path)
    iterator = iter(program.strategy.distribute_dataset(BATCHES))
    with writer.as_default(step=program.count):
        program.strategy.run_steps(program.step, iterator, 3)
        program.strategy.run_steps(program.step, iterator, 3)  # one is left
    writer.close()
    program.check(Read(tmp_path), [*range(NUM_STEPS)])


@pytest.mark.parametrize(
    "name",
    [
        "default",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("one_device", "mirrored_2", "all_in_parts")
        ),
    ],
)
def test_eager_steps_write_the_same(name: str, tmp_path: Path) -> None:
    program = program_of(name)
    writer = sg.summary.create_file_writer(tmp_path)
    sg.config.run_eagerly(True)
    try:
        with writer.as_default(step=program.count):
            for batch in program.strategy.distribute_dataset(BATCHES):
                program.strategy.run(program.step, args=(batch,))
    finally:
        sg.config.run_eagerly(False)
    writer.close()
    program.check(Read(tmp_path), [*range(NUM_STEPS)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one_device", "mirrored_2", "groups", "all_in_parts"])
def test_function_writes_its_own_and_those_of_its_steps(name: str, tmp_path: Path) -> None:
    program = program_of(name)
    strategy = program.strategy

    @sg.function
    def train(batch: Any) -> Any:
        losses = strategy.run(program.step, args=(batch,))
        total = strategy.reduce("sum", losses, axis=None)
        sg.summary.scalar("total", total, step=program.count.value - 1)
        return total

    totals = []
    writer = sg.summary.create_file_writer(tmp_path)
    with writer.as_default(step=program.count):
        totals = [float(train(b)) for b in strategy.distribute_dataset(BATCHES)]
    train(next(iter(strategy.distribute_dataset(BATCHES))))  # there is no writer
    writer.close()
    found = Read(tmp_path)
    program.check(found, [*range(NUM_STEPS)])
    assert found.numbers("total") == list(enumerate(totals))


def test_host_settings_are_those_of_each_call_and_nothing_is_traced_again(tmp_path: Path) -> None:
    strategy, num_traces = sg.MirroredStrategy(["cpu:0", "cpu:1"]), 0
    first, second = (sg.summary.create_file_writer(tmp_path / name) for name in "ab")

    def step(value: Any) -> None:
        nonlocal num_traces
        num_traces += 1
        sg.summary.scalar("value", value)
        sg.summary.histogram("spread", value)

    for number in range(6):
        value = jnp.asarray(float(number))
        writer = first if number < 4 else second
        with writer.as_default(step=number), sg.summary.record_if(lambda n=number: n % 2 == 0):
            strategy.run(step, args=(value,))
    assert num_traces == 1
    strategy.run(step, args=(jnp.asarray(7.0),))
    first.close(), second.close()
    assert Read(tmp_path / "a").numbers("value") == [(0, 0.0), (2, 2.0)]
    assert Read(tmp_path / "a").steps("spread") == [0, 2]
    assert Read(tmp_path / "b").numbers("value") == [(4, 4.0)]


def test_program_that_was_traced_without_a_writer_writes_when_there_is_one(tmp_path: Path) -> None:
    program = program_of("mirrored_2")
    batches = [*program.strategy.distribute_dataset(BATCHES)]
    program.strategy.run(program.step, args=(batches[0],))
    writer = sg.summary.create_file_writer(tmp_path)
    with writer.as_default(step=program.count):
        for batch in batches[1:]:
            program.strategy.run(program.step, args=(batch,))
    writer.close()
    program.check(Read(tmp_path), [1, 2, 3])


def test_writer_step_and_condition_of_the_step_itself_count(tmp_path: Path) -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    outer, inner = (sg.summary.create_file_writer(tmp_path / name) for name in "ab")

    def step(value: Any) -> None:
        with inner.as_default(step=7):
            sg.summary.scalar("inner", value)
        with sg.summary.record_if(condition=False):
            assert sg.summary.scalar("never", value) is False
        with sg.summary.record_if(condition=True):
            sg.summary.scalar("always", value, step=3)

    with outer.as_default(step=1), sg.summary.record_if(condition=False):
        strategy.run(step, args=(jnp.asarray(2.0),))
    with sg.summary.record_if(condition=False):
        strategy.run(step, args=(jnp.asarray(2.0),))
    outer.close(), inner.close()
    assert Read(tmp_path / "a").numbers("always") == [(3, 2.0)]
    assert Read(tmp_path / "a").tags == ["always"]
    assert not (tmp_path / "b").exists()


def test_step_without_a_number_is_refused_before_it_runs(tmp_path: Path) -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        count = sg.Variable(0, dtype="int32", aggregation="only_first_replica")

    def step() -> None:
        sg.summary.scalar("count", count.value)
        count.assign_add(1)

    with (
        sg.summary.create_file_writer(tmp_path).as_default(),
        pytest.raises(ValueError, match="has no step"),
    ):
        strategy.run(step)
    assert int(count) == 0


def test_steps_under_way_are_not_waited_for_and_a_flush_writes_all(tmp_path: Path) -> None:
    program = program_of("mirrored_2")
    writer = sg.summary.create_file_writer(tmp_path)
    batches = [*program.strategy.distribute_dataset(BATCHES)] * 20
    with writer.as_default(step=program.count):
        for batch in batches:
            program.strategy.run(program.step, args=(batch,))
        write_pending(waits=False)
        writer.flush()
        assert Read(tmp_path).steps("loss") == [*range(len(batches))]
    writer.close()


def test_condition_that_holds_nowhere_leaves_histograms_uncomputed(tmp_path: Path) -> None:
    """The histogram stands in a branch of the program that is taken where it is recorded."""
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])

    def step(rows: Any) -> None:
        sg.summary.histogram("rows", rows)

    (batch,) = strategy.distribute_dataset([BATCHES[0]])
    strategy.run(step, args=(batch,))
    (program,) = {id(one): one for one in strategy.executor.programs}.values()
    outer = {eqn.primitive.name for eqn in program.trace.jaxpr.jaxpr.eqns}
    assert "cond" in outer
    assert not outer & {"reduce_min", "scatter-add", "sort"}
    assert not program.trace.jaxpr.effects - {
        effect for effect in program.trace.jaxpr.effects if "NamedAxis" in type(effect).__name__
    }


def test_step_under_jit_writes_by_callbacks(tmp_path: Path) -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])

    def noted(value: Any) -> Any:
        sg.summary.scalar("v", value)
        return value

    step = jax.jit(lambda value: strategy.run(noted, args=(value,)).stacked)
    writer = sg.summary.create_file_writer(tmp_path)
    for number in range(3):
        with writer.as_default(step=number):
            step(jnp.asarray(float(number)))
    writer.close()
    assert Read(tmp_path).numbers("v") == [(0, 0.0), (1, 1.0), (2, 2.0)]
