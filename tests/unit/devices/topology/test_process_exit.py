"""Exit code of a process whose group breaks while all are about to exit."""

from __future__ import annotations

import dataclasses

import pytest

from stratagem.devices import process_exit


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
def test_planned_code_is_kept_unless_the_program_saw_the_loss(
    planned, is_reported, code, monkeypatch
) -> None:
    ends: list[int] = []
    monkeypatch.setattr(process_exit, "_state", process_exit._ExitState())
    monkeypatch.setattr(process_exit, "_exit", ends.append)
    monkeypatch.setattr(process_exit, "current_group", lambda: Broken(is_reported))
    for one in planned:
        process_exit.expect_exit(one)
    process_exit._exit_with_group()
    assert ends == [code]
