"""Summaries of a step are written once, by replica 0, with what is set when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices.mesh import Topology
from stratagem.execution.programs import steps
from stratagem.execution.programs.steps import QueuedInput, loop_options
from stratagem.execution.summary.writer import write_pending
from tests.marks import slow
from tests.parity.comparison import mirrored
from tests.unit.execution.programs.test_convolutions import arguments_of
from tests.unit.execution.summary.events import Read

STRATEGIES = {
    "default": lambda: sg.get_strategy(),
    "one_device": lambda: sg.OneDeviceStrategy("cpu:1"),
    "mirrored_2": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"]),
    "groups": lambda: sg.MirroredStrategy([["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]),
    "all_in_parts": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"], shard_state="all"),
    "central_storage": lambda: sg.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:2"),
    "hybrid_sharded": lambda: sg.HybridStrategy(["cpu:0", "cpu:1"], placement={"w": "sharded"}),
}
NUM_STEPS = 4
BATCHES = [np.arange(8, dtype=np.float32) + 10 * step for step in range(NUM_STEPS)]


class Program:
    """A step of training with summaries of all kinds, and what it should write."""

    def __init__(self, name: str) -> None:
        self.strategy: Any = STRATEGIES[name]()
        with self.strategy.scope():
            self.weight = sg.Variable(np.full(4, 2.0, np.float32), name="w", aggregation="mean")
            self.count = sg.Variable(
                0, dtype="int32", trainable=False, aggregation="only_first_replica"
            )
        self.num_replicas = self.strategy.num_replicas_in_sync
        self.totals: list[tuple[int, float]] = []

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
        return float(4 * (2 + step) * self.own_rows(step).sum())  # a step adds the mean of ones

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


def _by_steps_of_a_call(program: Program) -> None:
    iterator = iter(program.strategy.distribute_dataset(BATCHES))
    for _ in range(2):  # and one step is left for the second
        program.strategy.run_steps(program.step, iterator, 3)


def _by_function(program: Program) -> None:
    @sg.function
    def train(batch: Any) -> Any:
        losses = program.strategy.run(program.step, args=(batch,))
        total = program.strategy.reduce("sum", losses, axis=None)
        sg.summary.scalar("total", total, step=program.count.value - 1)
        return total

    dataset = program.strategy.distribute_dataset(BATCHES)
    program.totals = list(enumerate(float(train(batch)) for batch in dataset))
    with sg.summary.create_noop_writer().as_default():
        train(next(iter(dataset)))


def _one_by_one(program: Program) -> None:
    for batch in program.strategy.distribute_dataset(BATCHES):
        program.strategy.run(program.step, args=(batch,))


def _eagerly(program: Program) -> None:
    sg.config.run_eagerly(True)
    try:
        _one_by_one(program)
    finally:
        sg.config.run_eagerly(False)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, _one_by_one) for name in ("default", "mirrored_2", "all_in_parts")),
        ("central_storage", _one_by_one),
        ("default", _eagerly),
        slow("groups", _one_by_one),
        slow("hybrid_sharded", _one_by_one),
        slow("mirrored_2", _eagerly),
        slow("mirrored_2", _by_steps_of_a_call),
        slow("central_storage", _by_steps_of_a_call),
        slow("one_device", _by_function),
        slow("mirrored_2", _by_function),
    ],
)
def test_steps_write_what_replica_0_computed(name: str, way: Any, tmp_path: Path) -> None:
    program = Program(name)
    writer = sg.summary.create_file_writer(tmp_path)
    with writer.as_default(step=program.count):
        way(program)
    writer.close()
    found = Read(tmp_path)
    program.check(found, [*range(NUM_STEPS)])
    assert way is not _by_function or found.numbers("total") == program.totals


def test_host_settings_are_those_of_each_call_and_nothing_is_traced_again(tmp_path: Path) -> None:
    strategy, num_traces = sg.MirroredStrategy(["cpu:0", "cpu:1"]), 0
    first, second = (sg.summary.create_file_writer(tmp_path / name) for name in "ab")

    def step(value: Any) -> None:
        nonlocal num_traces
        num_traces += 1
        sg.summary.scalar("value", value)
        sg.summary.histogram("spread", value)

    strategy.run(step, args=(jnp.asarray(-1.0),))  # without a writer
    for number in range(6):
        value = jnp.asarray(float(number))
        writer = first if number < 4 else second
        with writer.as_default(step=number), sg.summary.record_if(lambda n=number: n % 2 == 0):
            strategy.run(step, args=(value,))
    assert num_traces == 2, "without a writer, and with one"
    strategy.run(step, args=(jnp.asarray(7.0),))
    first.close(), second.close()
    assert Read(tmp_path / "a").numbers("value") == [(0, 0.0), (2, 2.0)]
    assert Read(tmp_path / "a").steps("spread") == [0, 2]
    assert Read(tmp_path / "b").numbers("value") == [(4, 4.0)]


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
    program = Program("mirrored_2")
    writer = sg.summary.create_file_writer(tmp_path)
    batches = [*program.strategy.distribute_dataset(BATCHES)] * 6
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


# Numbers of compiled programs, by strategy and function.


def test_each_program_has_its_reason() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])

    def total(batch, factor, training):
        return batch["x"].sum() * jnp.asarray(factor, batch["x"].dtype)

    batches = [np.ones(shape, dtype) for shape, dtype in ((4, "f4"), (6, "f4"), (6, "i4"))]
    for batch in batches:
        for factor in (2.0, 3.0):  # the second value needs no new program
            strategy.run(total, args=({"x": batch}, factor), kwargs={"training": True})
    strategy.run(total, args=({"x": batches[2]}, 2.0), kwargs={"training": False})
    strategy.run(total, args=({"x": batches[2]}, np.float32(2)), kwargs={"training": False})
    strategy.run(total, args=({"y": batches[0], "x": batches[0]}, 2.0, True))
    with strategy.scope():
        records = sg.explain_recompiles()
    line = total.__code__.co_firstlineno
    assert str(records[0]) == f"{total.__qualname__} ({__file__}:{line}): first call"
    reasons = [record.reason for record in records]
    assert reasons[:-1] == [
        "first call",
        "args[0]['x']: float32[4] -> float32[6]",
        "args[0]['x']: float32[6] -> int32[6]",
        "kwargs['training']: True -> False",
        "args[1]: float32[]: Python number -> array",
    ]
    assert reasons[-1].startswith("arguments: [")


def strategy_reasons(strategy) -> list[str]:
    return [record.reason for record in sg.explain_recompiles(strategy)]


def test_other_objects_true_rows_kinds_of_numbers_and_values_are_reasons() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])

    def total(x, option):
        return x.sum()

    class Option:
        def __repr__(self) -> str:
            return "Option()"

    for option in (Option(), Option()):
        strategy.run(total, args=(np.float32(1), option))
    assert strategy_reasons(strategy)[1] == "args[1]: another object, Option()"

    def identity(x):
        return x

    for rows in (4, 3):
        (batch,) = strategy.distribute_dataset([np.ones(rows, np.float32)])
        strategy.run(lambda x: x, args=(batch,))
    # Keys of `jax.random.key` have a dtype that NumPy does not know.
    keys = jax.random.split(jax.random.key(0), 3)
    of_replicas = strategy.run(identity, args=(keys[0],))
    for argument in (of_replicas, keys, jnp.ones(3, jnp.bfloat16), jnp.ones(3, jnp.int4)):
        strategy.run(identity, args=(argument,))
    assert strategy_reasons(strategy)[2:] == [
        "first call",
        "args[0]: float32[2,2]: all rows -> rows (2, 1)",
        "first call",
        "args[0]: key<fry>[] -> key<fry>[2]",  # one for each replica
        "args[0]: key<fry>[2] -> key<fry>[3]",
        "args[0]: key<fry>[3] -> bfloat16[3]",
        "args[0]: bfloat16[3] -> int4[3]",
    ]
    strategy = sg.OneDeviceStrategy("cpu:0")
    for factor in (1.0, 2.0):
        strategy.run(lambda x: x * factor, args=(1.0,))  # noqa: B023 - the case
    reason = "a new function: the values of ['factor'] in it differ"
    assert strategy_reasons(strategy) == ["first call", reason]


# Calls that have not finished hold a bounded amount of input on the devices.

_MEBIBYTE = 1 << 20


class _Call:
    """A call in flight, which notes when it is awaited."""

    def __init__(self, awaited: list[int], number: int) -> None:
        self._awaited, self._number = awaited, number

    def block_until_ready(self) -> None:
        self._awaited.append(self._number)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([300] * 6, [0, 1, 2]),  # 3 x 300 MiB fit into 1 GiB
        ([64] * 20, [0, 1, 2, 3]),
        ([5000] * 4, [0, 1]),  # one runs and one waits
        ([5000, 64, 64, 64], [0]),
        ([512, 512], []),
    ],
)
def test_oldest_calls_are_awaited_while_they_hold_too_much(sizes, expected) -> None:
    awaited: list[int] = []
    queue = QueuedInput()
    for number, size in enumerate(sizes):
        queue.add(_Call(awaited, number), size * _MEBIBYTE)
    assert awaited == expected


@pytest.mark.parametrize(
    ("by_steps", "num_replicas", "is_bounded"),
    [(False, 1, False), (False, 2, True), (True, 1, True), (True, 2, False)],
)
def test_steps_wait_for_earlier_steps_only_if_their_input_is_large(
    by_steps, num_replicas, is_bounded, monkeypatch
) -> None:
    sizes: list[int] = []
    add = QueuedInput.add
    monkeypatch.setattr(
        QueuedInput, "add", lambda self, done, size: sizes.append(size) or add(self, done, size)
    )
    if is_bounded:
        monkeypatch.setattr(steps, "_MOST_BYTES", 2500)
    strategy = mirrored(num_replicas)
    with strategy.scope():
        total = sg.Variable(0.0, aggregation="sum")
    step = lambda batch: total.assign_add(batch.sum())  # noqa: E731
    data = strategy.distribute_dataset([np.full((8, 40), n, "float32") for n in range(8)])
    iterator = iter(data)
    for _ in range(4 if by_steps else 8):
        if by_steps:
            strategy.run_steps(step, iterator, 2)
        else:
            strategy.run(step, args=(next(iterator),))
    assert float(total.numpy()) == 320 * sum(range(8))
    expected = [2560 // num_replicas] * 4 if by_steps else [1280 // num_replicas] * 8
    assert sizes == (expected if is_bounded else [])


# Compiler options of loops over steps, on devices that claim to be GPUs.

ROWS = np.arange(6, dtype="float32").reshape(3, 2)


@pytest.fixture
def strategy_of_loop_options(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr(Topology, "platform", "gpu")
    return sg.OneDeviceStrategy("cpu:0")


def test_slices_are_not_copied_on_a_second_stream(strategy_of_loop_options, monkeypatch) -> None:
    assert loop_options(sg.OneDeviceStrategy("cpu:0").topology) == {
        "xla_disable_hlo_passes": "dynamic-slice-copy-fusion-async-wrapper"
    }
    monkeypatch.setenv("XLA_FLAGS", "--xla_disable_hlo_passes=one,two")  # they stay disabled
    options = loop_options(strategy_of_loop_options.topology)
    assert options is not None
    assert options["xla_disable_hlo_passes"].startswith("one,two,dynamic-slice-")
    monkeypatch.undo()
    assert loop_options(strategy_of_loop_options.topology) is None


def test_only_loops_have_the_options(strategy_of_loop_options, monkeypatch) -> None:
    monkeypatch.setattr(steps, "loop_options", lambda topology: {"xla_of_this_test": "1"})
    doubled = _doubled(strategy_of_loop_options)
    np.testing.assert_array_equal(doubled.run(arguments_of(ROWS[0])), 2 * ROWS[0])
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_of_this_test"):
        doubled.run_many([jnp.asarray(ROWS)], [])


def test_a_loop_within_a_compiled_function_has_none(strategy_of_loop_options) -> None:
    doubled = _doubled(strategy_of_loop_options)
    results = doubled.run_many([jnp.asarray(ROWS)], [])  # with options
    np.testing.assert_array_equal(results, 2 * ROWS)

    @jax.jit
    def outer(rows):
        assert loop_options(strategy_of_loop_options.topology) is None
        return doubled.run_many([rows], [])

    np.testing.assert_array_equal(outer(jnp.asarray(ROWS)), 2 * ROWS)


def _doubled(strategy_of_loop_options):
    return strategy_of_loop_options.executor.program(lambda row: 2 * row, arguments_of(ROWS[0]))
