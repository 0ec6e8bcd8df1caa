"""What one process does for all, and what all do: an error of one is one of each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stratagem.checkpoint import together
from stratagem.checkpoint.together import agreed_with_first, done_by_all, done_by_first


class Group:
    """A group of two of which the other hands in what the test says."""

    def __init__(self, process_id: int, other: Any) -> None:
        self.process_id = process_id
        self.identity = SimpleNamespace(labels=("worker 0 (a:1)", "worker 1 (b:1)"))
        self.other = other
        self.told: list[Any] = []

    def exchange(self, name: str, value: Any) -> list[Any]:
        self.told.append((name, value))
        return [value, self.other] if self.process_id == 0 else [self.other, value]


def enter(monkeypatch: pytest.MonkeyPatch, group: Group | None) -> None:
    monkeypatch.setattr(together, "current_group", lambda: group)


def fail() -> None:
    raise OSError("disk full")


def test_alone_everything_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, None)
    done = []
    done_by_first("here", lambda: done.append(1))
    assert (done, done_by_all("here", lambda: 5), agreed_with_first("here", lambda: 6)) == (
        [1],
        5,
        6,
    )
    with pytest.raises(OSError, match="disk full"):
        done_by_all("here", fail)


@pytest.mark.parametrize(("process_id", "expected"), [(0, [1]), (1, [])])
def test_first_works_and_the_other_waits(process_id: int, expected: list[int], monkeypatch) -> None:
    group = Group(process_id, None)
    enter(monkeypatch, group)
    done: list[int] = []
    done_by_first("here", lambda: done.append(1))
    assert done == expected
    assert group.told == [("here", None)]


def test_process_0_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, Group(1, "its view"))
    assert agreed_with_first("here", lambda: "mine") == "its view"
    enter(monkeypatch, Group(0, None))
    assert agreed_with_first("here", lambda: "mine") == "mine"


def test_own_error_is_told_and_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(0, None)
    enter(monkeypatch, group)
    with pytest.raises(OSError, match="disk full"):
        done_by_first("here", fail)
    assert group.told == [("here", "OSError: disk full")]


def test_error_of_another_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, Group(1, "OSError: disk full"))
    with pytest.raises(RuntimeError, match=r"worker 0 \(a:1\) failed in here: OSError: disk full"):
        done_by_first("here", lambda: None)
