"""Exit code of a process whose group breaks while all are about to exit."""

from __future__ import annotations

import dataclasses

import pytest

from stratagem.topology import ending


@dataclasses.dataclass
class Broken:
    """A group of which a process is lost while this one waits for all to end."""

    is_reported: bool = False
    verdict: object = None

    def leave(self) -> bool:
        return False

    def drain(self, limit_s: float) -> None: ...


@pytest.mark.parametrize(
    ("planned", "is_reported", "code"),
    [
        ([], False, 0),
        ([], True, 1),
        ([42], False, 42),
        ([42], True, 1),
        ([None], False, 0),
        (["a reason in words"], False, 1),
    ],
)
def test_planned_code_is_kept_unless_the_program_was_told_of_the_loss(
    planned, is_reported, code, monkeypatch
) -> None:
    ends: list[int] = []
    monkeypatch.setattr(ending, "_state", ending._State())
    monkeypatch.setattr(ending, "_end", ends.append)
    monkeypatch.setattr(ending, "current_group", lambda: Broken(is_reported))
    for one in planned:
        ending.expect_exit(one)
    ending._leave()
    assert ends == [code]
