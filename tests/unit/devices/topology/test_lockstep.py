"""Status that a program reports while it waits for other processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stratagem.devices import lockstep
from stratagem.group.member import Group
from stratagem.group.verdict import GroupLimits
from tests.unit.group.process_group.members import joined


@pytest.fixture
def group(monkeypatch) -> Iterator[Group]:
    (member,) = joined(1, GroupLimits(join_s=120))
    monkeypatch.setattr(lockstep, "current_group", lambda: member)
    yield member
    member.abandon()


def test_error_that_comes_with_the_data_of_a_broken_group_is_reported_to_the_program(group) -> None:
    with pytest.raises(OSError, match="disk"), lockstep.waiting_for_input("a dataset"):
        raise OSError("disk")
    assert not group.is_reported, "the group is whole"
    group.report_error("a bug")
    group.wait_for_verdict()
    with pytest.raises(StopIteration), lockstep.waiting_for_input("a dataset"):
        raise StopIteration
    assert group.is_reported


def test_without_a_group_nothing_is_said() -> None:
    with lockstep.waiting_for_input("a dataset"):
        assert lockstep.current_group() is None


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), ValueError("a bug")])
def test_program_that_was_not_started_does_not_count(group, error) -> None:
    """Other processes that wait in it learn that this process has left: it is a step behind."""

    def start():
        assert group.num_steps == 1
        raise error

    with pytest.raises(type(error)):
        lockstep.run_together("train", start, platform="cpu")
    assert group.num_steps == 0
    assert lockstep.run_together("train", lambda: (7, ()), platform="cpu") == 7
    assert group.num_steps == 1
