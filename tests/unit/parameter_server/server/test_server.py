"""Servers that die and are started again, and a client that goes on."""

from __future__ import annotations

import contextlib
import resource
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from stratagem.errors import UnavailableError
from stratagem.group.transport import connection
from stratagem.group.transport.connection import Connections, ServerError
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.client.client import ServerClient
from stratagem.parameter_server.client.shard_layout import ShardLayout, layout_of_keys
from stratagem.parameter_server.keras import update_rule
from stratagem.parameter_server.keras.update_rule import KerasUpdate
from stratagem.parameter_server.server.changes import by_kind
from stratagem.parameter_server.server.server import ParameterServer
from stratagem.parameter_server.server.shards import UpdateMode
from tests.unit.launch.waiting import until
from tests.unit.parameter_server.server.update_rules import Momentum

V = ShardLayout("v", (3,), "float32", (0,), (3,))
TABLE = ShardLayout("table", (40, 2), "float32", (0,), (40,), has_rows=True)
LIMIT_S = 120.0
NEVER_S = 1e6


class Server:
    """One at a port of its own, that can be killed: what is not in its journal then is lost."""

    def __init__(
        self, folder: Path, interval_s: float = NEVER_S, *, is_durable: bool = False
    ) -> None:
        self.keys = ClusterKeys.make()
        self._folder = folder
        self._interval_s = interval_s
        self._is_durable = is_durable
        self.path = folder / "journal 0"
        self.running = self._start(0)

    def restart(self) -> None:
        """Kills it: what it writes from now on goes to another file."""
        before, self.path = self.path, self.path.with_name(f"{self.path.name}+")
        shutil.copyfile(before, self.path)
        self.running.close()
        self.running = self._start(int(self.running.address.partition(" ")[0].rpartition(":")[2]))

    def _start(self, port: int) -> ParameterServer:
        return ParameterServer(
            self.keys,
            port=port,
            journal=self.path,
            journal_interval_s=self._interval_s,
            is_durable=self._is_durable,
        )


@pytest.fixture(autouse=True)
def _early_pings(monkeypatch) -> None:
    """A client notices at once that a server was started again."""
    monkeypatch.setattr(connection, "_SILENCE_S", 0.05)


@pytest.fixture
def server(tmp_path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.running.close()


@pytest.fixture
def connections(server) -> Iterator[Connections]:
    with Connections(server.keys, [server.running.address]) as connections:
        yield connections


def prepared(connections: Connections) -> ServerClient:
    """A client that has made both variables and set their rule."""
    served = ServerClient(connections)
    served.create(V, np.zeros(3, np.float32))
    served.create(TABLE, np.zeros((40, 2), np.float32))
    served.set_rule(Momentum(), ["v", "table"])
    return served


@pytest.fixture
def served(connections) -> ServerClient:
    return prepared(connections)


def push(served: ServerClient, *ids: int) -> None:
    rows = {"table": (np.array(ids, np.int64), np.ones((len(ids), 2), np.float32))}
    assert served.push({"v": np.ones(3, np.float32)}, rows).is_used


@contextlib.contextmanager
def full_disk(size_bytes: int) -> Iterator[None]:
    """No file may grow beyond this."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_server_has_again_what_was_journaled_and_tells_what_was_lost(server, served) -> None:
    push(served, 1, 2)
    push(served, 2, 39)
    assert served.journal() == {0: 2}
    names = ["v", "table", "v:v", "table:v"]
    journaled = served.pull(names)
    state = served.describe()[0]
    assert (state["version"], state["journaled_version"], state["restored_version"]) == (2, 2, None)
    push(served, 3)
    served.assign("v", np.ones(3), sign=1)
    server.restart()
    for name, value in served.pull(names).items():
        np.testing.assert_array_equal(value, journaled[name])
    state = served.describe()[0]
    assert (state["version"], state["journaled_version"], state["restored_version"]) == (2, 2, 2)
    assert by_kind(served.losses) == {"push": 1, "assign_add": 1}
    assert served.scalars() == {"count": 2}
    push(served, 2)  # by the same rule, with its slots
    table = served.pull(["table"])["table"]
    np.testing.assert_allclose(table[2], -0.1 * (1 + 1.5 + 1.75), rtol=1e-6)
    assert served.staleness() == {0: 1}


def test_synchronous_workers_go_on_after_a_restart(server, served, connections) -> None:
    served.set_rule(Momentum(), ["v"], UpdateMode(num_needed=2))
    workers = {name: ServerClient(connections, name) for name in "ab"}
    threads = {name: ThreadPoolExecutor(1) for name in workers}
    gradient = {"v": np.ones(3, np.float32)}

    def together() -> list[bool]:
        futures = [
            threads[name].submit(worker.push, gradient, pull=["v"])
            for name, worker in workers.items()
        ]
        return [future.result(LIMIT_S).is_used for future in futures]

    for worker in workers.values():
        worker.know(V)
    assert together() == [True, True]
    served.journal()
    assert together() == [True, True]
    server.restart()
    served.send_rules_again(0)  # as a coordinator does
    # Computed from values that are no more, and newer than those that the server has now.
    assert together() == [True, True]
    assert together() == [True, True]
    assert [by_kind(worker.losses) for worker in workers.values()] == [{"push": 1}] * 2
    # Momentum of three updates of two workers; the lost one is in none of them.
    np.testing.assert_allclose(served.pull(["v"])["v"], -0.1 * 2 * (1 + 1.5 + 1.75), rtol=1e-6)
    for one in threads.values():
        one.shutdown()


class Marking(Momentum):
    """Unpickling it runs code: it makes a file."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        object.__setattr__(self, "mark", mark)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        vars(self)["mark"].touch()


def test_no_code_of_a_journal_runs_and_clients_send_a_rule_of_their_own_again(
    server, served, tmp_path
) -> None:
    mark = tmp_path / "mark"
    served.set_rule(Marking(mark), ["v", "table"])
    assert mark.exists()  # from an authenticated client
    push(served, 1)
    served.journal()
    assert b"pickle" not in server.path.read_bytes()
    mark.unlink()
    server.restart()
    served.pull(["v"])
    assert not mark.exists()
    push(served, 1)  # by the same rule, which the client sends first
    assert mark.exists()
    table = served.pull(["table"])["table"]
    np.testing.assert_allclose(table[1], -0.1 * (1 + 1.5), rtol=1e-6)
    assert served.scalars() == {"count": 2}


def test_push_that_lacks_its_optimizer_names_it_when_nobody_sends_it(
    server, served, connections, monkeypatch
) -> None:
    served.journal()
    server.restart()
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "0.3")
    other = ServerClient(connections)
    other.know(V)
    with pytest.raises(UnavailableError, match=r"server 0 restarted .* the optimizers \[''\]"):
        other.push({"v": np.ones(3, np.float32)})
    push(served, 1)
    assert other.push({"v": np.ones(3, np.float32)}).is_used
    assert served.describe()[0]["version"] == 2


