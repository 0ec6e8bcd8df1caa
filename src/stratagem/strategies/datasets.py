"""Creation of a strategy's distributed datasets, with checks of arguments."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stratagem import input as inputs
from stratagem import settings
from stratagem.devices.shards import replicas_span_processes
from stratagem.errors import check_number, check_type, explain, invalid
from stratagem.execution.programs.elastic import ElasticLockstep
from stratagem.input.distributed import DistributedDataset, ElasticDataset
from stratagem.input.iterator import DistributedIterator
from stratagem.input.sources.adapters import as_source
from stratagem.input.sources.source import Source
from stratagem.options import AutoShardPolicy, InputContext, InputOptions, InputReplicationMode

if TYPE_CHECKING:
    from stratagem.strategies.strategy import Strategy

# Datasets that a strategy has input workers read.


def on_input_workers(strategy: Strategy, source: Source, options: InputOptions) -> Source:
    """Returns a source whose batches come from the input service.

    That is the one of `STRATAGEM_INPUT_SERVICE`, or else one that is started here, and closed with
    the source. Raises ValueError if the workers do not suit the strategy.
    """
    target = settings.read("input_service")
    _check(strategy, options, has_service=bool(target))
    running = None if target else inputs.service.start(options.input_workers)
    # Each process reads a share that follows from its place among them.
    context = _context(strategy) if strategy.topology.spans_processes else None
    distribute = inputs.service.distribute(
        inputs.service.ShardingPolicy.DYNAMIC,
        target if running is None else running.target,
        consumer_index=context and context.input_pipeline_id,
        num_consumers=context and context.num_input_pipelines,
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


def _close(running: inputs.service.InputService) -> None:
    # Not here: a garbage collection may run in any thread, also in one that has to end.
    threading.Thread(target=running.close, name="input service close", daemon=True).start()


def _check(strategy: Strategy, options: InputOptions, *, has_service: bool) -> None:
    if isinstance(strategy.executor, ElasticLockstep):
        raise invalid(
            f"input_workers={options.input_workers} was passed to an ElasticStrategy.",
            expected="a dataset that each member reads in the same order.",
            fix="omit input_workers.",
        )
    if replicas_span_processes(strategy.topology):
        raise invalid(
            f"input_workers={options.input_workers} was passed to a strategy whose replicas "
            "span processes.",
            expected="the same batches on all processes of a replica; each process gets other "
            "batches from the workers.",
            fix="omit input_workers.",
        )
    if options.auto_shard_policy not in (AutoShardPolicy.AUTO, AutoShardPolicy.OFF):
        raise invalid(
            f"input_workers={options.input_workers} was passed with {options.auto_shard_policy!r}.",
            expected="AutoShardPolicy.AUTO: each process gets other batches from the workers.",
            fix="omit auto_shard_policy.",
        )
    if strategy.topology.spans_processes and not has_service:
        raise invalid(
            f"input_workers={options.input_workers} was passed to a strategy of several "
            "processes, which have no common input service.",
            expected="one service for all processes.",
            fix="start them with stratagem launch --input-workers, or set "
            "STRATAGEM_INPUT_SERVICE to the address of a service.",
        )


def from_dataset(strategy: Strategy, dataset: object, options: object) -> DistributedDataset:
    """Returns a dataset of global batches that a strategy splits.

    Raises:
        NotImplementedError: PER_REPLICA, which leaves nothing to split.
        TypeError: no dataset, or options of another type.
        ValueError: input workers that do not suit the strategy.
    """
    options = _check_options(options)
    if options.replication_mode is InputReplicationMode.PER_REPLICA:
        raise NotImplementedError(
            explain(
                "distribute_dataset received InputReplicationMode.PER_REPLICA.",
                expected="PER_WORKER: the strategy splits the batches of one dataset.",
                fix="call distribute_datasets_from_function, which makes a dataset a replica.",
            )
        )
    if isinstance(dataset, DistributedDataset):
        raise TypeError(
            explain(
                "distribute_dataset received a dataset that is distributed.",
                expected="a dataset of batches.",
                fix="iterate it as it is.",
            )
        )
    source = as_source(dataset)
    if options.input_workers:
        source = on_input_workers(strategy, source, options)
    if isinstance(strategy.executor, ElasticLockstep):
        whole = InputContext(num_replicas_in_sync=strategy.num_replicas_in_sync)
        return ElasticDataset(strategy, source, is_global=True, options=options, context=whole)
    context = _context(strategy)
    return DistributedDataset(strategy, source, is_global=True, options=options, context=context)


def _context(strategy: Strategy) -> InputContext:
    """Returns the input context of this process."""
    topology = strategy.topology
    count = topology.num_replicas // topology.num_local_replicas
    index = topology.local_replica_ids[0] // topology.num_local_replicas
    return InputContext(count, index, topology.num_replicas)


def from_function(
    strategy: Strategy, dataset_fn: Callable[[InputContext], Any], options: object
) -> DistributedDataset:
    """Returns a distributed dataset of per-replica batches from a function.

    `dataset_fn` is called once per process, or with PER_REPLICA once per replica.

    Raises:
        TypeError: `dataset_fn` cannot be called or returns no dataset, or options of another type.
    """
    options = _check_options(options)
    wanted = "a function of an sg.InputContext that returns a dataset"
    fix = "pass the function; a dataset itself goes to distribute_dataset."
    owner = "distribute_datasets_from_function"
    check_type("dataset_fn", dataset_fn, callable, wanted, fix, owner=owner)
    if isinstance(strategy.executor, ElasticLockstep):
        raise NotImplementedError(
            explain(
                "distribute_datasets_from_function was called on an ElasticStrategy.",
                expected="one dataset that all members read: what a lost member alone has read "
                "would be lost with it.",
                fix="call distribute_dataset.",
            )
        )
    if options.replication_mode is InputReplicationMode.PER_WORKER:
        made = dataset_fn(_context(strategy))
        return DistributedDataset(strategy, _made_source(made), is_global=False, options=options)
    count = strategy.num_replicas_in_sync
    ids = strategy.topology.local_replica_ids
    sources = [_made_source(dataset_fn(InputContext(count, index, count))) for index in ids]
    return DistributedDataset(strategy, sources, is_global=False, options=options)


def _made_source(made: object) -> Any:
    if made is None:
        raise TypeError(
            explain(
                "dataset_fn returned None.",
                expected="a dataset, batched by the per-replica size.",
                fix="return the dataset.",
            )
        )
    return as_source(made)


def _check_options(options: Any) -> InputOptions:
    check_type("options", options, InputOptions | None, "sg.InputOptions or None")
    return options or InputOptions()


def checked_steps(strategy: Strategy, fn: object, iterator: Any, num_steps: Any) -> int:
    """Checks the arguments of `run_steps`, and returns the number of steps.

    Raises:
        TypeError: an argument of another type.
        ValueError: fewer than 1 step, or another strategy's dataset.
    """
    if num_steps is None:
        num_steps = strategy.executor.steps_per_call
    check_type("fn", fn, callable, "a function of one batch", owner="run_steps")
    wanted = "an iterator of a distributed dataset"
    fix = "pass iter(strategy.distribute_dataset(dataset))."
    check_type("iterator", iterator, DistributedIterator, wanted, fix, owner="run_steps")
    check_type("num_steps", num_steps, int, "an int", owner="run_steps")
    check_number("run_steps", num_steps=num_steps)
    if iterator.strategy is not strategy:
        raise invalid(
            f"run_steps of {strategy} received an iterator of {iterator.strategy}.",
            expected="a dataset that this strategy distributed.",
            fix="call distribute_dataset of the strategy that runs the steps.",
        )
    return num_steps
