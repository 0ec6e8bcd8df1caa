"""Collectives of a step, by operations of a group of members that are threads of this process."""

from __future__ import annotations

import itertools
import socket
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import stratagem as sg
from stratagem.devices.elastic_rounds import RoundOperation
from stratagem.devices.mesh import REPLICA_AXIS, Topology
from stratagem.execution.jaxprs import retrace
from stratagem.execution.programs import elastic
from stratagem.execution.programs.elastic import (
    ElasticLockstep,
    ElasticProgram,
    OutsideVariables,
    RoundAbortedError,
    components_of_all,
    member_rules,
)
from stratagem.execution.programs.program import FunctionKeys
from stratagem.execution.tracing.arguments import flatten_arguments
from stratagem.group.elastic.peer_connections import PeerConnections
from stratagem.input.batches import take_batch
from tests.unit.group.process_group.members import together

_COUNT = 2
_UFUNCS = {
    RoundOperation.SUM: np.add,
    RoundOperation.MAX: np.maximum,
    RoundOperation.MIN: np.minimum,
}


class _EagerRounds:
    """Operations that run at once, instead of within a program."""

    def __init__(self, peers: PeerConnections) -> None:
        self._peers = peers

    def combine(self, operation: RoundOperation, array: Any) -> jax.Array:
        own = np.asarray(array)
        result = np.empty(own.size, own.dtype)
        self._peers.reduce(own.ravel(), result, _UFUNCS[operation])
        return jnp.asarray(result.reshape(own.shape))

    def gather(self, array: Any, num_members: int) -> jax.Array:
        own = np.asarray(array)
        result = np.empty((num_members, *own.shape), own.dtype)
        self._peers.gather_into(own.ravel(), result.reshape(-1))
        return jnp.asarray(result)

    def all_to_all(self, array: Any) -> jax.Array:
        own = np.ascontiguousarray(array)
        result = np.empty_like(own)
        self._peers.all_to_all(own.ravel(), result.reshape(-1))
        return jnp.asarray(result)


def _by_members(step: Callable[[Any], Any], values: np.ndarray) -> list[Any]:
    """Returns the result of each member, from one trace of the step."""
    traced = jax.make_jaxpr(step, axis_env=[(REPLICA_AXIS, _COUNT)])(values[0])
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(_COUNT)]
    for one, other in itertools.combinations(range(_COUNT), 2):
        sockets[one][other], sockets[other][one] = socket.socketpair()

    def run(rank: int) -> Any:
        peers = PeerConnections(0, range(_COUNT), rank, sockets[rank], lambda waited_s: None)
        rounds: Any = _EagerRounds(peers)
        rules = member_rules(rounds, jnp.int32(rank), _COUNT)
        try:
            return [np.asarray(one) for one in retrace(traced, [values[rank]], rules=rules)]
        finally:
            peers.close()

    return together(_COUNT, run)


def _by_jax(step: Callable[[Any], Any], values: np.ndarray) -> list[Any]:
    mesh = Mesh(np.array(jax.devices("cpu")[:_COUNT]), (REPLICA_AXIS,))
    spec = PartitionSpec(REPLICA_AXIS)

    def body(part: Any) -> list[Any]:
        return [one[None] for one in jax.tree.leaves(step(part[0]))]

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    return [[np.asarray(one[rank]) for one in run(values)] for rank in range(_COUNT)]


