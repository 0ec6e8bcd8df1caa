"""Processes that Ray starts, watches and starts again."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import ray

from stratagem.errors import DeadlineExceededError, UnavailableError
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.launch.processes import local_processes
from stratagem.launch.processes.ray_processes import RayProcesses
from stratagem.launch.remote.ray_cluster import RayCluster
from tests.unit.launch.remote.living import wait_for_end
from tests.unit.launch.waiting import until
from tests.unit.parameter_server import forked_objects as served
from tests.unit.parameter_server.cluster.test_local_processes import (
    Watched,
    ask,
    require_given_up,
    require_no_restart_left,
    require_told_of_starts,
    require_watched_after_an_error,
)

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(scope="module")
def keys() -> ClusterKeys:
    return ClusterKeys.make()


@pytest.mark.slow
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
def test_restart_that_raises_here_is_tried_again(keys, monkeypatch) -> None:
    with RayProcesses("ps", served.serve_parameters, [(keys,)]) as servers:
        watched = Watched(servers)
        start, errors = servers._start, [OSError("no memory")]

        def failing(index: int, actor: Any = None) -> Any:
            if errors:
                raise errors.pop()
            return start(index, actor)

        monkeypatch.setattr(servers, "_start", failing)
        servers.kill(0)
        assert watched.next()[0] == "lost"
        assert watched.next()[0] == "returned"
        assert not errors


@pytest.mark.slow
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


def test_closing_before_the_start_leaves_nothing(keys) -> None:
    with RayProcesses("ps", served.serve_parameters, [(keys,)], resources=[{"nowhere": 1}]):
        pass


def test_error_of_a_start_is_raised_with_its_traceback() -> None:
    with (
        RayProcesses("worker", served.serve_nothing, [()]) as processes,
        pytest.raises(RuntimeError, match="worker 0 cannot start: ") as raised,
    ):
        _ = processes.addresses
    assert "no data for process 0" in str(raised.value)
    assert "in serve_nothing" in str(raised.value)


@pytest.mark.slow
def test_process_that_dies_while_it_starts_is_reported() -> None:
    with (
        RayProcesses("worker", served.die, [()]) as processes,
        pytest.raises(UnavailableError, match="worker 0 died while starting"),
    ):
        _ = processes.addresses


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
def test_process_that_cannot_start_again_is_given_up(keys, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(local_processes, "_FIRST_DELAY_S", 0.01)
    with RayProcesses("ps", served.serve_once, [(keys, str(tmp_path))]) as processes:
        require_given_up(processes, tmp_path)
    require_told_of_starts(capsys)


@pytest.mark.slow
def test_process_that_may_not_start_again_is_given_up(keys) -> None:
    with RayProcesses("ps", served.serve_parameters, [(keys,)], max_restarts=0) as processes:
        require_no_restart_left(processes)


@pytest.mark.slow
def test_process_that_cannot_be_reached_is_not_taken_for_dead(keys) -> None:
    """Ray tells that a call has failed while the machine may still be there."""
    with RayProcesses("ps", served.serve_parameters, [(keys,)]) as processes:
        watched = Watched(processes)
        pids = processes.pids
        life = processes._lives[0]
        cut_off = ray.exceptions.ActorUnavailableError("cut off", None)
        processes._events.put(lambda: processes._take_end(0, life, cut_off))
        first = life.hold
        until(lambda: life.hold is not first)
        assert processes.pids == pids
        processes.kill(0)  # both calls fail, one loss is told
        assert [watched.next()[0] for _ in range(2)] == ["lost", "returned"]
        assert watched.events.empty()


@pytest.mark.slow
def test_error_of_a_watcher_ends_no_watching(keys) -> None:
    with RayProcesses("ps", served.serve_parameters, [(keys,)]) as processes:
        require_watched_after_an_error(processes)


@pytest.mark.slow
def test_process_is_forked_again_where_it_was_and_anew_where_its_keeper_died(
    keys, tmp_path
) -> None:
    with RayProcesses(
        "worker", served.serve_told, [(keys, str(tmp_path))], modules=["jax"]
    ) as processes:
        assert ask(keys, processes.addresses[0])["had_jax"]
        watched = Watched(processes)
        keeper = processes._lives[0].actor
        processes.kill(0)
        _, _, why = watched.next()
        assert why == "it died: killed by SIGKILL"
        assert watched.next()[:2] == ("returned", 0)
        assert processes._lives[0].actor is keeper
        pid = processes.pids[0]
        processes.kill_keeper(0)
        assert watched.next()[:2] == ("lost", 0)
        assert not wait_for_end([pid])
        what, _, address = watched.next()
        assert what == "returned"
        assert processes._lives[0].actor is not keeper
        assert processes.addresses == [address]
        assert ask(keys, address)["pid"] == processes.pids[0] != pid


def test_resources_are_for_each_process(keys) -> None:
    with pytest.raises(ValueError, match="2 processes of kind 'ps' received 1 resources"):
        RayProcesses("ps", served.serve_parameters, [(keys,)] * 2, resources=[{}])


def test_processes_need_a_connection(keys, monkeypatch) -> None:
    monkeypatch.setattr(sys.modules["ray"], "is_initialized", lambda: False)
    with pytest.raises(RuntimeError, match="this process is not connected to Ray"):
        RayProcesses("ps", served.serve_parameters, [(keys,)])


def test_connection_that_is_there_is_used_and_not_closed(ray_cluster) -> None:
    assert ray_cluster.started_here
    with RayCluster() as another:
        another.wait()
        assert not another.started_here
    assert ray.is_initialized()
