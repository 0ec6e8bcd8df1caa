"""The default writer, the default step and the condition under which summaries are written.

What is set here counts for this thread, and for the replicas of steps that it runs. A compiled step
sees what is set when it is called, not when it was traced.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Generator
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from stratagem.messages import explain

__all__ = [
    "Setting",
    "Settings",
    "change",
    "checked_step",
    "current_settings",
    "get_step",
    "has_callbacks",
    "host_condition",
    "host_step",
    "latest_settings",
    "note_callbacks",
    "record_if",
    "set_step",
    "setting",
    "should_record_summaries",
    "trace_key",
]


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    """One thing that was set; another call that sets an equal one makes another."""

    value: Any = None


@dataclasses.dataclass(frozen=True)
class Settings:
    """All that is set at a time.

    Args:
        writer: the default writer; None for none.
        step: an integer, a variable that holds one, or None.
        condition: a boolean, a traced one, or a function that returns one.
    """

    writer: Setting = Setting()
    step: Setting = Setting()
    condition: Setting = Setting(value=True)


_NOTHING_SET = Settings()
_current: contextvars.ContextVar[Settings | None] = contextvars.ContextVar(
    "stratagem_summary_settings", default=None
)


@dataclasses.dataclass
class _Shared:
    """What functions see that the runtime calls, in threads of its own."""

    settings: Settings = dataclasses.field(default_factory=Settings)
    has_callbacks: bool = False


_shared = _Shared()


def current_settings() -> Settings:
    """Returns what is set in this thread."""
    return _current.get() or _NOTHING_SET


def latest_settings() -> Settings:
    """Returns what was set last in this process."""
    return _shared.settings


def note_callbacks() -> None:
    """Notes that compiled programs call this process back, and have to be waited for."""
    _shared.has_callbacks = True


def has_callbacks() -> bool:
    """Tells whether there are such programs."""
    return _shared.has_callbacks


def _set(settings: Settings) -> None:
    if _shared.has_callbacks:
        jax.effects_barrier()  # what was called before this sees what was set before
    _current.set(settings)
    _shared.settings = settings


def change(**changes: Any) -> None:
    """Sets something until it is set again.

    Args:
        **changes: values by the names of `Settings`.
    """
    wrapped = {name: Setting(value) for name, value in changes.items()}
    _set(dataclasses.replace(current_settings(), **wrapped))


@contextlib.contextmanager
def setting(**changes: Any) -> Generator[None]:
    """Sets something for the length of a `with` block.

    Args:
        **changes: values by the names of `Settings`.
    """
    before = current_settings()
    change(**changes)
    try:
        yield
    finally:
        _set(before)


def host_condition(settings: Settings) -> bool:
    """Tells whether the condition holds, outside of every trace.

    Args:
        settings: that have it.
    """
    value = settings.condition.value
    return bool(value() if callable(value) else value)


def host_step(settings: Settings) -> int | None:
    """Returns the default step, outside of every trace.

    Args:
        settings: that have it.
    """
    step = settings.step.value
    return None if step is None else int(np.asarray(getattr(step, "value", step)))


class _Same:
    """Compares an object by identity."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def trace_key() -> Any:
    """Returns what of the settings a trace that writes summaries holds for good; hashable.

    A function by which they are recorded is told by its code: a loop that writes `record_if(lambda:
    ...)` makes another function in every turn.
    """
    settings = current_settings()
    step, condition = settings.step.value, settings.condition.value
    is_variable = hasattr(step, "value")
    code = getattr(condition, "__code__", condition) if callable(condition) else None
    return _Same(step if is_variable else None), _Same(code)


def set_step(step: Any) -> None:
    """Sets the default step of summaries in this thread. Call anywhere.

    Args:
        step: an integer, an integer variable (its value counts at each summary, also in each of
            many steps of one call), or None for none.

    Raises:
        TypeError: anything else.

    Example:
        >>> sg.summary.experimental.set_step(3)
        >>> sg.summary.experimental.get_step()
        3
        >>> sg.summary.experimental.set_step(None)

    Source: TF 2.21 summary_ops_v2.py, set_step.
    """
    change(step=checked_step(step))


def get_step() -> Any:
    """Returns the default step of summaries, as it was set. Call anywhere.

    Returns:
        An integer, a variable, or None.

    Source: TF 2.21 summary_ops_v2.py, get_step.
    """
    return current_settings().step.value


def checked_step(step: Any) -> Any:
    """Returns a step as it is.

    Args:
        step: an integer, an integer array without axes, a variable that holds one, or None.

    Raises:
        TypeError: anything else.
    """
    if step is None:
        return None
    value = getattr(step, "value", step)
    dtype = getattr(value, "dtype", None)
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if dtype is not None:
        is_integer = jax.numpy.issubdtype(dtype, jax.numpy.integer) and not np.shape(value)
    if not is_integer:
        raise TypeError(
            explain(
                f"step={step!r} is of type {type(step).__name__}.",
                expected="an integer, or an integer variable such as optimizer.iterations.",
                fix="count steps in an int.",
            )
        )
    return step


@contextlib.contextmanager
def record_if(condition: Any) -> Generator[None]:
    """Writes summaries only where a condition holds, within a `with` block. Call anywhere.

    The innermost block counts. In a replica function the condition may be computed there: a
    summary that it forbids is not even computed.

    Args:
        condition: a bool, a traced boolean without axes, or a function without arguments that
            returns one; it is asked again for each step. A function that reads variables is part
            of the compiled step.

    Raises:
        TypeError: anything else.

    Example:
        >>> with sg.summary.record_if(False):
        ...     sg.summary.should_record_summaries()
        False

    Source: TF 2.21 summary_ops_v2.py, record_if.
    """
    is_boolean = isinstance(condition, bool | np.bool_)
    if isinstance(condition, jax.Array):
        is_boolean = condition.dtype == np.bool_ and condition.shape == ()
    if not (is_boolean or callable(condition)):
        raise TypeError(
            explain(
                f"condition={condition!r} is of type {type(condition).__name__}.",
                expected="a bool, a traced boolean without axes, or a function that returns one.",
                fix="compare, as in record_if(step % 100 == 0).",
            )
        )
    with setting(condition=condition):
        yield


def should_record_summaries() -> Any:
    """Tells whether a summary written here would be recorded. Call anywhere.

    Returns:
        False without a default writer. In a compiled step a traced boolean where the condition is.

    Example:
        >>> sg.summary.should_record_summaries()
        False

    Source: TF 2.21 summary_ops_v2.py, should_record_summaries.
    """
    settings = current_settings()
    if settings.writer.value is None:
        return False
    value = settings.condition.value
    value = value() if callable(value) else value
    return value if isinstance(value, Tracer) else bool(value)