_STEPS = {
    "psum": lambda x: jax.lax.psum(x * 2, REPLICA_AXIS),
    "psum of two": lambda x: jax.lax.psum((x, x.sum()), REPLICA_AXIS),
    "pmax": lambda x: jax.lax.pmax(x, REPLICA_AXIS),
    "pmin": lambda x: jax.lax.pmin(-x, REPLICA_AXIS),
    "index": lambda x: x + jax.lax.axis_index(REPLICA_AXIS).astype(x.dtype),
    "index in a loop": lambda x: jax.lax.fori_loop(
        0, 3, lambda i, y: y + (i * jax.lax.axis_index(REPLICA_AXIS)).astype(y.dtype), x
    ),
    "all_gather": lambda x: jax.lax.all_gather(x, REPLICA_AXIS, axis=1),
    "all_gather, tiled": lambda x: jax.lax.all_gather(x, REPLICA_AXIS, axis=1, tiled=True),
    "psum_scatter": lambda x: jax.lax.psum_scatter(
        x, REPLICA_AXIS, scatter_dimension=1, tiled=True
    ),
    "all_to_all": lambda x: jax.lax.all_to_all(x, REPLICA_AXIS, split_axis=1, concat_axis=0),
    "all_to_all, tiled": lambda x: jax.lax.all_to_all(
        x, REPLICA_AXIS, split_axis=0, concat_axis=1, tiled=True
    ),
    "ppermute": lambda x: jax.lax.ppermute(x, REPLICA_AXIS, [(0, 1)]),
    "in a function": lambda x: jax.jit(lambda y: jax.lax.psum(y, REPLICA_AXIS))(x),
    "gradient": jax.grad(lambda x: (jax.lax.psum(x, REPLICA_AXIS) ** 2).sum()),
}


