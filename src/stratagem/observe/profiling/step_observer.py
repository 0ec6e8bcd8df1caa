"""The observer of this process's training steps, while a profile is taken."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

from stratagem.messages import explain

# Reused: entering it costs 0.1 us.
UNOBSERVED = contextlib.nullcontext()


class StepObserver(Protocol):
    """Is notified of the training steps of this process."""

    def step(
        self, num_steps: int, results: Callable[[], Any]
    ) -> contextlib.AbstractContextManager[None]:
        """Returns a context for a call that runs steps; `results` are ready when they are done."""
        ...

    def end_if_done(self) -> None:
        """Ends the profile if its last step has run; called before work that is no step."""
        ...


class _ObserverState:
    observer: StepObserver | None = None


_state = _ObserverState()


def current_observer() -> StepObserver | None:
    """Returns the observer, or None if no profile is taken."""
    return _state.observer


def observed_call(
    num_steps: int, results: Callable[[], Any], *, trains: bool
) -> contextlib.AbstractContextManager[None]:
    """Returns a context for a call of a program, which is a training step if it `trains`."""
    observer = _state.observer
    if observer is None:
        return UNOBSERVED
    if trains:
        return observer.step(num_steps, results)
    observer.end_if_done()
    return UNOBSERVED


def observe(observer: StepObserver) -> None:
    """Registers the only observer of this process; raises RuntimeError if there is one."""
    if _state.observer is not None:
        raise RuntimeError(
            explain(
                "sg.profile was entered while another profile is active.",
                expected="one profile at a time.",
                fix="leave the first one, or give one profile all steps: steps=(10, 40).",
            )
        )
    _state.observer = observer


def end_observation(observer: StepObserver) -> None:
    """Removes an observer; does nothing if another one is registered."""
    if _state.observer is observer:
        _state.observer = None
