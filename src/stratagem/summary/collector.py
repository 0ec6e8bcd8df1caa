"""Summaries that a function calls while it is traced, or run op by op, as further results of it.

What runs the function, a step's program for one, hands their values to the writer when it has run.
So they need no callback from the device, each is written once however often its function is traced,
and all processes have one program.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state

from stratagem.summary.settings import current_settings
from stratagem.summary.summary import Summary, SummaryCall

__all__ = [
    "Collected",
    "Collector",
    "current_collector",
    "infers_shapes",
    "is_tracing",
    "resolve",
    "set_shape_inference",
]


_current = threading.local()


@dataclasses.dataclass
class _Slot:
    infers_shapes: Callable[[], bool] = lambda: False


_slot = _Slot()


def set_shape_inference(infers_shapes: Callable[[], bool]) -> None:
    """Says how to tell whether code is only run to find out shapes.

    Args:
        infers_shapes: returns whether it is, in this thread.
    """
    _slot.infers_shapes = infers_shapes


def infers_shapes() -> bool:
    """Tells whether the code that asks is only run to find out shapes: nothing is recorded then."""
    return _slot.infers_shapes()


def current_collector() -> Collector | None:
    """Returns the innermost collector of this thread; None outside of every step."""
    return getattr(_current, "collector", None)


def is_tracing() -> bool:
    """Tells whether a function is being traced or differentiated in this thread."""
    return get_opaque_trace_state(convention="nnx") != _untraced()


@functools.cache
def _untraced() -> Any:
    """The state of a thread that traces nothing, such as a new one."""
    states: list[Any] = []
    thread = threading.Thread(
        target=lambda: states.append(get_opaque_trace_state(convention="nnx"))
    )
    thread.start()
    thread.join()
    return states[0]


@dataclasses.dataclass(frozen=True)
class Collected:
    """The summaries of a function that was traced.

    Args:
        summaries: whose values are results of it.
        structure: pytree structure of these values.
        staged: those that are written by callbacks.
        are_dear: whether any takes more than to hand a value over, were it not recorded either.
    """

    summaries: Sequence[Summary]
    structure: Any
    staged: Sequence[Summary] = ()
    are_dear: bool = False

    @property
    def every(self) -> list[Summary]:
        """All of them."""
        return [*self.summaries, *self.staged]


class Collector:
    """Keeps the summaries that are called in a `with` block.

    Args:
        records: whether anything is recorded; traced where that is known when the step is called.
            None for that of the collector around this one.

    `summaries` and `values` have an item a call.
    """

    def __init__(self, records: Any = None) -> None:
        self._outer: Collector | None = None
        self._records = records
        self._trace: Any = None
        self.settings = current_settings()
        self.summaries: list[Summary] = []
        self._staged: list[Summary] = []
        self._are_dear = False
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
        """Whether anything is recorded."""
        return self._records

    @property
    def is_at_its_own_level(self) -> bool:
        """Whether this is not inside a `lax.cond` or the like, within the function."""
        return self._trace == get_opaque_trace_state(convention="nnx")

    def note_staged(self, summary: Summary) -> None:
        """Notes a summary that a callback writes.

        Args:
            summary: the summary.
        """
        if self._outer is not None:
            self._outer.note_staged(summary)
        self._staged.append(summary)

    def results(self) -> tuple[list[Any], Collected | None]:
        """Returns the values of the summaries, flat, and what they are; None for none."""
        if not self.summaries and not self._staged:
            return [], None
        values, structure = jax.tree.flatten(self.values)
        return values, Collected(self.summaries, structure, self._staged, self._are_dear)

    def clear(self) -> None:
        """Forgets what it kept: the function is called once more."""
        self.summaries, self.values = [], []

    def extend(self, summaries: Sequence[Summary], values: Sequence[Mapping[str, Any]]) -> None:
        """Takes over what another collector kept.

        Args:
            summaries: of it.
            values: of each.
        """
        self.summaries.extend(summaries)
        self.values.extend(values)

    def add(self, call: SummaryCall) -> Any:
        """Keeps a summary.

        Args:
            call: what was called.

        Returns:
            Whether it is recorded, as far as the step knows; a traced boolean where it is one.
        """
        resolved = resolve(call, self.settings)
        if resolved is None:
            return False
        summary, values = resolved
        flag = self._records
        if summary.has_condition:
            flag = values["is_recorded"] if flag is True else flag & values["is_recorded"]
        if call.data is not None:
            data = jax.lax.stop_gradient(jnp.asarray(call.data))
            values["data"] = data if call.reduce is None else _where(flag, call.reduce, data)
        if call.reduce is not None:
            self._note_dear()
        self.extend([summary], [values])
        return flag

    def _note_dear(self) -> None:
        if self._outer is not None:
            self._outer._note_dear()
        self._are_dear = True


def resolve(call: SummaryCall, outer: Any) -> tuple[Summary, dict[str, Any]] | None:
    """Finds out what is known of a summary where it is called.

    Args:
        call: what was called.
        outer: the settings outside of the step: they are asked again when it is called.

    Returns:
        The summary, and its traced step and condition where it has them; None for one that is not
        recorded whatever the call.
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


def _where(flag: Any, reduce: Callable[[Any], Any], data: Any) -> Any:
    """Computes something if it is recorded, else zeros of its shape."""
    if not isinstance(flag, Tracer):
        return reduce(data)
    shape = jax.eval_shape(reduce, data)
    return jax.lax.cond(flag, reduce, lambda _: jnp.zeros(shape.shape, shape.dtype), data)