@pytest.mark.parametrize("name", _STEPS)
def test_members_compute_what_devices_do(name) -> None:
    values = np.random.default_rng(0).normal(size=(_COUNT, 4, 2)).astype(np.float32)
    found, expected = _by_members(_STEPS[name], values), _by_jax(_STEPS[name], values)
    for mine, theirs in zip(found, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


def _in_loop(x: Any) -> Any:
    return jax.lax.fori_loop(0, 2, lambda i, y: jax.lax.psum(y, REPLICA_AXIS), x)


def _in_groups(x: Any) -> Any:
    return jax.lax.psum(x, REPLICA_AXIS, axis_index_groups=[[0], [1]])


@pytest.mark.parametrize(
    ("step", "words"),
    [(_in_loop, "calls psum in a branch or a loop"), (_in_groups, "over groups of replicas")],
)
def test_what_has_no_order_is_refused(step, words) -> None:
    for error in _by_members(step, np.ones((_COUNT, 2), np.float32)):
        assert isinstance(error, NotImplementedError)
        assert words in str(error)
    traced = jax.make_jaxpr(
        lambda x: jax.lax.psum(x, (REPLICA_AXIS, "other")),
        axis_env=[(REPLICA_AXIS, 2), ("other", 1)],
    )(np.float32(1))
    rounds: Any = None
    with pytest.raises(NotImplementedError, match="the axis 'replica' alone"):
        retrace(traced, [np.float32(1)], rules=member_rules(rounds, jnp.int32(0), 2))


# Components of ON_READ variables that each member of an elastic group keeps of all.


class _Gathers:
    """Stands in for rounds with a peer whose values are 1 larger; counts the messages."""

    def __init__(self) -> None:
        self.dtypes: list[Any] = []

    def gather(self, own: jax.Array, count: int) -> jax.Array:
        self.dtypes.append(own.dtype)
        return jnp.stack([own + rank for rank in range(count)])


def test_components_of_all_have_one_message_for_each_dtype() -> None:
    rounds: Any = _Gathers()
    assert components_of_all([], rounds, 2) == []
    own = [
        jnp.arange(6.0).reshape(1, 2, 3),
        jnp.array([4], jnp.int32),
        jnp.array([[0.5]]),
        jnp.array([[7, 8]], jnp.int32),
    ]
    found = components_of_all(own, rounds, 3)
    assert rounds.dtypes == [jnp.float32, jnp.int32]
    for mine, everyone in zip(own, found, strict=True):
        wanted = np.concatenate([np.asarray(mine) + rank for rank in range(3)])
        np.testing.assert_array_equal(everyone, wanted)
        assert everyone.dtype == mine.dtype


# Steps of an elastic group, which run again if a member is lost; group and programs are made up.


@pytest.fixture
def welcomes(monkeypatch) -> list[int]:
    made: list[int] = []
    admissions = types.SimpleNamespace(wanted_size=None)
    group = types.SimpleNamespace(admissions=admissions, welcome=lambda: made.append(1))
    monkeypatch.setattr(elastic, "current_group", lambda: group)
    return made


def _topology(count: int) -> Topology:
    return Topology(tuple(jax.devices()[:count]))


class _Steps(ElasticLockstep):
    """An executor whose programs return the rows that they are given; `act` is called before."""

    def __init__(self, act: Any = lambda place: None) -> None:
        self._strategy: Any = types.SimpleNamespace(topology=_topology(3))
        self._keys, self._prepared = FunctionKeys(), set[Any]()
        self.calls: list[tuple[int, Any]] = []
        self._act = act

    def program(self, fn: Any, arguments: Any) -> Any:
        self._act("program")
        return types.SimpleNamespace(
            run=lambda given: self._run(given), is_worth_preparing=lambda **given: False
        )

    def _run(self, arguments: Any) -> Any:
        self._act("run")
        self.calls.append((self._strategy.topology.num_replicas, arguments))
        return arguments


def test_a_member_lost_while_a_program_is_made_changes_the_arguments(welcomes) -> None:
    """The exchange of initial values, between trace and step, may be where it is noticed."""

    def lose(place: str) -> None:
        if place == "program":
            steps._strategy.topology = two

    two, steps = _topology(2), _Steps(lose)
    result: Any = steps._run_until_committed(print, lambda: steps._strategy.topology.num_replicas)
    assert result == 2
    assert steps.calls == [(2, 2)]


def test_a_step_that_a_loss_has_broken_runs_again(welcomes) -> None:
    losses = [_topology(2), _topology(1)]

    def lose(place: str) -> None:
        if place == "run" and losses:
            steps._strategy.topology = losses.pop(0)
            raise RoundAbortedError

    steps = _Steps(lose)
    result: Any = steps._run_until_committed(print, lambda: steps._strategy.topology.num_replicas)
    assert (result, len(welcomes)) == (1, 2)


def test_a_batch_is_split_again_among_those_that_are_left(welcomes, monkeypatch) -> None:
    parts: list[tuple[Any, int]] = []

    def placed(batches: list[Any], topology: Topology) -> None:
        parts.append((batches[0].whole(), topology.num_replicas))

    monkeypatch.setattr(elastic, "placed_batches", placed)
    monkeypatch.setattr(elastic, "batch_arguments", lambda placed: placed)

    def lose(place: str) -> None:
        if place == "run" and len(parts) == 1:
            steps._strategy.topology = _topology(1)
            raise RoundAbortedError

    steps = _Steps(lose)
    steps._strategy.topology = _topology(2)
    steps._run_batch(print, take_batch(np.arange(32.0), 2), None)
    assert [count for _, count in parts] == [2, 1]
    for rows, _ in parts:
        np.testing.assert_array_equal(rows, np.arange(32.0))


def test_a_program_for_other_members_has_its_plain_sibling_there_too(welcomes, tmp_path) -> None:
    """It runs for the steps whose summaries are not recorded."""
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    steps = ElasticLockstep(strategy)

    def step(x: Any) -> Any:
        sg.summary.histogram("x", x, step=0)
        return x + 1

    with strategy.scope(), sg.summary.create_file_writer(str(tmp_path)).as_default():
        program = steps.program(step, flatten_arguments((np.float32(1),), {}, num_replicas=2))
    devices = jax.devices()[2:4]
    moved = program.on(Topology(tuple(devices))).on(Topology(tuple(devices[::-1])))
    for one in (moved, moved.make_plain and moved.make_plain()):
        assert isinstance(one, ElasticProgram)
        stacked = one._sharding_of(PartitionSpec(REPLICA_AXIS))
        assert stacked.device_set == set(devices)
        assert [*stacked._device_assignment] == devices[::-1]


# Variables of no strategy, which processes that join receive as well.


def test_values_that_were_not_received_are_refused() -> None:
    first, second = keras.Variable(1.0), keras.Variable(2.0, name="late")
    outside = OutsideVariables()
    outside.note([first], "step")
    outside.end()
    outside.note([first], "step")
    with pytest.raises(ValueError, match="step uses variable 'late', which was made outside"):
        outside.note([second], "step")
