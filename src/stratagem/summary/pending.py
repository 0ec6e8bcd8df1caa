"""Summaries of steps that were called: written when their values are there.

A step is never waited for, unless too many are under way or somebody flushes.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stratagem.messages import explain
from stratagem.summary.settings import (
    Settings,
    current_settings,
    host_condition,
    host_step,
)
from stratagem.summary.summary import Summary
from stratagem.values import PerReplica

__all__ = ["Recording", "begin_recording", "write_pending", "write_values"]

# How many steps may be under way with summaries that were not written.
_MAX_PENDING = 32

Values = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Recording:
    """What was set on the host when a step was called.

    Args:
        writer: the default writer; None for none.
        step: the default one; None where no summary needs it.
        holds: whether the condition did; of no account for summaries with one of their own.
        wall_time_s: when, in seconds since 1970.
    """

    writer: Any
    step: int | None
    holds: bool
    wall_time_s: float

    def keep(
        self, summaries: Sequence[Summary], values: Sequence[Values], num_steps: int | None
    ) -> None:
        """Has the summaries of one call written.

        Args:
            summaries: in the order of their calls.
            values: of each; arrays, or `PerReplica` of which replica 0 counts.
            num_steps: how many steps the call had, on the first axis; None for one without axis.
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
    """Decides on the host whether a step that is about to be called records anything.

    Args:
        summaries: that the step has.
        settings: what is set; None for what is in this thread.

    Returns:
        What is set; None if nothing is recorded.

    Raises:
        ValueError: no step is known of a summary that would be written.
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
            raise no_step(stepless[0].tag)
    return Recording(writer, step, holds, time.time())


def no_step(tag: str) -> ValueError:
    """Returns the error for a summary without a step.

    Args:
        tag: its name.
    """
    return ValueError(
        explain(
            f"Summary {tag!r} has no step.",
            expected="a step in the call, or a default one.",
            fix="pass step=..., or call sg.summary.experimental.set_step(...) or "
            "writer.as_default(step=...), with a variable such as optimizer.iterations in loops.",
        )
    )


def write_pending(*, waits: bool) -> None:
    """Writes the summaries whose values are there, in the order of the calls.

    Args:
        waits: whether to wait for all.
    """
    with _lock:
        while _pending and (waits or len(_pending) > _MAX_PENDING or _is_ready(_pending[0][2])):
            recording, summaries, values, num_steps = _pending.popleft()
            local = [{name: _of_first(array) for name, array in one.items()} for one in values]
            for place in range(num_steps or 1):
                for summary, arrays in zip(summaries, local, strict=True):
                    if num_steps is not None:
                        arrays = {name: array[place] for name, array in arrays.items()}
                    write_values(summary, arrays, recording)


def _is_ready(values: Sequence[Values]) -> bool:
    arrays = [array for one in values for array in one.values()]
    stacked = [one.stacked if isinstance(one, PerReplica) else one for one in arrays]
    return all(one.is_ready() for one in stacked if hasattr(one, "is_ready"))


def _of_first(array: Any) -> np.ndarray[Any, Any]:
    array = array.components[0] if isinstance(array, PerReplica) else array
    if hasattr(array, "addressable_data"):
        array = array.addressable_data(0)
    return np.asarray(array)


def write_values(summary: Summary, arrays: Values, recording: Recording) -> bool:
    """Writes one summary, if it is recorded.

    Args:
        summary: the summary.
        arrays: its values on the host.
        recording: what was set.

    Returns:
        Whether it was written.
    """
    writer = summary.writer_of(recording.writer)
    is_recorded = arrays["is_recorded"] if summary.has_condition else recording.holds
    if writer is None or not is_recorded:
        return False
    step = arrays.get("step", recording.step if summary.step is None else summary.step)
    if step is None:
        raise no_step(summary.tag)
    writer.add(summary.encode(arrays.get("data")), int(step), recording.wall_time_s)
    return True
