"""Capture of a program's training step instead of running it, for planning.

While `capture` runs a program, the first replica function that trains aborts it with a
`StepCaptured`. Replica functions before it, such as an evaluation, return zeros.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stratagem.devices.mesh import Topology
from stratagem.execution.tracing.arguments import Arguments
from stratagem.execution.tracing.functionalize import Trace

if TYPE_CHECKING:
    from stratagem.contexts import StrategyParts


@dataclasses.dataclass(frozen=True)
class CapturedStep:
    """A training step that was traced but not run."""

    strategy: Any
    fn: Callable[..., Any]
    arguments: Arguments
    trace: Trace
    optimizers: tuple[Any, ...]  # applied by the step
    retrace: Callable[[Arguments, Topology], Trace]  # for other arguments or devices


class StepCaptured(BaseException):
    """Aborts a program at its first training step, and carries the step."""

    def __init__(self, step: CapturedStep) -> None:
        super().__init__()
        self.step = step


class _Capture:
    """Capture in progress, for all threads, since a program may train in another thread."""

    is_on: bool = False
    takes_all: bool = False


class _Seen(threading.local):
    optimizers: dict[int, Any] | None = None


capturing, _seen = _Capture(), _Seen()


def capture(run: Callable[[], Any], *, takes_all: bool = False) -> CapturedStep | None:
    """Runs a program until its first training step, which is neither compiled nor run.

    Returns None if there is none. With `takes_all`, captures the first step of any kind.
    """
    before = (capturing.is_on, capturing.takes_all)
    capturing.is_on, capturing.takes_all = True, takes_all
    try:
        run()
    except StepCaptured as captured:
        return captured.step
    finally:
        capturing.is_on, capturing.takes_all = before
    return None


def note_optimizer(optimizer: object) -> None:
    """Records that the replica function being traced applies an optimizer."""
    if _seen.optimizers is not None:
        _seen.optimizers[id(optimizer)] = optimizer


def offer_step(
    strategy: StrategyParts,
    fn: Callable[..., Any],
    arguments: Arguments,
    trace: Callable[[Callable[..., Any], Arguments, Topology], Trace],
) -> None:
    """Raises `StepCaptured` if the capture that is on wants this step."""
    before, _seen.optimizers = _seen.optimizers, {}
    try:
        traced = trace(fn, arguments, strategy.topology)
        optimizers = tuple(_seen.optimizers.values())
    finally:
        _seen.optimizers = before
    trains = any(getattr(variable, "trainable", False) for variable in traced.written)
    if trains or capturing.takes_all:
        raise StepCaptured(
            CapturedStep(
                strategy,
                fn,
                arguments,
                traced,
                optimizers,
                lambda other, topology: trace(fn, other, topology),
            )
        )
