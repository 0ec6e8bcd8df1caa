"""The step of a member that is left out: its values are those of the others, without their work."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices.collectives.elastic_rounds import serve_rounds
from stratagem.devices.mesh import Topology
from stratagem.execution.programs import elastic_lockstep
from stratagem.execution.programs.elastic_lockstep import ElasticLockstep, OutsideVariables
from stratagem.execution.programs.elastic_program import ElasticProgram, RoundAbortedError
from stratagem.execution.tracing.arguments import Arguments, batch_arguments
from stratagem.execution.tracing.tracer import trace_replica_function
from stratagem.input.batches import take_batch, take_own_part
from stratagem.input.placement import place
from stratagem.keras.training.replica_steps import ReplicaSteps


class _Sums:
    """Stands in for the connections of a member whose peers have twice its values, and 1."""

    def reduce(self, own: np.ndarray, total: np.ndarray, ufunc: np.ufunc) -> None:
        total[...] = ufunc(own, own * 2 + 1)

    def gather_into(self, own: np.ndarray, everyone: np.ndarray) -> None:
        everyone.reshape(2, own.size)[...] = own


class _Group:
    """A group that records the results of a round, and gives them to one that is left out."""

    num_backups = 1
    has_taken_part = True

    def __init__(self) -> None:
        self.results: list[np.ndarray] = []
        self._place = 0

    def operate(self, operation: Callable[[Any], None], result: np.ndarray) -> bool:
        if self.has_taken_part:
            operation(_Sums())
            self.results.append(result.copy())
        else:
            result[...] = self.results[self._place]
            self._place += 1
        return True

    def commit(self) -> bool:
        return True


@pytest.fixture
def group() -> Any:
    made: Any = _Group()
    serve_rounds(made)
    return made


def _dense() -> list[keras.Layer]:
    return [keras.Input((8,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(1)]


def _normalized() -> list[keras.Layer]:
    return [
        keras.Input((8,)),
        keras.layers.Dense(64),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(1, kernel_regularizer="l2"),
    ]


def _convolutional() -> list[keras.Layer]:
    return [
        keras.Input((8,)),
        keras.layers.Reshape((2, 4, 1)),
        keras.layers.Conv2D(16, 2, padding="same", activation="tanh"),
        keras.layers.Flatten(),
        keras.layers.Dense(1),
    ]


_MODELS = {
    "Adam": (_dense, lambda: keras.optimizers.Adam(0.01)),
    "momentum, clipped": (
        _dense,
        lambda: keras.optimizers.SGD(
            keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9),
            momentum=0.9,
            nesterov=True,
            global_clipnorm=1.0,
        ),
    ),
    "batch normalization": (_normalized, lambda: keras.optimizers.AdamW(0.01)),
    "convolution": (_convolutional, lambda: keras.optimizers.RMSprop(0.01)),
}


def _program(
    layers: list[keras.Layer], optimizer: Any, group: Any, num_rows: int = 16
) -> tuple[ElasticProgram, Arguments]:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(layers)
        model.compile(optimizer, "mse", metrics=["mae"])
    rng = np.random.default_rng(0)
    data = rng.normal(size=(num_rows, 8)).astype("float32"), np.ones((num_rows, 1), "float32")
    batch = take_own_part(data, strategy.topology)
    arguments = batch_arguments(place([batch], strategy.topology))
    trace = trace_replica_function(strategy, ReplicaSteps(model).train, arguments)
    return ElasticProgram(trace, strategy.topology, "step", group), arguments


def _inputs(program: ElasticProgram, arguments: Arguments, seed: int) -> list[Any]:
    """Returns the values of the variables, and rows from a seed."""
    written, read_only, constants = program._lasting_inputs()
    rng = np.random.default_rng(seed)
    split = [
        rng.normal(size=(1, *array.shape[1:])).astype(array.dtype) for array in arguments.split
    ]
    local = [[np.asarray(one.addressable_data(0)) for one in pool] for pool in (written, read_only)]
    constants = [np.asarray(one.addressable_data(0)) for one in constants]
    return [np.int32(0), *local, split, [], constants, []]


def _stepped(
    program: ElasticProgram, inputs: list[Any], *, follows: bool = False
) -> tuple[list[Any], Any]:
    """Runs a step and its update; returns the new values, and True if they count."""
    step = jax.jit(functools.partial(program._step_of_member, follows=follows))
    values, _, _, is_committed, combined = step(*inputs)
    flat = [jnp.array(one) for one in jax.tree.leaves(inputs[1:])]  # the update donates some
    [update] = program._updates
    new = update.run(flat, combined)
    values = [new[place] if value is None else value for place, value in enumerate(values)]
    return values, is_committed


@pytest.mark.slow
@pytest.mark.parametrize("name", _MODELS)
def test_one_that_is_left_out_has_the_bits_of_the_others(group, name) -> None:
    layers, optimizer = _MODELS[name]
    program, arguments = _program(layers(), optimizer(), group, num_rows=15)
    assert program._may_leave_out
    inputs = _inputs(program, arguments, 1)
    values, is_committed = _stepped(program, inputs)
    jax.block_until_ready(values)
    assert bool(is_committed)
    group.has_taken_part = False
    others = _inputs(program, arguments, 2)
    followed, is_committed = _stepped(program, others, follows=True)
    assert bool(is_committed)
    num_trained = 0
    for place_, mine, theirs, before in zip(
        program._written.places, followed, values, inputs[1], strict=True
    ):
        if place_.spec:  # what it has counted itself
            np.testing.assert_array_equal(mine, before)
        else:
            np.testing.assert_array_equal(mine, theirs)
            num_trained += not np.array_equal(mine, before)
    assert num_trained > 3
    assert group._place == len(group.results)


def test_one_that_is_late_keeps_what_it_has_counted(group) -> None:
    """It has computed its step before it hears that the others have made the round."""
    program, arguments = _program(_dense(), keras.optimizers.Adam(0.01), group)
    values, _ = _stepped(program, _inputs(program, arguments, 1))
    jax.block_until_ready(values)
    group.has_taken_part = False
    inputs = _inputs(program, arguments, 2)
    late, _ = _stepped(program, inputs)
    for place_, mine, theirs, before in zip(
        program._written.places, late, values, inputs[1], strict=True
    ):
        np.testing.assert_array_equal(mine, before if place_.spec else theirs)


def test_one_that_is_left_out_computes_neither_forward_nor_backward(group) -> None:
    program, arguments = _program(_dense(), keras.optimizers.SGD(0.01), group, num_rows=2048)
    inputs = _inputs(program, arguments, 1)
    num_parameters = sum(one.size for one in inputs[1])

    def work(*, follows: bool) -> tuple[float, str]:
        step = functools.partial(program._step_of_member, follows=follows)
        compiled: Any = jax.jit(step).lower(*inputs).compile()
        return compiled.cost_analysis()["flops"], compiled.as_text()

    (flops, text), (few_flops, short_text) = work(follows=False), work(follows=True)
    assert flops > 2 * 1024 * 8 * 64
    assert few_flops < 20 * num_parameters
    assert "dot" in text
    assert "dot(" not in short_text


def test_results_of_one_that_is_late_are_zeros(group) -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        weight = sg.Variable(1.0)

    def step(x: Any) -> Any:
        loss, (gradient,) = sg.value_and_grad(lambda: jnp.sum(x * weight.value), [weight])
        total = sg.get_replica_context().all_reduce("sum", gradient)
        weight.assign_sub(total)
        return loss, total

    arguments = batch_arguments(
        place([take_own_part(np.ones(4, np.float32), strategy.topology)], strategy.topology)
    )
    trace = trace_replica_function(strategy, step, arguments)
    program = ElasticProgram(trace, strategy.topology, "step", group)
    inputs = _inputs(program, arguments, 1)
    _, _, (_, total), *_ = jax.jit(program._step_of_member)(*inputs)
    jax.block_until_ready(total)
    group.has_taken_part = False
    follow = jax.jit(functools.partial(program._step_of_member, follows=True))
    _, _, (loss, same), *_ = follow(*inputs)
    assert np.asarray(loss).tolist() == [0.0]
    np.testing.assert_array_equal(same, total)


# Steps of an elastic group with a group and programs that are made up.


class _ElasticLockstepGroup:
    num_places = 3

    def __init__(self) -> None:
        self.num_welcomes = 0

    def welcome(self) -> None:
        self.num_welcomes += 1


@pytest.fixture
def group_of_elastic_lockstep(monkeypatch) -> _ElasticLockstepGroup:
    made = _ElasticLockstepGroup()
    monkeypatch.setattr(elastic_lockstep, "current_group", lambda: made)
    return made


def _topology(count: int) -> Topology:
    return Topology(tuple(jax.devices()[:count]))


class _Steps(ElasticLockstep):
    """An executor whose programs return the rows that they are given; `act` is called before."""

    def __init__(self, act: Any = lambda place: None) -> None:
        self._strategy: Any = types.SimpleNamespace(topology=_topology(3))
        self.keeps_worker_rows = False
        self.calls: list[tuple[int, Any]] = []
        self._act = act

    def program(self, fn: Any, arguments: Any) -> Any:
        self._act("program")
        return types.SimpleNamespace(run=lambda given: self._run(given))

    def _run(self, arguments: Any) -> Any:
        self._act("run")
        self.calls.append((self._strategy.topology.num_replicas, arguments))
        return arguments


def test_a_member_lost_while_a_program_is_made_changes_the_arguments(
    group_of_elastic_lockstep,
) -> None:
    """The exchange of initial values, between trace and step, may be where it is noticed."""

    def lose(place: str) -> None:
        if place == "program":
            steps._strategy.topology = two

    two, steps = _topology(2), _Steps(lose)
    result, topology = steps._run_until_committed(
        print, lambda: [steps._strategy.topology.num_replicas]
    )
    assert (result, topology) == (2, two)
    assert steps.calls == [(2, 2)]


def test_a_step_that_a_loss_has_broken_runs_again(group_of_elastic_lockstep) -> None:
    losses = [_topology(2), _topology(1)]

    def lose(place: str) -> None:
        if place == "run" and losses:
            steps._strategy.topology = losses.pop(0)
            raise RoundAbortedError

    steps = _Steps(lose)
    result, topology = steps._run_until_committed(
        print, lambda: [steps._strategy.topology.num_replicas]
    )
    assert (result, topology.num_replicas, group_of_elastic_lockstep.num_welcomes) == (1, 1, 2)


@pytest.mark.parametrize(
    ("num_members", "keeps", "ends"),
    [(3, True, [32]), (2, True, [22, 32]), (1, True, [11, 22, 32]), (1, False, [32])],
)
def test_a_step_ends_where_the_rows_of_its_members_do(
    group_of_elastic_lockstep, num_members, keeps, ends
) -> None:
    steps = _Steps()
    steps.keeps_worker_rows = keeps
    batch = take_batch(np.arange(32.0), num_members)
    found = [0]
    while found[-1] < 32:
        found.append(steps._end(batch, found[-1], _topology(num_members)))
    assert found[1:] == ends


def test_every_row_of_a_batch_is_in_one_step(group_of_elastic_lockstep, monkeypatch) -> None:
    """A member is lost after the first of two steps."""
    parts = []

    def placed(batches: list[Any], topology: Topology) -> Any:
        parts.append(batches[0].whole())
        return len(parts) - 1

    monkeypatch.setattr(elastic_lockstep, "place", placed)
    monkeypatch.setattr(elastic_lockstep, "batch_arguments", lambda place: place)

    def lose(place: str) -> None:
        if place == "run" and len(steps.calls) == 1:
            steps._strategy.topology = _topology(1)

    steps = _Steps(lose)
    steps._strategy.topology = _topology(2)
    steps.keeps_worker_rows = True
    steps._run_batch(print, take_batch(np.arange(32.0), 2), None)
    rows = [parts[place] for _, place in steps.calls]
    np.testing.assert_array_equal(np.concatenate(rows), np.arange(32.0))


# Variables of no strategy, which processes that join receive as well.


def test_they_are_in_the_order_of_their_first_use() -> None:
    with sg.OneDeviceStrategy("cpu:0").scope():
        own = sg.Variable(1.0)
    first, second = keras.Variable(1.0), keras.Variable(2.0)
    outside = OutsideVariables()
    outside.note([first, own, second, first], "step")
    assert [id(one) for one in outside] == [id(first), id(second)]
    del second
    assert [id(one) for one in outside] == [id(first)]


def test_values_that_were_not_received_are_refused() -> None:
    first, second = keras.Variable(1.0), keras.Variable(2.0, name="late")
    outside = OutsideVariables()
    outside.note([first], "step")
    outside.end()
    outside.note([first], "step")
    with pytest.raises(ValueError, match="step uses variable 'late', which was made outside"):
        outside.note([second], "step")
