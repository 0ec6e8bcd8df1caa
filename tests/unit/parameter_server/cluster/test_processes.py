"""Processes that are forked on this machine or that Ray starts, watched and started again."""

from __future__ import annotations

import errno
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import pytest
import ray

import stratagem as sg
from stratagem.errors import DeadlineExceededError, UnavailableError, take_reported
from stratagem.group.transport.connection import Connections
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.group.transport.wire import Message
from stratagem.launch import processes as processes_module
from stratagem.launch.prefork.fork_server import ForkedProcess, SharedStandby
from stratagem.launch.processes import (
    MAX_FAILED_STARTS,
    LocalProcesses,
    RayProcesses,
    Restarts,
)
from stratagem.launch.remote.ray_cluster import RayCluster
from stratagem.launch.restart import policy
from tests.unit.launch.remote.living import descendants, wait_for_end
from tests.unit.launch.waiting import until
from tests.unit.parameter_server import forked_objects as served

LIMIT_S = 60.0
# Loaded once, not in each process.
_MODULES = ("cloudpickle", "tests.unit.parameter_server.forked_objects")


@pytest.fixture(scope="module")
def keys() -> ClusterKeys:
    return ClusterKeys.make()


@pytest.fixture(scope="module")
def standby() -> Iterator[SharedStandby]:
    before = descendants(os.getpid())
    with SharedStandby(_MODULES, {**os.environ, "SERVED": "yes"}) as made:
        yield made
    assert not wait_for_end(descendants(os.getpid()) - before)


class Watched:
    """The events of processes."""

    def __init__(self, processes: LocalProcesses) -> None:
        self.events: queue.SimpleQueue[tuple[str, int, Any]] = queue.SimpleQueue()
        processes.watch(
            lambda index, why: self.events.put(("lost", index, why)),
            lambda index, address: self.events.put(("returned", index, address)),
            lambda index, error: self.events.put(("given up", index, error)),
        )

    def next(self) -> tuple[str, int, Any]:
        return self.events.get(timeout=LIMIT_S)


def ask(keys: ClusterKeys, address: str, *variables: str) -> dict[str, Any]:
    message = Message("tell", {"variables": list(variables)})
    with Connections(keys, [address]) as connections:
        return connections.ask(0, message, timeout_s=30.0).fields


@pytest.mark.slow
def test_process_that_starts_after_another_has_failed_is_closed(keys, standby, tmp_path) -> None:
    """A killed one would leave its files."""
    arguments = [(keys, str(tmp_path))] * 2
    with (
        LocalProcesses("ps", served.serve_late, arguments, standby=standby) as processes,
        pytest.raises(RuntimeError, match="no data for process 1"),
    ):
        _ = processes.addresses
    assert [path.name for path in tmp_path.iterdir()] == ["closed-0"]


def test_processes_serve_return_after_a_kill_and_close(keys, standby, tmp_path, capsys) -> None:
    arguments = [(keys, str(tmp_path))] * 2
    chosen = {"SERVED_THREADS": "3", "SERVED": "no"}
    with LocalProcesses(
        "worker", served.serve_told, arguments, standby=standby, variables=chosen
    ) as processes:
        before = processes.addresses
        told = [ask(keys, address, *chosen) for address in before]
        assert [one["index"] for one in told] == [0, 1]
        assert [one["pid"] for one in told] == processes.pids
        assert [one["variables"] for one in told] == [{"SERVED_THREADS": "3", "SERVED": "yes"}] * 2
        watched = Watched(processes)
        killed = processes.pids[1]
        processes.kill(1)
        assert watched.next() == ("lost", 1, "it died: killed by SIGKILL")
        what, index, address = watched.next()
        assert (what, index) == ("returned", 1)
        assert processes.addresses == [before[0], address]
        assert address != before[1]
        pids = processes.pids
        assert pids[1] == ask(keys, address)["pid"] != killed
    processes.close()
    closed = [int(tmp_path.joinpath(f"closed-{index}").read_text()) for index in range(2)]
    assert closed == pids
    assert not wait_for_end(pids)
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines == [
        f"[worker 0] process 0 serves {tmp_path}",
        *[f"[worker 1] process 1 serves {tmp_path}"] * 2,
    ]


@pytest.mark.slow
def test_another_standby_takes_the_place_of_one_that_was_killed(keys) -> None:
    with (
        SharedStandby(_MODULES, dict(os.environ)) as standby,
        LocalProcesses("ps", served.serve_parameters, [(keys,)] * 2, standby=standby) as servers,
    ):
        watched = Watched(servers)
        pids = servers.pids
        (parent,) = _parents(pids)
        os.kill(parent, 9)
        events = [watched.next() for _ in range(4)]
        wanted = [(what, index) for what in ("lost", "returned") for index in range(2)]
        assert sorted(event[:2] for event in events) == wanted
        assert _parents(servers.pids) != {parent}


