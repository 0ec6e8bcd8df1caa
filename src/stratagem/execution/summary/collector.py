"""Collection of the summaries that a traced function calls, as extra outputs of the function.

The caller passes their values to the writer after the function ran. So summaries need no callback
from the device, are written once however often the function is traced, and all processes compile
the same program.

Settings apply to this thread, and to the replicas of the steps that it runs. A compiled step reads
them when it is called, not when it is traced.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state

from stratagem.errors import check_type

if TYPE_CHECKING:
    from stratagem.execution.summary.writer import SummaryWriter


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
_settings: contextvars.ContextVar[Settings | None] = contextvars.ContextVar(
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
    return _settings.get() or _DEFAULTS


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
    _settings.set(settings)
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
        >>> sg.summary.set_step(3)
        >>> sg.summary.get_step()
        3
        >>> sg.summary.set_step(None)

    Source: TF 2.21 summary_ops_v2.py, set_step.
    """
    update(step=checked_step(step))


def get_step() -> Any:
    """Returns the default step of summaries, as it was set. Call anywhere.

    Returns:
        An integer, a variable, or None.

    Example:
        >>> sg.summary.set_step(100)
        >>> sg.summary.get_step()
        100
        >>> sg.summary.set_step(None)

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
    wanted = "an integer, or an integer variable such as optimizer.iterations"
    check_type("step", step, lambda _: is_integer, wanted, "pass the step as an int.")
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
    wanted = "a bool, a traced scalar boolean, or a function that returns one"
    fix = "pass a comparison, such as record_if(step % 100 == 0)."
    check_type("condition", condition, lambda one: is_boolean or callable(one), wanted, fix)
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


# `SummaryCall`, one call of `sg.summary.scalar` etc., and `Summary`, its form in a traced step.


@dataclasses.dataclass(frozen=True, eq=False)
class SummaryCall:
    """One call of a summary function.

    `encode` makes a `Summary.Value` from the result of `reduce`, which runs only if the summary is
    recorded, on `data`, None if it needs none. `step` may be traced; None for the default step.
    """

    tag: str
    encode: Callable[[Any], Any]
    data: Any
    step: Any
    reduce: Callable[[Any], Any] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Summary:
    """A summary of a traced step.

    `writer` is the default writer set within the step, or None for the caller's. `step` is None
    unless known when the step is traced. A traced step or condition is among the values.
    """

    tag: str
    encode: Callable[[Any], Any]
    writer: SummaryWriter | None = None
    step: int | None = None
    has_traced_step: bool = False
    has_condition: bool = False

    @property
    def needs_step(self) -> bool:
        """True if the summary uses the default step of the call."""
        return self.step is None and not self.has_traced_step

    def writer_of(
        self, default: SummaryWriter | None, *, is_anywhere: bool = False
    ) -> SummaryWriter | None:
        """Returns the writer, or None if nothing is written.

        With `is_anywhere`, a writer that is active only in another process counts, too.
        """
        writer = self.writer or default
        if writer is None or not (writer.has_folder if is_anywhere else writer.is_active):
            return None
        return writer


_current = threading.local()


@dataclasses.dataclass
class _ShapeInference:
    infers_shapes: Callable[[], bool] = lambda: False


_shape_inference = _ShapeInference()


def set_shape_inference(infers_shapes: Callable[[], bool]) -> None:
    """Sets the function that returns True while code only runs to infer shapes."""
    _shape_inference.infers_shapes = infers_shapes


def infers_shapes() -> bool:
    """Returns True if the calling code only runs to infer shapes; nothing is recorded then."""
    return _shape_inference.infers_shapes()


def current_collector() -> Collector | None:
    """Returns the innermost collector of this thread, or None."""
    return getattr(_current, "collector", None)


def is_tracing() -> bool:
    """Returns True while this thread traces or differentiates a function."""
    return get_opaque_trace_state(convention="nnx") != _untraced_state()


@functools.cache
def _untraced_state() -> Any:
    """Returns the trace state of a thread that traces nothing, taken from a new thread."""
    states: list[Any] = []
    thread = threading.Thread(
        target=lambda: states.append(get_opaque_trace_state(convention="nnx"))
    )
    thread.start()
    thread.join()
    return states[0]


@dataclasses.dataclass(frozen=True)
class CollectedSummaries:
    """Summaries of a traced function.

    Values of `summaries` are outputs of the function, with pytree `structure`; host callbacks write
    the `staged` ones. `are_expensive` is True if any costs time even when it is not recorded.
    """

    summaries: Sequence[Summary]
    structure: Any
    staged: Sequence[Summary] = ()
    are_expensive: bool = False

    @property
    def every(self) -> list[Summary]:
        """All summaries."""
        return [*self.summaries, *self.staged]


class Collector:
    """Collects the summaries called within a `with` block, one item per call.

    `records`, which may be traced, is true if anything is recorded; None inherits it from the
    enclosing collector.
    """

    def __init__(self, records: object = None) -> None:
        self._outer: Collector | None = None
        self._records = records
        self._trace: Any = None
        self.settings = current_settings()
        self.summaries: list[Summary] = []
        self._staged: list[Summary] = []
        self._are_expensive = False
        self.values: list[Mapping[str, Any]] = []

    def __enter__(self) -> Collector:
        self._outer = current_collector()
        if self._records is None:
            self._records = True if self._outer is None else self._outer.records
            self.settings = current_settings() if self._outer is None else self._outer.settings
        self._trace = get_opaque_trace_state(convention="nnx")
        _current.collector = self
        return self

    def __exit__(self, *args: object) -> None:
        _current.collector = self._outer

    @property
    def records(self) -> Any:
        """True if anything is recorded; may be a traced value."""
        return self._records

    @property
    def is_at_its_own_level(self) -> bool:
        """True unless called inside a nested trace, such as a `lax.cond` in the function."""
        return self._trace == get_opaque_trace_state(convention="nnx")

    def note_staged(self, summary: Summary) -> None:
        """Adds a summary that a host callback writes."""
        if self._outer is not None:
            self._outer.note_staged(summary)
        self._staged.append(summary)

    def results(self) -> tuple[list[Any], CollectedSummaries | None]:
        """Returns the flat values and the summaries, or ([], None) if there are none."""
        if not self.summaries and not self._staged:
            return [], None
        values, structure = jax.tree.flatten(self.values)
        return values, CollectedSummaries(
            self.summaries, structure, self._staged, self._are_expensive
        )

    def clear(self) -> None:
        """Forgets everything; the function is called again."""
        self.summaries, self.values = [], []

    def extend(self, summaries: Sequence[Summary], values: Sequence[Mapping[str, Any]]) -> None:
        """Adds summaries and values from another collector."""
        self.summaries.extend(summaries)
        self.values.extend(values)

    def add(self, call: SummaryCall) -> Any:
        """Adds a summary, and returns whether it is recorded; may be a traced boolean."""
        resolved = resolve(call, self.settings)
        if resolved is None:
            return False
        summary, values = resolved
        flag = self._records
        if summary.has_condition:
            flag = values["is_recorded"] if flag is True else flag & values["is_recorded"]
        if call.data is not None:
            data = jax.lax.stop_gradient(jnp.asarray(call.data))
            values["data"] = data if call.reduce is None else _reduce_if(flag, call.reduce, data)
        if call.reduce is not None:
            self._note_expensive()
        self.extend([summary], [values])
        return flag

    def _note_expensive(self) -> None:
        if self._outer is not None:
            self._outer._note_expensive()
        self._are_expensive = True


def resolve(call: SummaryCall, outer: Settings) -> tuple[Summary, dict[str, Any]] | None:
    """Returns a summary with its traced step and condition, or None if it can never be recorded.

    `outer` are the settings outside the step, read again at each call of the step.
    """
    settings = current_settings()
    values: dict[str, Any] = {}
    step = call.step
    if step is None:
        is_own = settings.step is not outer.step
        step = settings.step.value
        if not (is_own or hasattr(step, "value")):
            step = None
    step = getattr(step, "value", step)
    if isinstance(step, Tracer):
        values["step"], step = step, None
    condition = settings.condition.value
    condition = condition() if callable(condition) else condition
    if isinstance(condition, Tracer):
        values["is_recorded"] = condition
    elif settings.condition is not outer.condition and not condition:
        return None
    elif settings.condition is not outer.condition:
        values["is_recorded"] = jnp.ones((), bool)
    summary = Summary(
        call.tag,
        call.encode,
        writer=settings.writer.value if settings.writer is not outer.writer else None,
        step=None if step is None else int(step),
        has_traced_step="step" in values,
        has_condition="is_recorded" in values,
    )
    return summary, values


def _reduce_if(flag: object, reduce: Callable[[Any], Any], data: object) -> Any:
    """Returns `reduce(data)` if recorded, else zeros of the same shape."""
    if not isinstance(flag, Tracer):
        return reduce(data)
    shape = jax.eval_shape(reduce, data)
    return jax.lax.cond(flag, reduce, lambda _: jnp.zeros(shape.shape, shape.dtype), data)
