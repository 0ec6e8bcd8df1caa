"""GlobalStepWaiterHook waits for other workers' steps."""

from __future__ import annotations

import pytest

from stratagem.errors import DeadlineExceededError
from stratagem.estimator.hooks.timers import GlobalStepWaiterHook
from tests.unit.estimator.hooks.fake_loop import FakeClock, FakeSession


class Others:
    """Advances the global step while the hook waits."""

    def __init__(self, session, clock, *, steps_per_look: int, stops_at: int = 10**9) -> None:
        self.session, self.clock, self.looks = session, clock, 0
        self._steps, self._stops_at = steps_per_look, stops_at

    def __call__(self, seconds: float) -> None:
        self.looks += 1
        self.clock.now_s += seconds
        new = self.session.global_step + self._steps
        self.session.global_step = min(new, max(self._stops_at, self.session.global_step))


@pytest.mark.parametrize(("wait_until", "looks"), [(0, 0), (-5, 0), (10, 3), (12, 3), (13, 4)])
def test_waits_until_the_global_step_is_there(wait_until, looks) -> None:
    session, clock = FakeSession(), FakeClock()
    others = Others(session, clock, steps_per_look=4)
    hook = GlobalStepWaiterHook(wait_until, timeout_s=60, clock=clock, sleep=others)
    session.loop([hook], 5)
    assert others.looks == looks
    session.loop([hook], 1)
    assert others.looks == looks


def test_global_step_that_does_not_move_is_an_error() -> None:
    session, clock = FakeSession(), FakeClock()
    others = Others(session, clock, steps_per_look=4, stops_at=8)
    hook = GlobalStepWaiterHook(100, timeout_s=60, clock=clock, sleep=others)
    with pytest.raises(DeadlineExceededError, match="The global step stayed at 8 for 60 s"):
        session.loop([hook], 5)
    assert others.looks == 122  # 60 s after the second look, in which it moved for the last time


def test_limit_is_that_of_joining(monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_JOIN_TIMEOUT_S", "2")
    session, clock = FakeSession(), FakeClock()
    others = Others(session, clock, steps_per_look=0)
    hook = GlobalStepWaiterHook(1, clock=clock, sleep=others)
    with pytest.raises(DeadlineExceededError, match="The global step stayed at 0 for 2 s"):
        session.loop([hook], 5)