def _parents(pids: list[int]) -> set[int]:
    texts = [Path(f"/proc/{pid}/stat").read_text() for pid in pids]
    return {int(text.rpartition(")")[2].split()[1]) for text in texts}


# Of a module, so that what Ray sets in the environment is there before a test is compared.
@pytest.fixture(scope="module", params=["forked", pytest.param("ray", marks=pytest.mark.slow)])
def start(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Makes processes of each kind."""
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
        return RayProcesses
    standby = request.getfixturevalue("standby")
    return lambda *args, **options: LocalProcesses(*args, standby=standby, **options)


def test_error_of_a_start_is_raised_with_its_traceback(start) -> None:
    with start("worker", served.serve_nothing, [()]) as processes:
        with pytest.raises(RuntimeError, match="worker 0 cannot start: ") as raised:
            _ = processes.addresses
        assert "no data for process 0" in str(raised.value)
        assert "in serve_nothing" in str(raised.value)
        with pytest.raises(RuntimeError, match="worker 0 cannot start: ") as again:
            _ = processes.addresses
        assert len(again.traceback) == 2  # none of the first time


def test_process_that_dies_while_it_starts_is_named(start) -> None:
    with (
        start("worker", served.die, [()]) as processes,
        pytest.raises(UnavailableError, match="worker 0 died while starting"),
    ):
        _ = processes.addresses


def test_process_that_does_not_start_in_time_is_named(keys, standby, monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_JOIN_TIMEOUT_S", "0.05")
    arguments = [(keys, 0.0), (keys, 0.5)]
    with (
        LocalProcesses("ps", served.serve_after, arguments, standby=standby) as processes,
        pytest.raises(DeadlineExceededError, match=r"of 2 processes did not start within 0\.05 s"),
    ):
        _ = processes.addresses


def test_process_that_cannot_start_again_is_given_up(
    keys, start, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(policy, "_FIRST_DELAY_S", 0.01)
    with start("ps", served.serve_once, [(keys, str(tmp_path))]) as processes:
        watched = Watched(processes)
        processes.kill(0)
        assert watched.next()[0] == "lost"
        what, index, error = watched.next()
        assert (what, index) == ("given up", 0)
        assert isinstance(error, RuntimeError)
        assert "no second time" in str(error)
        assert tmp_path.joinpath("started").read_text() == "x" * (1 + MAX_FAILED_STARTS)
    told = capsys.readouterr().err  # before it is given up: why callers get no answer
    assert told.count("ps 0 did not start again; next try in ") == MAX_FAILED_STARTS - 1
    assert "no second time" in told


def test_process_that_may_not_start_again_is_given_up(keys, start) -> None:
    with start("ps", served.serve_parameters, [(keys,)], max_restarts=0) as processes:
        watched = Watched(processes)
        processes.kill(0)
        assert watched.next()[0] == "lost"
        what, _, error = watched.next()
        assert what == "given up"
        with pytest.raises(UnavailableError, match="ps 0 ended and has no restarts left"):
            raise error


def test_errors_of_watchers_end_no_watching(keys, start) -> None:
    def fail(index: int, why: str) -> None:
        raise KeyError("a watcher failed")

    returned = threading.Event()
    with start("ps", served.serve_parameters, [(keys,)]) as processes:
        processes.watch(fail, lambda *_: returned.set(), lambda *_: None)
        processes.kill(0)
        assert returned.wait(LIMIT_S)
        with pytest.raises(RuntimeError, match=r"watch\(\) was called twice"):
            Watched(processes)
        (error,) = take_reported()
        assert isinstance(error, KeyError)


class FailingStandby:
    """Forks processes, and raises an error instead for as often as `failures` says."""

    def __init__(self, standby: SharedStandby) -> None:
        self.standby, self.failures = standby, 0

    def start(self, pickled: bytes, outputs: Sequence[int]) -> ForkedProcess:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self.standby.start(pickled, outputs)


@pytest.mark.parametrize(("failures", "last"), [(1, "returned"), (MAX_FAILED_STARTS, "given up")])
def test_restart_that_the_system_refuses_is_tried_again(
    keys, standby, monkeypatch, failures, last
) -> None:
    monkeypatch.setattr(policy, "_FIRST_DELAY_S", 0.01)
    failing: Any = FailingStandby(standby)
    with LocalProcesses("ps", served.serve_parameters, [(keys,)], standby=failing) as processes:
        watched = Watched(processes)
        failing.failures = failures
        num_open = len(os.listdir("/proc/self/fd"))
        processes.kill(0)
        assert watched.next()[0] == "lost"
        what, _, detail = watched.next()
        assert what == last
        if last == "given up":
            assert isinstance(detail, OSError)
            assert len(os.listdir("/proc/self/fd")) <= num_open


def test_closing_before_the_start_leaves_nothing(keys) -> None:
    before = descendants(os.getpid())
    with (
        SharedStandby(["colorsys"], dict(os.environ)) as standby,
        LocalProcesses("ps", served.serve_parameters, [(keys,)], standby=standby),
    ):
        pass
    assert not wait_for_end(descendants(os.getpid()) - before)


@pytest.mark.slow
def test_errors_are_printed_on_the_stream_of_errors(standby, capsys) -> None:
    with LocalProcesses("ps", served.serve_and_complain, [()], standby=standby) as processes:
        assert processes.addresses == ["nowhere"]
    captured = capsys.readouterr()
    assert captured.err == "[ps 0] a complaint\n"
    assert captured.out == ""
    assert sys.stderr is not sys.stdout


# When a process is started again.


@pytest.mark.parametrize(
    ("most", "lived_s", "delays"),
    [
        (None, [1.0] * 10, [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]),
        (None, [1.0, 1.0, 3.0, 1.0], [0.0, 0.5, 0.0, 0.5]),  # one that has run for long
        (0, [100.0], [None]),
        (2, [100.0] * 3, [0.0, 0.0, None]),
    ],
)
def test_restarts_wait_longer_and_end(most, lived_s, delays) -> None:
    restarts = Restarts() if most is None else Restarts(most)
    assert [restarts.delay_after_loss_s(one) for one in lived_s] == delays


def test_process_that_never_starts_is_given_up_and_a_start_forgets_failures() -> None:
    restarts = Restarts()
    delays = [restarts.delay_after_failed_start_s() for _ in range(MAX_FAILED_STARTS)]
    assert delays == [0.0, 0.5, 1.0, 2.0, None]
    restarts = Restarts()
    for _ in range(3):
        delays = [restarts.delay_after_failed_start_s() for _ in range(MAX_FAILED_STARTS - 1)]
        assert None not in delays
        restarts.started()
    assert restarts.delay_after_loss_s(100.0) == 0.0


def test_slow_watcher_adds_nothing_to_the_life_of_a_process(keys, standby, monkeypatch) -> None:
    """Else a process that always dies at once would never be waited for."""
    passed_s, lived = [0.0], list[float]()
    clock = Namespace(monotonic=lambda: time.monotonic() + passed_s[0])
    monkeypatch.setattr(processes_module, "time", clock)
    delay_s = Restarts.delay_after_loss_s

    def note(self: Restarts, lived_s: float) -> float | None:
        lived.append(lived_s)
        return delay_s(self, lived_s)

    def take_long(*_: object) -> None:
        passed_s[0] += 10_000.0

    monkeypatch.setattr(Restarts, "delay_after_loss_s", note)
    returned = threading.Event()
    with LocalProcesses("ps", served.serve_parameters, [(keys,)], standby=standby) as processes:
        processes.watch(take_long, lambda *_: returned.set(), lambda *_: returned.set())
        processes.kill(0)
        assert returned.wait(LIMIT_S)
    assert [one < 5_000.0 for one in lived] == [True]


# Of Ray alone.


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_variables_are_set_before_jax_is_loaded(keys, tmp_path) -> None:
    chosen = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=3"}
    with RayProcesses(
        "worker", served.serve_told, [(keys, str(tmp_path))] * 2, environment=chosen
    ) as processes:
        told = [ask(keys, address, *chosen) for address in processes.addresses]
        assert [one["index"] for one in told] == [0, 1]
        assert [one["pid"] for one in told] == processes.pids
        assert all(one["variables"] == chosen for one in told)
        assert not any(one["had_jax"] for one in told)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_restart_that_raises_here_is_tried_again(keys, monkeypatch) -> None:
    with RayProcesses("ps", served.serve_parameters, [(keys,)]) as servers:
        watched = Watched(servers)
        start, errors = servers._start, [OSError("no memory")]

        def failing(index: int) -> Any:
            if errors:
                raise errors.pop()
            return start(index)

        monkeypatch.setattr(servers, "_start", failing)
        servers.kill(0)
        assert watched.next()[0] == "lost"
        assert watched.next()[0] == "returned"
        assert not errors


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_closing_closes_what_is_served_then_ends_the_processes(keys, tmp_path) -> None:
    processes = RayProcesses("worker", served.serve_told, [(keys, str(tmp_path))] * 2)
    assert len(processes.addresses) == 2
    Watched(processes)
    pids = processes.pids
    processes.close()
    processes.close()
    closed = [int(tmp_path.joinpath(f"closed-{index}").read_text()) for index in range(2)]
    assert closed == pids
    assert not wait_for_end(pids, timeout_s=120)


@pytest.mark.usefixtures("ray_cluster")
def test_ray_is_left_before_the_start(keys) -> None:
    with RayProcesses("ps", served.serve_parameters, [(keys,)], resources=[{"nowhere": 1}]):
        pass


@pytest.mark.usefixtures("ray_cluster")
def test_process_without_a_place_is_named(keys, monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_JOIN_TIMEOUT_S", "0.5")
    with (
        RayProcesses(
            "ps", served.serve_parameters, [(keys,)] * 2, resources=[{"ps:0": 1}, {"CPU": 0.5}]
        ) as processes,
        pytest.raises(
            DeadlineExceededError, match=r"of 2 processes did not start within 0\.5 s"
        ) as raised,
    ):
        _ = processes.addresses
    assert "ps 0, which needs {'ps:0': 1}" in str(raised.value)
    assert "STRATAGEM_JOIN_TIMEOUT_S" in str(raised.value)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_process_that_cannot_be_reached_is_not_taken_for_dead(keys) -> None:
    """Ray tells that a call has failed while the machine may still be there."""
    with RayProcesses("ps", served.serve_parameters, [(keys,)]) as processes:
        _ = processes.addresses
        actor, asked = processes._actors[0], list[int]()

        class CutOff:
            """The actor, whose first answer does not arrive."""

            @property
            def hold(self) -> Any:
                asked.append(1)
                return self if len(asked) == 1 else actor.hold

            def remote(self) -> Any:
                raise ray.exceptions.ActorUnavailableError("cut off", None)

        again = threading.Thread(target=processes._wait, args=(0, Namespace(actor=CutOff())))
        again.start()
        until(lambda: len(asked) == 2)
        assert again.is_alive()
        processes.kill(0)
        again.join(LIMIT_S)
        assert not again.is_alive()


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_process_is_forked_again_where_it_was_and_anew_where_its_keeper_died(
    keys, tmp_path
) -> None:
    with RayProcesses(
        "worker", served.serve_told, [(keys, str(tmp_path))], modules=["jax"]
    ) as processes:
        assert ask(keys, processes.addresses[0])["had_jax"]
        watched = Watched(processes)
        keeper = processes._actors[0]
        processes.kill(0)
        _, _, why = watched.next()
        assert why == "it died: killed by SIGKILL"
        assert watched.next()[:2] == ("returned", 0)
        assert processes._actors[0] is keeper
        pid = processes.pids[0]
        ray.kill(processes._actors[0])
        assert watched.next()[:2] == ("lost", 0)
        assert not wait_for_end([pid])
        what, _, address = watched.next()
        assert what == "returned"
        assert processes._actors[0] is not keeper
        assert processes.addresses == [address]
        assert ask(keys, address)["pid"] == processes.pids[0] != pid


@pytest.mark.usefixtures("ray_cluster")
def test_resources_are_for_each_process_and_a_connection_is_needed(keys, monkeypatch) -> None:
    with pytest.raises(ValueError, match="2 processes of kind 'ps' received 1 resources"):
        RayProcesses("ps", served.serve_parameters, [(keys,)] * 2, resources=[{}])
    monkeypatch.setattr(sys.modules["ray"], "is_initialized", lambda: False)
    with pytest.raises(RuntimeError, match="this process is not connected to Ray"):
        RayProcesses("ps", served.serve_parameters, [(keys,)])


@pytest.mark.usefixtures("ray_cluster")
def test_connection_that_is_there_is_used_and_not_closed(ray_cluster) -> None:
    assert ray_cluster.started_here
    with RayCluster() as another:
        another.wait()
        assert not another.started_here
    assert ray.is_initialized()


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_function_that_never_ends_does_not_keep_a_cluster_open() -> None:
    strategy = sg.ParameterServerStrategy(num_workers=1, num_servers=1)
    coordinator = sg.coordinator.ClusterCoordinator(strategy)
    value = coordinator.schedule(time.sleep, args=(10**6,))
    coordinator.schedule(time.sleep, args=(10**6,))
    until(lambda: coordinator._queue.counts["running"])
    pids = [*coordinator.workers.pids, *strategy.cluster.servers.pids]
    strategy.close()
    with pytest.raises(sg.errors.CancelledError, match="was cancelled before it finished"):
        value.fetch()
    assert not wait_for_end(pids)
