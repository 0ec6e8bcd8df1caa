"""The fixture around every test sees what a test leaves behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import sys
import threading

import keras
import pytest

import stratagem
from stratagem import logs
from stratagem.cluster.addresses import free_ports
from stratagem.observe.wait_clock import wait_clock
from tests.other_machine import floored, shuffled
from tests.process_state import ProcessState
from tests.unit.group.elastic.members import Cluster


def test_nothing_left_is_no_change() -> None:
    before = ProcessState.now()
    with stratagem.OneDeviceStrategy("cpu:0").scope():
        keras.Variable(0.0)
    assert before.changes() == []


def test_environment_variable_left_is_found(monkeypatch) -> None:
    monkeypatch.delenv("STRATAGEM_OLD", raising=False)
    before = ProcessState.now()
    monkeypatch.setenv("STRATAGEM_OLD", "1")
    (change,) = before.changes()
    assert "STRATAGEM_OLD" in change
    assert "STRATAGEM_OLD" in os.environ


def test_thread_left_is_found_and_a_daemon_is_not(monkeypatch) -> None:
    monkeypatch.setattr("tests.process_state._JOIN_TIMEOUT_S", 0.01)
    before, end = ProcessState.now(), threading.Event()
    threads = [
        threading.Thread(target=end.wait, name="left"),
        threading.Thread(target=end.wait, name="background", daemon=True),
    ]
    for thread in threads:
        thread.start()
    try:
        assert before.changes() == ["thread 'left' still runs"]
    finally:
        end.set()
        for thread in threads:
            thread.join()


def test_child_process_left_is_found() -> None:
    before, context = ProcessState.now(), multiprocessing.get_context("spawn")
    end = context.Event()
    child = context.Process(target=end.wait)
    child.start()
    try:
        assert before.changes() == [f"child process {child.pid} still runs"]
    finally:
        end.set()
        child.join()
        child.close()


def test_open_scope_and_settings_left_are_found() -> None:
    before = ProcessState.now()
    with stratagem.OneDeviceStrategy("cpu:0").scope():
        stratagem.config.run_eagerly(True)
        changes = " ".join(before.changes())
        stratagem.config.run_eagerly(False)
    assert "'a strategy is current' was False and is True" in changes
    assert "'runs eagerly' was False and is True" in changes


def _fail_with_a_running_group(ports: tuple[int, ...]) -> None:
    """As a test that starts members and is wrong about them."""
    cluster = Cluster(ports)
    groups = cluster.started(len(ports))
    stratagem.OneDeviceStrategy("cpu:0").scope().__enter__()
    stratagem.config.run_eagerly(True)
    logs.show_logs("info")
    os.environ["STRATAGEM_LEFT"] = "1"
    assert groups == []


def test_what_a_failed_test_left_is_ended() -> None:
    """Its groups with their threads and sockets, its scopes, its settings and its variables."""
    before, ports = ProcessState.now(), free_ports(3)
    try:
        _fail_with_a_running_group(ports)
    except AssertionError as error:
        sys.last_value = error  # as pytest does
    assert wait_clock.measures_transfers
    before.restore()
    assert before.changes() == []
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
    gc.collect()  # a socket that was left open would be an error of this test


def test_another_machine_has_coarse_clocks_and_another_order() -> None:
    """The plugin is used by hand; it must not rot."""
    assert floored(lambda: 7.129, 0.5)() == 7.0
    assert floored(lambda: 7_129, 500)() == 7_000
    files = ["a"] * 3 + ["b"] * 4
    orders = [shuffled(files, seed) for seed in range(20)]
    for order in orders:
        assert sorted(order) == list(range(7))
        assert "".join(files[place] for place in order) in ("aaabbbb", "bbbbaaa")
    assert len(set(map(tuple, orders))) > 10
