"""Calls on process 0 or on all processes raise the same error everywhere."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stratagem.checkpoint import latest as group_calls
from stratagem.checkpoint.latest import is_first, read_in_time, run_on_all, run_on_first
from stratagem.checkpoint.saving import load_manifest
from stratagem.checkpoint.storage import files
from stratagem.errors import DataLossError, DeadlineExceededError


class Group:
    """A group of two, with an answer of the other that the test sets."""

    def __init__(self, process_id: int, result: Any = None, error: Any = None) -> None:
        self.process_id = process_id
        self.identity = SimpleNamespace(labels=("worker 0 (a:1)", "worker 1 (b:1)"))
        self.other = {"result": result, "error": error}
        self.sent: list[Any] = []

    def exchange(self, name: str, value: Any, *, timeout_s: float, setting: str) -> list[Any]:
        assert timeout_s > 0
        assert setting == "STRATAGEM_SAVE_TIMEOUT_S"
        self.sent.append((name, value))
        return [value, self.other] if self.process_id == 0 else [self.other, value]


def enter(monkeypatch: pytest.MonkeyPatch, group: Group | None) -> None:
    monkeypatch.setattr(group_calls, "current_group", lambda: group)


def fail() -> None:
    raise OSError("disk full")


def test_alone_everything_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, None)
    assert (run_on_first("here", lambda: 4), run_on_all("here", lambda: 5)) == (4, 5)
    assert is_first()
    with pytest.raises(OSError, match="disk full"):
        run_on_all("here", fail)


@pytest.mark.parametrize("process_id", [0, 1])
def test_first_works_and_decides_and_all_keep_what_all_did(process_id: int, monkeypatch) -> None:
    group = Group(process_id, "its view")
    enter(monkeypatch, group)
    done: list[int] = []
    found = run_on_first("here", lambda: done.append(1) or "mine")
    assert (found, done) == (("mine", [1]) if process_id == 0 else ("its view", []))
    assert is_first() == (process_id == 0)
    result = object()  # nothing that could be sent
    assert run_on_all("here", lambda: result) is result
    assert group.sent[-1] == ("here", {"result": None, "error": None})


def test_local_error_is_sent_and_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(0)
    enter(monkeypatch, group)
    with pytest.raises(OSError, match="disk full"):
        run_on_first("here", fail)
    assert group.sent == [("here", {"result": None, "error": ["OSError", "disk full"]})]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("OSError", OSError), ("DataLossError", DataLossError), ("KeyboardError", RuntimeError)],
)
def test_error_of_another_names_it_and_keeps_its_class(
    kind: str, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(monkeypatch, Group(1, error=[kind, "disk full"]))
    with pytest.raises(
        expected, match=rf"worker 0 \(a:1\) failed in here: {kind}: disk full"
    ) as raised:
        run_on_first("here", lambda: None)
    assert type(raised.value) is expected


# A file system that hangs while others wait.


@pytest.fixture
def hung(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    """A checkpoint whose metadata can be opened, but not read, as on a lost NFS server."""
    folder = tmp_path / "hung-1"
    folder.mkdir()
    os.mkfifo(folder / "_CHECKPOINT_METADATA")
    monkeypatch.setattr(files, "is_whole", lambda folder: True)
    monkeypatch.setenv("STRATAGEM_SAVE_TIMEOUT_S", "0.2")
    yield folder
    with open(folder / "_CHECKPOINT_METADATA", "wb"):
        pass  # ends the thread


def test_reading_that_hangs_ends_with_the_limit_and_names_the_folder(hung, monkeypatch) -> None:
    group = Group(0)
    enter(monkeypatch, group)
    with pytest.raises(DeadlineExceededError, match=f"has not read {hung} within 0.2 s") as raised:
        run_on_first("here", lambda: load_manifest(hung))
    assert "SG508" in str(raised.value)
    (_, sent), *_ = group.sent
    assert sent["error"] == ["DeadlineExceededError", str(raised.value)]


def test_reading_in_time_returns_or_raises_what_it_does(tmp_path, monkeypatch) -> None:
    here = threading.current_thread()
    assert read_in_time(tmp_path, threading.current_thread) is here
    enter(monkeypatch, Group(0))
    assert read_in_time(tmp_path, threading.current_thread) is not here
    assert read_in_time(tmp_path, lambda: None) is None
    with pytest.raises(OSError, match="disk full"):
        read_in_time(tmp_path, fail)
