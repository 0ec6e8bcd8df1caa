"""What is drawn while somebody waits for functions."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from stratagem.parameter_server.coordinator.cluster_coordinator import drawn_progress
from tests.unit.parameter_server.shared_with_workers import fail, note, seen

pytestmark = pytest.mark.usefixtures("nothing_shared")


def drawn(states: list[dict[str, int]], *, is_terminal: bool) -> str:
    """What is drawn of counts, one after the other."""
    file, now = io.StringIO(), iter(states)
    console = Console(file=file, force_terminal=is_terminal, width=100)
    with drawn_progress(lambda: next(now), console) as draw:
        for _ in states[3:]:  # the bar itself asks before, at the beginning and at the end
            draw()
    return file.getvalue()


def state(queued: int, running: int, done: int, waiting: int = 0) -> dict[str, int]:
    return {"queued": queued, "waiting": waiting, "running": running, "done": done}


def test_functions_of_this_wait_are_counted() -> None:
    states = [state(8, 2, 100), state(8, 2, 100), state(3, 2, 104, waiting=1), state(0, 0, 110)]
    text = drawn(states, is_terminal=True)
    assert " 0/10" in text
    assert " 4/10" in text
    assert "2 running" in text
    assert "10/10" in text


def test_where_there_is_no_terminal_the_end_is_reported() -> None:
    text = drawn([state(1, 0, 0), state(1, 0, 0), state(0, 0, 1)], is_terminal=False)
    assert "1/1" in text
    assert "0 running" in text
    assert len(text.strip().splitlines()) == 1


def test_join_draws_and_raises_as_ever(coordinator, capsys) -> None:
    for number in range(5):
        coordinator.schedule(note, args=(number,))
    coordinator.join(progress=True)
    assert sorted(seen) == [0, 1, 2, 3, 4]
    assert "5/5" in capsys.readouterr().err
    coordinator.schedule(fail)
    with pytest.raises(ArithmeticError, match="on purpose"):
        coordinator.join(progress=True)
    coordinator.join(progress=True)
