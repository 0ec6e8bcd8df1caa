"""Save and exit between steps, as the agreed step asks for it."""

from __future__ import annotations

import types
from typing import Any

import pytest

from stratagem.checkpoint import preemption_exit
from stratagem.checkpoint.preemption_exit import PreemptionAction, PreemptionExit, print_status
from tests.unit.checkpoint.groups import Line


class Config:
    """Settings whose exit raises an error, or returns."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def for_environment(self) -> Any:
        return self

    def exit(self) -> None:
        if self.error is not None:
            raise self.error


class Manager:
    def __init__(self) -> None:
        self.num_syncs = 0

    def sync(self) -> None:
        self.num_syncs += 1


class Agreed:
    """An agreed step that asks for these actions."""

    actions: tuple[PreemptionAction, ...] = ()

    def __init__(self, config: Any, group: Any, *, name: str) -> None:
        self.remaining = list(self.actions)
        self.notice = types.SimpleNamespace(message="The node is going down.")
        self.name, self.save_s, self.is_running = name, 0.0, False

    def start(self) -> None:
        self.is_running = True

    def stop(self) -> None:
        self.is_running = False

    def next_step(self) -> PreemptionAction | None:
        return self.remaining.pop(0) if self.remaining else None


def leaving(monkeypatch, *actions: PreemptionAction, error: BaseException | None = None) -> Any:
    monkeypatch.setattr(Agreed, "actions", actions)
    monkeypatch.setattr(preemption_exit, "AgreedStep", Agreed)
    monkeypatch.setattr(preemption_exit, "expect_exit", lambda code: None)
    config: Any = Config(error)
    manager: Any = Manager()
    return PreemptionExit(config, manager, "Backup"), manager


SAVE, EXIT = PreemptionAction.SAVE, PreemptionAction.EXIT


def test_without_a_notice_nothing_is_saved(monkeypatch) -> None:
    exit_, manager = leaving(monkeypatch)
    exit_.before_step(3, lambda: 1 / 0)
    assert manager.num_syncs == 0


def test_state_is_saved_once_then_written_and_the_process_exits(monkeypatch, capsys) -> None:
    exit_, manager = leaving(monkeypatch, SAVE, EXIT, error=SystemExit(42))
    saves = []
    with pytest.raises(SystemExit) as caught:
        exit_.before_step(3, lambda: saves.append(3) is None)
    assert (saves, manager.num_syncs, caught.value.code) == ([3], 1, 42)
    assert capsys.readouterr().err == "Backup: saved after step 3: The node is going down.\n"


def test_exit_at_a_later_step_saves_that_step_too(monkeypatch) -> None:
    exit_, _ = leaving(monkeypatch, SAVE)
    saves = []
    exit_.before_step(3, lambda: saves.append(3) is None)
    exit_._agreed_step.remaining.append(EXIT)
    exit_.before_step(5, lambda: saves.append(5) is None)  # this exit function returns
    assert saves == [3, 5]


def test_nothing_to_save_prints_nothing_and_own_errors_come_out(monkeypatch, capsys) -> None:
    exit_, manager = leaving(monkeypatch, EXIT, error=KeyError("own"))
    with pytest.raises(KeyError, match="own"):
        exit_.before_step(0, lambda: False)
    assert manager.num_syncs == 1
    assert capsys.readouterr().err == ""


def test_each_exit_has_a_topic_of_its_own_until_it_stops(monkeypatch) -> None:
    exits = [leaving(monkeypatch)[0] for _ in range(2)]
    steps = [one._agreed_step for one in exits]
    assert steps[0].name != steps[1].name
    exits[0].stop()
    assert [step.is_running for step in steps] == [False, True]


def test_status_names_the_process_of_a_group(monkeypatch, capsys) -> None:
    monkeypatch.setattr(preemption_exit, "current_group", lambda: Line(2).members[1])
    print_status("Backup", "saved")
    assert capsys.readouterr().err == "Backup: worker 1 (host1:1): saved\n"