def test_function_that_runs_again_makes_its_updates_once(server, served, connections) -> None:
    first, second = ServerClient(connections), ServerClient(connections)
    for client in (first, second):
        client.know(V)
    with first.in_function("f"):
        first.assign("v", np.ones(3), sign=1)  # then its process is killed
    with second.in_function("f", is_rerun=True):
        for _ in range(2):
            second.assign("v", np.ones(3), sign=1)
    second.assign("v", np.ones(3), sign=1)  # of no function
    np.testing.assert_array_equal(served.pull(["v"])["v"], 3)
    assert (first.num_repeated, second.num_repeated) == (0, 1)
    assert served.describe()[0]["updates"]["repeated"] == {"assign_add": 1}


def test_synchronous_gradients_of_a_lost_run_are_withdrawn(served, connections) -> None:
    served.set_rule(Momentum(), ["v"], UpdateMode(num_needed=2))
    gradient = {"v": np.ones(3, np.float32)}
    names = ("worker 0", "worker 1", "worker 2")
    workers = {name: ServerClient(connections, name) for name in names}
    for worker in workers.values():
        worker.know(V)

    def push_in(name: str, function: str, *, is_rerun: bool = False) -> bool:
        with workers[name].in_function(function, is_rerun=is_rerun):
            return workers[name].push(gradient).is_used

    with ThreadPoolExecutor(3) as pool:
        lost = pool.submit(push_in, "worker 0", "f")
        until(lambda: served.describe()[0]["waiting"] == ["worker 0"])
        again = pool.submit(push_in, "worker 1", "f", is_rerun=True)
        assert lost.result(LIMIT_S) is False
        until(lambda: served.describe()[0]["waiting"] == ["worker 1"])
        other = pool.submit(push_in, "worker 2", "g")
        assert again.result(LIMIT_S)
        assert other.result(LIMIT_S)
    np.testing.assert_allclose(served.pull(["v"])["v"], -0.1 * 2, rtol=1e-6)


