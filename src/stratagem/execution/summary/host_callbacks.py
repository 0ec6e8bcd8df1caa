"""Host callbacks for summaries in nested traces, such as the body of a `lax.scan`.

A callback uses the writer, step and condition of its time, so changing them waits for running
programs. A program with callbacks takes longer to start, whether it records or not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from stratagem.execution.context.replica import get_replica_context
from stratagem.execution.summary.collector import current_collector, is_tracing, resolve
from stratagem.execution.summary.recording import begin_recording, write_values
from stratagem.execution.summary.settings import current_settings, latest_settings, note_callbacks
from stratagem.execution.summary.summary import Summary, SummaryCall


def stage(call: SummaryCall) -> Any:
    """Adds a callback for a summary to the traced program; returns whether it is recorded."""
    collector = current_collector()
    outer = current_settings() if collector is None else collector.settings
    resolved = resolve(call, outer)
    if resolved is None:
        return False
    summary, values = resolved
    flags = [values["is_recorded"]] if summary.has_condition else []
    if collector is not None and not isinstance(collector.records, bool):
        flags.append(collector.records)
    context = get_replica_context()
    if context is not None and context.num_replicas_in_sync > 1:
        flags.append(jnp.asarray(context.replica_id_in_sync_group == 0))
    if call.data is not None:
        values["data"] = jax.lax.stop_gradient(jnp.asarray(call.data))
    flag = functools.reduce(jnp.logical_and, flags) if flags else True
    return _call_back(summary, values, flag, call.reduce)


def forward_summaries(summaries: Sequence[Summary], values: Sequence[Mapping[str, Any]]) -> None:
    """Passes a function's summaries and their values to the enclosing collector, or writes them."""
    collector = current_collector()
    if collector is not None and collector.is_at_its_own_level:
        collector.extend(summaries, values)
    elif is_tracing() or any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(values)):
        flag = True if collector is None else collector.records
        for summary, one in zip(summaries, values, strict=True):
            _call_back(summary, one, flag)
    elif summaries and (recording := begin_recording(summaries)) is not None:
        recording.keep(summaries, values, None)


def _call_back(
    summary: Summary,
    values: Mapping[str, Any],
    flag: object = True,
    reduce: Callable[[Any], Any] | None = None,
) -> Any:
    """Adds a callback that writes a summary if `flag` is true, and returns `flag`."""
    note_callbacks()
    collector = current_collector()
    if collector is not None:
        collector.note_staged(summary)

    def write(values: dict[str, Any]) -> None:
        if reduce is not None:
            values = {**values, "data": reduce(values["data"])}
        jax.debug.callback(functools.partial(_write_from_host, summary), values)

    if flag is True:
        write({**values})
    else:
        jax.lax.cond(flag, write, lambda _: None, {**values})
    return flag


def _write_from_host(summary: Summary, values: dict[str, Any]) -> None:
    recording = begin_recording([summary], latest_settings())
    if recording is not None:
        write_values(summary, {name: np.asarray(one) for name, one in values.items()}, recording)
