"""Unix sockets of servers: only where nobody else can come between, and only while one listens."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from stratagem.errors import DataLossError
from stratagem.group.transport import local_sockets as module
from stratagem.group.transport.keys import ClusterKeys
from stratagem.group.transport.listener import Listener
from stratagem.group.transport.local_sockets import LocalSocket
from stratagem.parameter_server.server.server import ParameterServer


@pytest.fixture
def base(tmp_path, monkeypatch) -> Iterator[Path]:
    """A folder of a short path, which pytest's own is not always."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(module, "_MAX_PATH_BYTES", 200)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "not there"))
    return tmp_path


def made() -> LocalSocket:
    local = LocalSocket.make()
    assert local is not None
    return local


def test_folder_is_for_this_user_only_whatever_the_mask(base) -> None:
    before = os.umask(0)
    try:
        local = made()
    finally:
        os.umask(before)
    folder = Path(local.path).parent
    assert folder.parent == base
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not Path(local.path).exists()


def test_names_and_passwords_are_new_each_time_and_passwords_are_not_shown(base) -> None:
    one, other = made(), made()
    assert one.path != other.path
    assert one.password != other.password
    assert one.password.decode() not in repr(one)


def _open_to_others(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o750)


def _link(folder: Path) -> None:
    private = folder.with_name("private")
    private.mkdir(mode=0o700)
    folder.symlink_to(private)


def _file(folder: Path) -> None:
    folder.write_text("")


def _in_a_shared_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    folder.parent.chmod(0o777)


@pytest.mark.parametrize("spoil", [_open_to_others, _link, _file, _in_a_shared_folder])
def test_folder_that_others_can_enter_or_replace_is_not_used(base, spoil) -> None:
    spoil(base / f"stratagem-{os.geteuid()}")
    assert LocalSocket.make() is None


@pytest.mark.parametrize("whose", ["stratagem-", "above"])
def test_folder_of_another_user_is_not_used(base, monkeypatch, whose) -> None:
    folder = Path(made().path).parent if whose == "stratagem-" else base
    own = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        status = list(own(path))
        if path == folder:
            status[stat.ST_UID] = os.geteuid() + 1
        return os.stat_result(status)

    monkeypatch.setattr(Path, "lstat", lstat)
    assert LocalSocket.make() is None


def test_folder_with_sticky_files_is_used_though_all_can_write_to_it(base) -> None:
    base.chmod(0o1777)
    assert LocalSocket.make() is not None


def test_path_that_is_too_long_is_not_used(base, monkeypatch) -> None:
    monkeypatch.setattr(module, "_MAX_PATH_BYTES", len(made().path))
    assert LocalSocket.make() is not None
    monkeypatch.setattr(module, "_MAX_PATH_BYTES", len(made().path) - 1)
    (folder,) = base.iterdir()
    folder.rmdir()
    assert LocalSocket.make() is None
    assert list(base.iterdir()) == []


def test_other_folder_is_used_where_the_first_is_not_there(base, monkeypatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base / "gone"))
    monkeypatch.setattr("tempfile.tempdir", str(base))
    assert Path(made().path).parent.parent == base


def test_only_one_at_which_somebody_listens_is_reachable(base) -> None:
    local = made()
    assert not local.is_reachable()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(local.path)
        assert not local.is_reachable()
        listening.listen()
        assert local.is_reachable()
        Path(local.path).parent.chmod(0o755)
        assert not local.is_reachable()
        Path(local.path).parent.chmod(0o700)
    assert Path(local.path).exists()
    assert not local.is_reachable()  # what a process that was killed leaves
    local.remove()
    local.remove()
    Path(local.path).parent.mkdir(mode=0o700)
    Path(local.path).write_text("")
    assert not local.is_reachable()


def test_sockets_of_dead_processes_are_removed_and_no_others(base) -> None:
    old, future, young, living = made(), made(), made(), made()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(living.path)
        listening.listen()
        for dead in (old, future, young):
            with socket.socket(socket.AF_UNIX) as ended:
                ended.bind(dead.path)
        note = Path(old.path).with_name("note")
        note.write_text("")
        # Of a process that was killed a moment ago: its successor sweeps.
        for path in (old.path, living.path, note):
            os.utime(path, (time.time() - 5, time.time() - 5))
        # The clock was set back after another one was killed.
        os.utime(future.path, (time.time() + 60, time.time() + 60))
        os.utime(young.path)
        made()
        assert sorted(map(str, note.parent.iterdir())) == sorted(
            map(str, [young.path, living.path, note])
        )


def test_folder_that_another_server_removes_meanwhile_is_no_error(base, monkeypatch) -> None:
    """Another server's sweep comes between the making of the folder and its use."""
    find = module._folder

    def find_and_lose() -> Path | None:
        folder = find()
        assert folder is not None
        folder.rmdir()
        return folder

    monkeypatch.setattr(module, "_folder", find_and_lose)
    with Listener(ClusterKeys.make(), print) as listener:
        assert listener.local is not None
        assert listener.local.is_reachable()


def test_server_that_refuses_its_journal_sweeps_before(base, tmp_path) -> None:
    dead = made()
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(dead.path)
    os.utime(dead.path, (time.time() - 5, time.time() - 5))
    journal = tmp_path / "journal"
    journal.write_bytes(b"no journal")
    with pytest.raises(DataLossError):
        ParameterServer(ClusterKeys.make(), journal=journal)
    assert not Path(dead.path).parent.exists()


def test_listener_has_one_while_it_is_open_for_who_has_the_password(base) -> None:
    def handle(request) -> None:
        request.answer(request.message)

    folder = base / f"stratagem-{os.geteuid()}"
    with Listener(ClusterKeys.make(), handle) as listener, zmq.Context() as context:
        assert listener.local is not None
        assert [str(path) for path in folder.iterdir()] == [listener.local.path]
        assert listener.local.is_reachable()
        for password, is_heard in [(None, False), (b"x", False), (listener.local.password, True)]:
            with context.socket(zmq.DEALER) as client:
                client.linger = 0
                if password is not None:
                    LocalSocket(listener.local.path, password).unlock(client)
                client.connect(listener.local.address)
                with contextlib.suppress(zmq.Again):  # it was refused before
                    client.send_multipart([b"12345678", b"no message"], zmq.NOBLOCK)
                assert bool(client.poll(30_000 if is_heard else 300)) == is_heard
    assert list(base.iterdir()) == []


def test_folder_that_another_listener_removes_before_the_socket_is_bound_is_made_again(
    base, monkeypatch
) -> None:
    make = LocalSocket.make

    def make_and_lose_folder() -> LocalSocket | None:
        local = make()
        assert local is not None
        os.rmdir(os.path.dirname(local.path))
        return local

    monkeypatch.setattr(LocalSocket, "make", make_and_lose_folder)
    with Listener(ClusterKeys.make(), lambda request: None) as listener:
        assert listener.local is not None
        assert listener.local.is_reachable()
    assert list(base.iterdir()) == []
