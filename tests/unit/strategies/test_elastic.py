"""`ElasticStrategy` in one process, its refusals, and what a process receives when it joins."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices import finding as separate_processes
from stratagem.errors import NOT_NEEDED, DataLossError, UnavailableError
from stratagem.execution.programs import elastic as elastic_lockstep
from stratagem.execution.programs.elastic import ElasticLockstep
from stratagem.group.elastic.joining import RunningGroup
from stratagem.group.elastic.peer_connections import PeerConnections, PeerLostError
from stratagem.strategies import elastic
from stratagem.strategies.elastic import ElasticAdmission
from tests.unit.group.process_group.members import together


def test_a_resolver_of_another_type_is_refused() -> None:
    resolver: object = "worker"
    with pytest.raises(ValueError, match="cluster_resolver='worker' is of type str"):
        sg.ElasticStrategy(resolver)  # pyright: ignore[reportArgumentType]


def _set_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}
    task = {"type": "worker", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))


def test_tls_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _set_cluster(monkeypatch)
    found = elastic.Credentials(None, certificates=object())  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(elastic.Credentials, "find", lambda *args, **kwargs: found)
    with pytest.raises(ValueError, match="STRATAGEM_TLS_DIR is set"):
        sg.ElasticStrategy()


def test_a_cluster_without_addresses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratagem.strategies.membership._labels", lambda *args: None)
    _set_cluster(monkeypatch)
    with pytest.raises(ValueError, match="does not list the address of every process"):
        sg.ElasticStrategy()


def test_several_devices_of_a_process_are_refused() -> None:
    with pytest.raises(RuntimeError, match="This process has 2 devices: cpu:0, cpu:1"):
        separate_processes.check_device(["cpu:0", "cpu:1"])


@pytest.mark.parametrize(
    ("platforms", "gpus", "has_plugin", "words"),
    [
        ("cuda,cpu", (), False, "JAX_PLATFORMS is 'cuda,cpu'"),
        (None, ("0", "1"), True, "this host's GPUs: 0, 1"),
        (None, ("0", "1"), False, ""),
        (None, (), True, ""),
        ("cpu", ("0",), True, ""),
    ],
)
def test_gpus_are_refused_before_jax_waits_for_those_of_others(
    monkeypatch, platforms, gpus, has_plugin, words
) -> None:
    monkeypatch.setattr(separate_processes, "local_gpus", lambda: gpus)
    monkeypatch.setattr(separate_processes, "_has_gpu_plugin", lambda: has_plugin)
    expected = pytest.raises(RuntimeError, match=words) if words else contextlib.nullcontext()
    with expected:
        separate_processes.check_platform(platforms)


def test_steps_that_cannot_run_again_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(sg.config, "runs_eagerly", lambda: True)
    strategy = sg.ElasticStrategy()
    executor = elastic_lockstep.ElasticLockstep(strategy)
    with pytest.raises(NotImplementedError, match="was called op by op"):
        executor.run(lambda: 1, (), {})


def test_a_step_compiled_for_other_members_leaves_other_threads_the_present_ones() -> None:
    strategy = sg.ElasticStrategy()
    executor: Any = elastic_lockstep.ElasticLockstep(strategy)
    found: list[int] = []

    def started(fn: Any, arguments: Any) -> None:
        found.append(strategy.num_replicas_in_sync)
        reader = threading.Thread(target=lambda: found.append(strategy.num_replicas_in_sync))
        reader.start()
        reader.join()

    executor._started = started
    executor._prepare(print, lambda: None, sg.MirroredStrategy(["cpu:0", "cpu:1"]).topology)
    assert [*found, strategy.num_replicas_in_sync] == [2, 1, 1]


def test_datasets_that_members_read_apart_are_refused(monkeypatch) -> None:
    strategy = sg.ElasticStrategy()
    monkeypatch.setattr(strategy, "executor", elastic_lockstep.ElasticLockstep(strategy))
    with pytest.raises(NotImplementedError, match="was called on an ElasticStrategy"):
        strategy.distribute_datasets_from_function(lambda context: [np.arange(2)])


def test_datasets_of_members_have_whole_batches(monkeypatch) -> None:
    strategy = sg.ElasticStrategy()
    monkeypatch.setattr(strategy, "executor", elastic_lockstep.ElasticLockstep(strategy))
    dataset = strategy.distribute_dataset([np.arange(4), np.arange(3)])
    assert [np.asarray(batch).tolist() for batch in dataset] == [[0, 1, 2, 3], [0, 1, 2]]
    batches = iter(dataset)
    next(batches)
    again = iter(dataset)
    again.set_state(batches.get_state())
    assert np.asarray(next(again)).tolist() == [0, 1, 2]


# States that a process receives when it joins: both sides in one process, without a cluster.


class _Group:
    """A group as an admission uses it; it is its own `admissions`."""

    def __init__(self, *, is_candidate: bool = False) -> None:
        self.admissions = self
        self.member = 0
        self.is_candidate, self.is_new = is_candidate, False
        self.calls: list[Any] = []
        self.num_calls = 0
        self.running: list[RunningGroup] = []
        self.sizes = {3}
        self.error: Exception | None = None
        self.on_join: Callable[[], None] = lambda: None
        self.deliver: Any = None

    def on_newcomers(self, deliver: Any) -> None:
        self.deliver = deliver

    def begin_call(self) -> int:
        self.num_calls += 1
        return self.num_calls

    def end_place(self) -> None:
        self.calls.append("end")

    def admit(self, place: str, *, may_retry: bool) -> None:
        self.calls.append((place, may_retry))

    def expect(self, running: RunningGroup) -> bool:
        is_other = len(running.members) not in self.sizes
        self.sizes.add(len(running.members))
        return is_other

    def join(self, place: str, look: Callable[[RunningGroup], bool]) -> bool:
        self.calls.append(place)
        for running in self.running:
            if look(running):
                return False
        if self.error is not None:
            raise self.error
        self.is_candidate = False
        self.on_join()
        return True

    def close(self) -> None:
        self.calls.append("close")


class _Side:
    """A process: its strategy, variables, group and admission."""

    def __init__(self, start: float, *, is_candidate: bool = False, shape: Any = (3,)) -> None:
        self.strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        self.group = _Group(is_candidate=is_candidate)
        group: Any = self.group
        self.admission = ElasticAdmission(self.strategy, group)
        with self.strategy.scope():
            self.variables = [
                sg.Variable(np.full(shape, start, np.float32), name="weights"),
                sg.Variable(np.int32(start), name="step"),
                sg.Variable(
                    np.float32(0),
                    name="total",
                    synchronization=sg.VariableSynchronization.ON_READ,
                    aggregation=sg.VariableAggregation.SUM,
                ),
            ]

    def hold(self, components: Sequence[float]) -> None:
        """Sets the components of the ON_READ variable, as a change of the members does."""
        total: Any = self.variables[2]
        array = np.asarray(components, np.float32)
        elastic.store_components(total, array, self.strategy.topology)
        total.whole.hold(total.storage, array)

    @property
    def values(self) -> list[Any]:
        return [np.asarray(variable.value).tolist() for variable in self.variables]


@pytest.fixture
def connections() -> Iterator[list[PeerConnections]]:
    """Those of members 0 and 1, which are threads here."""
    sides = [{1 - own: one} for own, one in enumerate(socket.socketpair())]
    made = [PeerConnections(1, (0, 1), own, sides[own], lambda waited_s: None) for own in range(2)]
    yield made
    for one in made:
        one.close()


def _deliver(connections: list[Any], sides: Sequence[_Side]) -> list[Any]:
    """Hands the state of member 0 to member 1; returns the errors of both."""

    def act(own: int) -> None:
        sides[own].group.member = own
        try:
            sides[own].group.deliver(connections[own], 0, [1])
        except Exception:
            connections[own].close()
            raise

    return together(2, act)


def test_a_process_that_joins_has_the_values_of_the_others(connections) -> None:
    first, second = _Side(5.0), _Side(1.0)
    first.hold([4.0, 6.0])
    first.admission.admit("fit:1", lambda: {"epoch": 2, "batch": 3}, may_retry=True)
    assert first.group.calls == [("fit:1", True)]
    assert _deliver(connections, [first, second]) == [None, None]
    assert second.values == [[1.0] * 3, 1, 0.0]  # until it has no use of its own for them
    second.group.is_new = True
    assert not second.admission.has_values(second.strategy.topology)
    second.group.is_new = False
    assert second.admission.has_values(second.strategy.topology)
    assert second.values == first.values == [[5.0] * 3, 5, 10.0]
    shards = second.variables[2].stored.addressable_shards
    assert [float(one.data[0]) for one in shards] == [4.0, 6.0]


def _with_outside(side: _Side, *variables: keras.Variable) -> None:
    """Makes a step use variables of no strategy."""
    executor = side.strategy.executor = ElasticLockstep(side.strategy)
    executor.outside_variables.note(variables, "step")


def test_variables_of_no_strategy_are_received_if_steps_use_them(connections) -> None:
    """They are found by their names, and one that no step of this process uses may be missing."""
    first, second = _Side(5.0), _Side(1.0)
    first.hold([4.0, 6.0])
    theirs = [keras.Variable(value, name=name) for value, name in [(7.0, "rate"), (8.0, "count")]]
    own = keras.Variable(0.0, name="count")
    _with_outside(first, *theirs)
    _with_outside(second, own)
    assert _deliver(connections, [first, second]) == [None, None]
    second.admission.restore()
    assert float(own.value) == 8.0
    assert second.values == first.values


def test_a_variable_of_no_strategy_that_the_others_do_not_use_is_an_error(connections) -> None:
    first, second = _Side(5.0), _Side(1.0)
    first.hold([4.0, 6.0])
    own = keras.Variable(0.0, name="own_count")
    _with_outside(second, own)
    error = _deliver(connections, [first, second])[1]
    assert isinstance(error, ValueError)
    assert "A step of this process uses variable 'own_count' of shape ()" in str(error)


def test_a_loop_continues_with_the_random_numbers_of_the_others(connections) -> None:
    first, second = _Side(5.0), _Side(1.0, is_candidate=True)
    first.hold([4.0, 6.0])
    first.admission.admit()
    np.random.seed(3)
    state = np.random.get_state()
    expected = np.random.random(4)
    np.random.set_state(state)
    second.group.on_join = lambda: _deliver(connections, [first, second])
    prepared: list[int] = []
    second.admission.join_loop(lambda: prepared.append(1))
    assert np.random.random(4).tolist() == expected.tolist()
    assert second.values[:2] == [[5.0] * 3, 5]
    assert prepared == [1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "shape",
            r"Variable 0 is 'weights' of shape \(4,\) and dtype float32 in this process, but",
        ),
        ("fewer", "Variable 2 is missing in this process, but 'total' of shape"),
        ("more", "Variable 3 is 'extra' of shape .* in this process, but missing in the others"),
    ],
)
def test_other_variables_are_an_error_of_the_process_that_joins(connections, change, words) -> None:
    first, second = _Side(5.0), _Side(1.0, shape=(4,) if change == "shape" else (3,))
    first.hold([4.0, 6.0])
    if change == "fewer":
        del second.variables[2]
    if change == "more":
        with second.strategy.scope():
            second.variables.append(sg.Variable(1.0, name="extra"))
    before = second.values
    _, error = _deliver(connections, [first, second])
    with pytest.raises(ValueError, match=words):
        raise error
    assert second.group.calls == ["close"]  # so that the others need not wait for its end
    assert second.values == before
    assert first.values[:2] == [[5.0] * 3, 5]


class _Corrupting:
    """Connections on which a bit of the values is changed on its way."""

    def __init__(self, connections: PeerConnections) -> None:
        self._connections, self._numbers = connections, itertools.count()

    def broadcast(self, source: int, targets: Sequence[int], buffers: Sequence[memoryview]) -> None:
        self._connections.broadcast(source, targets, buffers)
        if next(self._numbers) == 2:  # after the size and the description
            buffers[0][0] ^= 1

    def close(self) -> None:
        self._connections.close()


def test_values_with_another_checksum_are_not_taken(connections) -> None:
    first, second = _Side(5.0), _Side(1.0)
    first.hold([4.0, 6.0])
    _, error = _deliver([connections[0], _Corrupting(connections[1])], [first, second])
    with pytest.raises(DataLossError, match="The CRC-32 of array 0 that a member sent is"):
        raise error
    assert second.group.calls == ["close"]
    assert second.values == [[1.0] * 3, 1, 0.0]


def test_a_sender_that_is_lost_leaves_the_process_in_the_group(connections) -> None:
    second = _Side(1.0)
    connections[0].close()
    second.group.member = 1
    with pytest.raises(PeerLostError):
        second.group.deliver(connections[1], 0, [1])
    assert second.group.calls == []  # it receives the state from the next member
    assert second.values == [[1.0] * 3, 1, 0.0]


def _running(num_members: int, num_calls: int) -> RunningGroup:
    return RunningGroup(4, tuple(range(num_members)), None, num_calls)


def test_a_step_is_compiled_again_for_another_number_of_members() -> None:
    side = _Side(1.0, is_candidate=True)
    side.group.running = [_running(size, 1) for size in (3, 4, 4, 3, 2)] + [_running(2, 2)]
    prepared: list[int] = []
    place = side.admission.begin_call()
    assert side.admission.join(place, lambda: prepared.append(1)) is None
    assert len(prepared) == 3  # at first, and for 4 and 2
    assert side.admission.is_waiting  # the last one told of a later call: the others ended this one


def test_a_process_that_all_others_leave_waiting_ends_with_a_code_of_its_own() -> None:
    side = _Side(1.0, is_candidate=True)
    assert not side.admission.has_values(side.strategy.topology)
    side.group.error = UnavailableError("All members ended.")
    with pytest.raises(SystemExit) as ended:
        side.admission.join_loop(lambda: None)
    assert ended.value.code == NOT_NEEDED
    side.group.is_candidate = False  # after it has joined an error stays an error
    with pytest.raises(UnavailableError, match="All members ended"):
        side.admission.join_loop(lambda: None)


# Members as a user sees them, and `admit`, with a group that is made up.


@pytest.fixture
def strategy() -> Any:
    """A strategy of this process alone."""
    return sg.ElasticStrategy()


def test_a_process_alone_is_its_only_member_and_admits_nobody(strategy) -> None:
    assert strategy.num_replicas_in_sync == 1
    assert strategy.members == strategy.participants == (0,)
    assert strategy.admit(print, args=(1,)) is None
    assert strategy.cluster_resolver.processes().num_processes == 1
    strategy._group = types.SimpleNamespace(
        view=types.SimpleNamespace(members=(0, 2)), participants=(0, 1, 2)
    )
    assert (strategy.members, strategy.participants) == ((0, 2), (0, 1, 2))


def test_a_process_that_joins_compiles_its_step_and_an_error_of_it_ends_the_call(
    strategy, monkeypatch
) -> None:
    def compile_call(fn: Any, args: Any, kwargs: Any) -> None:
        assert sg.get_strategy() is strategy
        calls.append((fn, args, kwargs))
        fn(*args, **kwargs)

    def join_loop(prepare: Callable[[], None]) -> None:
        prepare()
        prepare()  # for each number of members that is expected
        calls.append("join")

    calls: list[Any] = []
    monkeypatch.setattr(strategy, "executor", ElasticLockstep(strategy))
    monkeypatch.setattr(strategy.executor, "compile_call", compile_call)
    strategy._admission = types.SimpleNamespace(
        is_waiting=True, join_loop=join_loop, admit=lambda: calls.append("admit")
    )
    strategy.admit(print, args=(1,), kwargs={"end": ""})
    assert calls == [(print, (1,), {"end": ""})] * 2 + ["join"]
    with pytest.raises(TypeError, match="invalid keyword"):
        strategy.admit(int, kwargs={"of": 1})
    strategy._admission.is_waiting = False
    strategy.admit(print, args=(1,))  # a member admits others without compiling
    assert calls[-1] == "admit"
