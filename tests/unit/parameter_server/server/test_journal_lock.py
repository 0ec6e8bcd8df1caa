"""Who may write a journal."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from stratagem.errors import UnavailableError
from stratagem.group.transport.journal_lock import JournalLock
from stratagem.group.transport.keys import ClusterKeys
from stratagem.parameter_server.server.server import ParameterServer

_KEEP = (
    "import sys\n"
    "from pathlib import Path\n"
    "from stratagem.group.transport.journal_lock import JournalLock\n"
    "lock = JournalLock(Path(sys.argv[1]))\n"
    "print('there', flush=True)\n"
    "sys.stdin.read()\n"
)


def _keeper(path: Path) -> subprocess.Popen[str]:
    keeper = subprocess.Popen(
        [sys.executable, "-c", _KEEP, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert keeper.stdout is not None
    assert keeper.stdout.readline() == "there\n"
    return keeper


def test_lock_of_another_process_is_refused_until_that_one_is_killed(tmp_path, monkeypatch) -> None:
    path = tmp_path / "journal.lock"
    with _keeper(path) as keeper:
        monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "0.1")
        with pytest.raises(UnavailableError, match="is in use by process") as raised:
            JournalLock(path)
        assert f"process {keeper.pid} on " in str(raised.value)
        monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "60")
        taken: list[JournalLock] = []
        waiting = threading.Thread(target=lambda: taken.append(JournalLock(path)))
        waiting.start()
        assert waiting.is_alive()
        keeper.kill()
        waiting.join()
        taken[0].close()
        taken[0].close()


def test_journal_is_of_one_server(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "0.1")
    keys, path = ClusterKeys.make(), tmp_path / "folder" / "server-0.journal"
    with (
        ParameterServer(keys, journal=path),
        pytest.raises(UnavailableError, match="is in use by process"),
    ):
        ParameterServer(keys, journal=path)
    ParameterServer(keys, journal=path).close()


def test_journal_that_cannot_be_read_is_given_free(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "0.1")
    keys, path = ClusterKeys.make(), tmp_path / "server-0.journal"
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        ParameterServer(keys, journal=path)
    path.rmdir()
    ParameterServer(keys, journal=path).close()