def test_durable_updates_are_all_there_after_a_restart(tmp_path) -> None:
    """The next entry of the journal would be written in eleven days."""
    server = Server(tmp_path, is_durable=True)
    with Connections(server.keys, [server.running.address]) as connections:
        served = prepared(connections)
        with ThreadPoolExecutor(4) as pool:
            for _ in range(3):
                for change in [
                    pool.submit(served.assign, "v", np.ones(3), sign=1) for _ in range(40)
                ]:
                    change.result(LIMIT_S)
                push(served, 1)
                wanted = served.pull(["v", "table", "table:v"])
                server.restart()
                for name, value in served.pull([*wanted]).items():
                    np.testing.assert_array_equal(value, wanted[name], err_msg=name)
        assert by_kind(served.losses) == {}
        applied = served.describe()[0]["updates"]["applied"]
        assert applied == {"assign_add": 120, "push": 3}
    server.running.close()


def test_durable_update_that_cannot_be_written_is_reported_to_its_client(tmp_path) -> None:
    server = Server(tmp_path, is_durable=True)
    with Connections(server.keys, [server.running.address]) as connections:
        served = ServerClient(connections)
        served.create(V, np.zeros(3, np.float32))
        with (
            full_disk(server.path.stat().st_size),
            pytest.raises(ServerError, match="File too large"),
        ):
            served.assign("v", np.ones(3), sign=1)
        served.assign("v", np.ones(3), sign=1)
        np.testing.assert_array_equal(served.pull(["v"])["v"], 2)
    server.running.close()


@pytest.mark.parametrize("is_keyed", [False, True])
def test_pings_are_answered_while_the_programs_of_a_push_are_compiled(
    connections, monkeypatch, is_keyed
) -> None:
    """Without that, tables of many shapes make clients give up a live server."""
    served = ServerClient(connections)
    names = ["t1", "t2", "t3"]
    for width, name in enumerate(names, 1):
        if is_keyed:
            options = {"initializer": {"kind": "constant", "a": 0.0}}
            served.create(layout_of_keys(name, (width,), "float32", [0], options), None)
        else:
            layout = ShardLayout(name, (99, width), "float32", (0,), (99,), has_rows=True)
            served.create(layout, np.zeros((99, width), np.float32))
    served.set_rule(KerasUpdate(keras.optimizers.SGD(1.0)), names)
    threads: list[str] = []
    compiled = update_rule._Program.__init__

    def init(program, *args: object) -> None:
        threads.append(threading.current_thread().name)
        compiled(program, *args)

    monkeypatch.setattr(update_rule._Program, "__init__", init)

    def sent(count: int) -> list[str]:
        threads.clear()
        rows = np.arange(count)
        served.push(
            {}, {name: (rows, np.ones((count, w), "f4")) for w, name in enumerate(names, 1)}
        )
        return [one.partition(" ")[0] for one in threads]

    assert sent(3) == 3 * ["handler"]
    assert sent(5) == []
    assert sent(90) == 3 * ["handler"]  # another padded shape


def test_push_of_a_known_shape_is_handled_where_it_arrives(server, served) -> None:
    rule = KerasUpdate(keras.optimizers.SGD(1.0))
    served.set_rule(rule, ["v", "table"], optimizer="keras")
    quick = server.running._pushes.is_quick

    def message(*rows: str) -> Message:
        arrays = [np.ones(3, "f4"), *(len(rows) * [np.arange(2), np.ones((2, 2), "f4")])]
        optimizers = dict.fromkeys(["v", "table"], "keras")
        return Message("push", {"whole": ["v"], "rows": rows, "optimizers": optimizers}, arrays)

    assert not quick(message())
    served.push({"v": np.ones(3, "f4")}, {}, optimizers={"v": "keras"})
    assert quick(message())
    assert not quick(message("table"))
    server.running._pushes.set_mode(UpdateMode(num_needed=2))
    assert quick(message())
    assert not quick(message("table"))


def test_full_disk_does_not_stop_training_and_is_reported(tmp_path) -> None:
    keys, path = ClusterKeys.make(), tmp_path / "journal"
    server = ParameterServer(keys, journal=path, journal_interval_s=0.001)
    with Connections(keys, [server.address]) as connections:
        served = ServerClient(connections)
        served.create(V, np.zeros(3, np.float32))
        served.set_rule(Momentum(), ["v"])
        served.journal()
        with full_disk(path.stat().st_size + 2**10):
            served.create(TABLE, np.zeros((40, 2), np.float32))
            large = ShardLayout("large", (2**12,), "float32", (0,), (2**12,))
            served.create(large, np.zeros(2**12, np.float32))
            until(lambda: served.describe()[0]["journal_error"] is not None)
            assert "File too large" in served.describe()[0]["journal_error"]
            for _ in range(3):
                assert served.push({"v": np.ones(3, np.float32)}).is_used
            state = served.describe()[0]
            assert (state["version"], state["journaled_version"]) == (3, 0)
            with pytest.raises(ServerError, match="File too large"):
                served.journal()
            with pytest.raises(OSError, match="File too large"):
                server.close()
