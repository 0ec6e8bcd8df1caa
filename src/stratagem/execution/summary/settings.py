"""The default writer, default step and recording condition of summaries.

Settings apply to this thread, and to the replicas of the steps that it runs. A compiled step reads
them when it is called, not when it is traced.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Generator
from typing import Any, cast

import jax
import numpy as np
from jax.core import Tracer

from stratagem.errors import explain


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    """One value that was set; setting an equal value again creates a different object."""

    value: Any = None


@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings at one time.

    `step` is an integer, an integer variable or None. `condition` is a boolean, a traced boolean,
    or a function that returns one.
    """

    writer: Setting = Setting()
    step: Setting = Setting()
    condition: Setting = Setting(value=True)


_DEFAULTS = Settings()
_current: contextvars.ContextVar[Settings | None] = contextvars.ContextVar(
    "stratagem_summary_settings", default=None
)


@dataclasses.dataclass
class _ProcessSettings:
    """Settings for host callbacks, which the runtime calls in other threads."""

    settings: Settings = dataclasses.field(default_factory=Settings)
    has_callbacks: bool = False


_shared = _ProcessSettings()


def current_settings() -> Settings:
    """Returns the settings of this thread."""
    return _current.get() or _DEFAULTS


def latest_settings() -> Settings:
    """Returns the settings that were set last in this process."""
    return _shared.settings


def note_callbacks() -> None:
    """Records that compiled programs call back into this process, and must be waited for."""
    _shared.has_callbacks = True


def has_callbacks() -> bool:
    """Returns True if there are such programs."""
    return _shared.has_callbacks


def _set_current(settings: Settings) -> None:
    if _shared.has_callbacks:
        jax.effects_barrier()  # earlier calls must see the earlier settings
    _current.set(settings)
    _shared.settings = settings


def update(**changes: object) -> None:
    """Changes settings, by field name of `Settings`."""
    wrapped = {name: Setting(value) for name, value in changes.items()}
    _set_current(dataclasses.replace(current_settings(), **wrapped))


@contextlib.contextmanager
def override(**changes: object) -> Generator[None]:
    """Changes settings within a `with` block, by field name of `Settings`."""
    before = current_settings()
    update(**changes)
    try:
        yield
    finally:
        _set_current(before)


def host_condition(settings: Settings) -> bool:
    """Returns the condition; call it outside of every trace."""
    value = settings.condition.value
    return bool(value() if callable(value) else value)


def host_step(settings: Settings) -> int | None:
    """Returns the default step; call it outside of every trace."""
    step = settings.step.value
    return None if step is None else int(np.asarray(getattr(step, "value", step)))


class _Identity:
    """Compares an object by identity."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def trace_key() -> Any:
    """Returns a hashable key of the settings that are baked into a trace.

    A condition function counts by its code: a loop that calls `record_if(lambda: ...)` creates a
    new function in every iteration.
    """
    settings = current_settings()
    step, condition = settings.step.value, settings.condition.value
    is_variable = hasattr(step, "value")
    code = getattr(condition, "__code__", condition) if callable(condition) else None
    return _Identity(step if is_variable else None), _Identity(code)


def set_step(step: object) -> None:
    """Sets the default step of summaries in this thread. Call anywhere.

    Args:
        step: an integer, an integer variable (read at each summary, also within a call of several
            steps), or None for no default.

    Raises:
        TypeError: anything else.

    Example:
        >>> sg.summary.experimental.set_step(3)
        >>> sg.summary.experimental.get_step()
        3
        >>> sg.summary.experimental.set_step(None)

    Source: TF 2.21 summary_ops_v2.py, set_step.
    """
    update(step=checked_step(step))


def get_step() -> Any:
    """Returns the default step of summaries, as it was set. Call anywhere.

    Returns:
        An integer, a variable, or None.

    Example:
        >>> sg.summary.experimental.set_step(100)
        >>> sg.summary.experimental.get_step()
        100
        >>> sg.summary.experimental.set_step(None)

    Source: TF 2.21 summary_ops_v2.py, get_step.
    """
    return current_settings().step.value


def checked_step(step: object) -> Any:
    """Returns the step if it is a scalar integer, an integer variable or None; raises TypeError."""
    if step is None:
        return None
    value = cast("Any", getattr(step, "value", step))
    dtype = getattr(value, "dtype", None)
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if dtype is not None:
        is_integer = jax.numpy.issubdtype(dtype, jax.numpy.integer) and not np.shape(value)
    if not is_integer:
        raise TypeError(
            explain(
                f"step={step!r} is of type {type(step).__name__}.",
                expected="an integer, or an integer variable such as optimizer.iterations.",
                fix="pass the step as an int.",
            )
        )
    return step


@contextlib.contextmanager
def record_if(condition: object) -> Generator[None]:
    """Records summaries only if a condition holds, within a `with` block. Call anywhere.

    The innermost block counts. In a replica function the condition may be computed there; a summary
    that is not recorded is not computed either.

    Args:
        condition: a bool, a traced scalar boolean, or a function without arguments that returns
            one, called for each step. A function that reads variables becomes part of the compiled
            step.

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
                expected="a bool, a traced scalar boolean, or a function that returns one.",
                fix="pass a comparison, such as record_if(step % 100 == 0).",
            )
        )
    with override(condition=condition):
        yield


def should_record_summaries() -> Any:
    """Returns whether a summary written here would be recorded. Call anywhere.

    Returns:
        A bool, False without a default writer; a traced boolean if the condition is traced.

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
