"""Processes that are forked on this machine, watched and started again, without Ray."""

from __future__ import annotations

import errno
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from stratagem.errors import DeadlineExceededError, UnavailableError, take_reported
from stratagem.group.transport.connection import Connections
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.group.transport.wire import Message
from stratagem.launch.prefork.fork_server import ForkedProcess
from stratagem.launch.processes import local_processes
from stratagem.launch.processes.local_processes import (
    MAX_FAILED_STARTS,
    LocalProcesses,
    Restarts,
    SharedStandby,
)
from tests.unit.launch.remote.living import descendants, wait_for_end
from tests.unit.parameter_server import forked_objects as served

LIMIT_S = 60.0
_MODULES = (
    "cloudpickle",
    "tests.unit.parameter_server.forked_objects",
)  # loaded once, not in each process


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
    with Connections(keys, [address]) as connections:
        return connections.ask(
            0, Message("tell", {"variables": list(variables)}), timeout_s=30.0
        ).fields


@pytest.mark.slow
def test_stopped_standby_is_replaced_and_those_forked_from_it_go_on(
    keys, tmp_path, monkeypatch
) -> None:
    arguments = [(keys, str(tmp_path))] * 2
    with (
        SharedStandby(_MODULES, {**os.environ, "SERVED": "yes"}) as standby,
        LocalProcesses("worker", served.serve_told, arguments, standby=standby) as processes,
    ):
        watched = Watched(processes)
        first, second = processes.pids
        (parent,) = {Path(f"/proc/{pid}/stat").read_text().split()[3] for pid in processes.pids}
        os.kill(int(parent), signal.SIGSTOP)
        monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "0.5")
        processes.kill(0)
        assert watched.next()[:2] == ("lost", 0)
        assert watched.next()[:2] == ("returned", 0)
        assert processes.pids[0] != first
        assert ask(keys, processes.addresses[1], "SERVED")["pid"] == second
    assert not wait_for_end({int(parent), *processes.pids})


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
        assert sorted(event[:2] for event in events) == [
            ("lost", 0),
            ("lost", 1),
            ("returned", 0),
            ("returned", 1),
        ]
        assert _parents(servers.pids) != {parent}


def _parents(pids: list[int]) -> set[int]:
    texts = [Path(f"/proc/{pid}/stat").read_text() for pid in pids]
    return {int(text.rpartition(")")[2].split()[1]) for text in texts}


def test_error_of_a_start_is_raised_with_its_traceback(standby) -> None:
    with LocalProcesses("worker", served.serve_nothing, [()], standby=standby) as processes:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="worker 0 cannot start: ") as raised:
                _ = processes.addresses
            assert len(raised.traceback) == 2  # none of the first time
    assert "no data for process 0" in str(raised.value)
    assert "in serve_nothing" in str(raised.value)


def test_process_that_dies_while_it_starts_is_named(standby) -> None:
    with (
        LocalProcesses("worker", served.die, [()], standby=standby) as processes,
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
    keys, standby, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(local_processes, "_FIRST_DELAY_S", 0.01)
    arguments = [(keys, str(tmp_path))]
    with LocalProcesses("ps", served.serve_once, arguments, standby=standby) as processes:
        require_given_up(processes, tmp_path)
    require_told_of_starts(capsys)


def require_given_up(processes: Any, folder: Path) -> None:
    """Kills a process that cannot start a second time."""
    watched = Watched(processes)
    processes.kill(0)
    assert watched.next()[0] == "lost"
    what, index, error = watched.next()
    assert (what, index) == ("given up", 0)
    assert isinstance(error, RuntimeError)
    assert "no second time" in str(error)
    assert folder.joinpath("started").read_text() == "x" * (1 + MAX_FAILED_STARTS)


def require_told_of_starts(capsys: Any) -> None:
    told = capsys.readouterr().err  # before it is given up: why callers get no answer
    assert told.count("ps 0 did not start again; next try in ") == MAX_FAILED_STARTS - 1
    assert "no second time" in told


def test_process_that_may_not_start_again_is_given_up(keys, standby) -> None:
    with LocalProcesses(
        "ps", served.serve_parameters, [(keys,)], standby=standby, max_restarts=0
    ) as processes:
        require_no_restart_left(processes)


def require_no_restart_left(processes: Any) -> None:
    """Kills a process that may not start again."""
    watched = Watched(processes)
    processes.kill(0)
    assert watched.next()[0] == "lost"
    what, _, error = watched.next()
    assert what == "given up"
    with pytest.raises(UnavailableError, match="ps 0 ended and has no restarts left"):
        raise error


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
    monkeypatch.setattr(local_processes, "_FIRST_DELAY_S", 0.01)
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


def test_errors_of_watchers_end_no_watching(keys, standby) -> None:
    with LocalProcesses("ps", served.serve_parameters, [(keys,)], standby=standby) as processes:
        require_watched_after_an_error(processes)


def require_watched_after_an_error(processes: Any) -> None:
    """Kills a process of which a watcher fails."""

    def fail(index: int, why: str) -> None:
        raise KeyError("a watcher failed")

    returned = threading.Event()
    processes.watch(fail, lambda *_: returned.set(), lambda *_: None)
    processes.kill(0)
    assert returned.wait(LIMIT_S)
    with pytest.raises(RuntimeError, match=r"watch\(\) was called twice"):
        Watched(processes)
    (error,) = take_reported()
    assert isinstance(error, KeyError)


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


def test_first_restart_is_at_once_and_the_next_ones_wait_longer() -> None:
    restarts = Restarts()
    delays = [restarts.delay_after_loss_s(1.0) for _ in range(10)]
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_process_that_has_run_for_long_is_started_again_at_once() -> None:
    restarts = Restarts()
    assert [restarts.delay_after_loss_s(s) for s in (1.0, 1.0, 3.0, 1.0)] == [0.0, 0.5, 0.0, 0.5]


def test_process_that_never_starts_is_given_up() -> None:
    restarts = Restarts()
    delays = [restarts.delay_after_failed_start_s() for _ in range(MAX_FAILED_STARTS)]
    assert delays == [0.0, 0.5, 1.0, 2.0, None]


def test_start_that_succeeds_forgets_those_that_failed() -> None:
    restarts = Restarts()
    for _ in range(3):
        for _ in range(MAX_FAILED_STARTS - 1):
            assert restarts.delay_after_failed_start_s() is not None
        restarts.started()
    assert restarts.delay_after_loss_s(100.0) == 0.0


def test_number_of_restarts_is_limited() -> None:
    assert Restarts(0).delay_after_loss_s(100.0) is None
    restarts = Restarts(2)
    assert [restarts.delay_after_loss_s(100.0) for _ in range(3)] == [0.0, 0.0, None]
