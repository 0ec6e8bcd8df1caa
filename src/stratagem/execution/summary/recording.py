"""Deferred writing of summaries: a step's summaries are written when their values are ready.

Nothing waits for a step, unless too many are in flight or a writer is flushed.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stratagem.execution.summary.settings import (
    Settings,
    current_settings,
    host_condition,
    host_step,
)
from stratagem.execution.summary.summary import Summary
from stratagem.messages import explain
from stratagem.variables.distributed import PerReplica

if TYPE_CHECKING:
    from stratagem.execution.summary.writer import SummaryWriter


# Maximum number of steps in flight with unwritten summaries.
_MAX_PENDING = 32

Values = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Recording:
    """Host settings at the time of a step's call.

    `step` is None if no summary needs it. Summaries with a condition ignore `holds`. `wall_time_s`
    is in seconds since the epoch.
    """

    writer: SummaryWriter | None
    step: int | None
    holds: bool
    wall_time_s: float

    def keep(
        self, summaries: Sequence[Summary], values: Sequence[Values], num_steps: int | None
    ) -> None:
        """Enqueues the summaries of one call.

        Values are arrays, or `PerReplica` of which replica 0 counts. Their first axis has size
        `num_steps`, or there is no such axis if it is None.
        """
        if any(one.writer_of(self.writer) is not None for one in summaries):
            with _lock:
                _pending.append((self, summaries, values, num_steps))
        write_pending(waits=False)


_lock = threading.RLock()
_pending: collections.deque[tuple[Recording, Sequence[Summary], Sequence[Values], int | None]] = (
    collections.deque()
)


def begin_recording(
    summaries: Sequence[Summary], settings: Settings | None = None
) -> Recording | None:
    """Returns the settings of a step about to be called; None if it records no summary.

    `settings` default to this thread's. Raises ValueError if a summary that would be written has no
    step.
    """
    settings = settings or current_settings()
    writer = settings.writer.value
    written = [one for one in summaries if one.writer_of(writer, is_anywhere=True) is not None]
    holds = any(not one.has_condition for one in written) and host_condition(settings)
    written = [one for one in written if one.has_condition or holds]
    if not written:
        return None
    step = None
    if stepless := [one for one in written if one.needs_step]:
        step = host_step(settings)
        if step is None:
            raise missing_step_error(stepless[0].tag)
    return Recording(writer, step, holds, time.time())


def missing_step_error(tag: str) -> ValueError:
    """Returns the error for a summary without a step."""
    return ValueError(
        explain(
            f"Summary {tag!r} has no step.",
            expected="a step in the call, or a default one.",
            fix="pass step=..., or call sg.summary.experimental.set_step(...) or "
            "writer.as_default(step=...), with a variable such as optimizer.iterations in loops.",
        )
    )


def write_pending(*, waits: bool) -> None:
    """Writes summaries whose values are ready, in call order; with `waits`, all of them."""
    with _lock:
        while _pending and (waits or len(_pending) > _MAX_PENDING or _is_ready(_pending[0][2])):
            recording, summaries, values, num_steps = _pending.popleft()
            local = [
                {name: _replica_0_value(array) for name, array in one.items()} for one in values
            ]
            for index in range(num_steps or 1):
                for summary, arrays in zip(summaries, local, strict=True):
                    if num_steps is not None:
                        arrays = {name: array[index] for name, array in arrays.items()}
                    write_values(summary, arrays, recording)


def _is_ready(values: Sequence[Values]) -> bool:
    arrays = [array for one in values for array in one.values()]
    stacked = [one.stacked if isinstance(one, PerReplica) else one for one in arrays]
    return all(one.is_ready() for one in stacked if hasattr(one, "is_ready"))


def _replica_0_value(array: Any) -> np.ndarray[Any, Any]:
    array = array.components[0] if isinstance(array, PerReplica) else array
    if hasattr(array, "addressable_data"):
        array = array.addressable_data(0)
    return np.asarray(array)


def write_values(summary: Summary, arrays: Values, recording: Recording) -> bool:
    """Writes one summary with its host values if it is recorded, and returns whether it was."""
    writer = summary.writer_of(recording.writer)
    is_recorded = arrays["is_recorded"] if summary.has_condition else recording.holds
    if writer is None or not is_recorded:
        return False
    step = arrays.get("step", recording.step if summary.step is None else summary.step)
    if step is None:
        raise missing_step_error(summary.tag)
    writer.add(summary.encode(arrays.get("data")), int(step), recording.wall_time_s)
    return True
