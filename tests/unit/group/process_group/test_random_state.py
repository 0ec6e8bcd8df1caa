"""Random state of process 0, taken over by all processes of a group."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from stratagem.group import current as random_state
from stratagem.group.current import agree_on_random_state


class Member:
    """A process of a group of two that receives the state of process 0."""

    def __init__(self, process_id: int, first: Any = None) -> None:
        self.process_id = process_id
        self.first = first
        self.sent: Any = None

    def exchange(self, name: str, own: Any) -> list[Any]:
        self.sent = own
        return [own if self.process_id == 0 else self.first, None]


@pytest.fixture(autouse=True)
def own_state():
    """Restores the state of this process."""
    saved = random.getstate(), np.random.get_state()
    yield
    random.setstate(saved[0])
    np.random.set_state(saved[1])


def draw() -> tuple[float, float]:
    return random.random(), np.random.random()


def test_others_draw_what_process_0_draws(monkeypatch) -> None:
    random.seed(1)
    np.random.seed(2)
    first = Member(0)
    monkeypatch.setattr(random_state, "current_group", lambda: first)
    agree_on_random_state()
    expected = draw()
    random.seed(7)
    np.random.seed(8)
    other = Member(1, first.sent)
    monkeypatch.setattr(random_state, "current_group", lambda: other)
    agree_on_random_state()
    assert other.sent is None
    assert draw() == expected


def test_process_by_itself_keeps_its_state(monkeypatch) -> None:
    monkeypatch.setattr(random_state, "current_group", lambda: None)
    random.seed(1)
    np.random.seed(2)
    expected = draw()
    random.seed(1)
    np.random.seed(2)
    agree_on_random_state()
    assert draw() == expected
