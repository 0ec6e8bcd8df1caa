"""Datasets that a strategy has input workers read."""

from __future__ import annotations

import itertools
import threading
import uuid
import weakref
from typing import TYPE_CHECKING

from stratagem import environment
from stratagem import input as inputs
from stratagem.devices.shards import replicas_span_processes
from stratagem.execution.programs.elastic_lockstep import ElasticLockstep
from stratagem.group.current import current_group
from stratagem.input.sources.source import Source
from stratagem.messages import explain
from stratagem.options import AutoShardPolicy, InputOptions

if TYPE_CHECKING:
    from stratagem.strategies.base.strategy import Strategy


# Processes of a strategy distribute their datasets in the same order.
_numbers = itertools.count()


def on_input_workers(strategy: Strategy, source: Source, options: InputOptions) -> Source:
    """Returns a source whose batches come from the input service.

    That is the one of `STRATAGEM_INPUT_SERVICE`, or else one that is started here, and closed with
    the source. Raises ValueError if the workers do not suit the strategy.
    """
    target = environment.read("input_service")
    _check(strategy, options, has_service=bool(target))
    job = _shared_job() if strategy.topology.spans_processes else None
    running = None if target else inputs.service.start(options.input_workers)
    distribute = inputs.service.distribute(
        inputs.service.ShardingPolicy.DYNAMIC,
        target if running is None else running.target,
        job,
        exactly_once=source.is_repeatable,
    )
    try:
        distributed = distribute(source).as_source()
    except BaseException:
        if running is not None:
            running.close()
        raise
    if running is not None:
        weakref.finalize(distributed, _close, running).atexit = False  # Workers end by themselves.
    return distributed


def _shared_job() -> str:
    """Returns a new name, the same in all processes: a service may outlive this run."""
    group = current_group()
    assert group is not None
    return group.exchange(f"the input job {next(_numbers)}", uuid.uuid4().hex)[0]


def _close(running: inputs.service.InputService) -> None:
    # Not here: a garbage collection may run in any thread, also in one that has to end.
    threading.Thread(target=running.close, name="input service close", daemon=True).start()


def _check(strategy: Strategy, options: InputOptions, *, has_service: bool) -> None:
    if isinstance(strategy.executor, ElasticLockstep):
        raise ValueError(
            explain(
                f"input_workers={options.input_workers} was passed to an ElasticStrategy.",
                expected="a dataset that each member reads in the same order.",
                fix="omit input_workers.",
            )
        )
    if replicas_span_processes(strategy.topology):
        raise ValueError(
            explain(
                f"input_workers={options.input_workers} was passed to a strategy whose replicas "
                "span processes.",
                expected="the same batches on all processes of a replica; each process gets other "
                "batches from the workers.",
                fix="omit input_workers.",
            )
        )
    if options.auto_shard_policy not in (AutoShardPolicy.AUTO, AutoShardPolicy.OFF):
        raise ValueError(
            explain(
                f"input_workers={options.input_workers} was passed with "
                f"{options.auto_shard_policy!r}.",
                expected="AutoShardPolicy.AUTO: each process gets other batches from the workers.",
                fix="omit auto_shard_policy.",
            )
        )
    if strategy.topology.spans_processes and not has_service:
        raise ValueError(
            explain(
                f"input_workers={options.input_workers} was passed to a strategy of several "
                "processes, which have no common input service.",
                expected="one service for all processes.",
                fix="start them with stratagem launch --input-workers, or set "
                "STRATAGEM_INPUT_SERVICE to the address of a service.",
            )
        )
