"""`sg.plan`: a model or a step, and a machine; and what both make of one another."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import numpy as np

from stratagem.context import ReplicaBatch, get_strategy, has_strategy
from stratagem.execution.programs.step_capture import CapturedStep, capture
from stratagem.execution.tracing.arguments import Arguments, Leaf
from stratagem.input.batches import place, take_batch
from stratagem.keras.planned_models import as_planned, is_model, training_step
from stratagem.messages import explain
from stratagem.planning.compilers import CompiledStep, compile_step
from stratagem.planning.memory import MemoryPlan, plan_memory, shared_state_bytes
from stratagem.planning.planned_strategy import planned_strategy
from stratagem.planning.reductions import Reduction, Schedule
from stratagem.planning.result import Plan
from stratagem.planning.step_time import Assumptions, compute_s, predict_scaling
from stratagem.planning.targets import Target, parse_target
from stratagem.planning.work import product_flops
from stratagem.strategies.strategy import Strategy
from stratagem.topology import Topology
from stratagem.topology.absent import placeholder, planning_for
from stratagem.variables import ShardedState, require_layouts_used

__all__ = ["plan", "plan_step", "with_global_batch"]


def plan(
    model_or_step: Any,
    batch: Any,
    target: str,
    *,
    strategy: Strategy | None = None,
    shard_state: str | None = None,
    assumptions: Assumptions | None = None,
) -> Plan:
    """Says what a training step takes on a machine that is not here. Call outside every scope.

    Nothing runs: the step is traced for the machine's number of replicas and compiled by the
    compiler for its devices where that is installed, else by the one for CPUs.

    Args:
        model_or_step: a compiled Keras model; or a function without arguments that returns one,
            called in the scope of a strategy of the machine, whose variables take no memory; or a
            replica function, called with the parts of the batch as in `strategy.run(fn, batch)`.
        batch: one global batch: a pytree of arrays, or of `jax.ShapeDtypeStruct`; for a model
            `(x, y)` or `(x, y, sample_weight)`, for a step a tuple of its arguments.
        target: the machine, such as "8xH100", "64xH100", "v5e:4x4" or "2xv5e:4x4".
        strategy: whose variables a step uses, and like which is planned: its cross-device ops, its
            number of devices a replica, its layouts and what state it shares out; None for the
            current strategy, or the model's.
        shard_state: what the replicas' devices have a part of each, as of `MirroredStrategy`; None
            for what the strategy says, without one for nothing.
        assumptions: what the prediction of times takes for given.

    Returns:
        The plan.

    Raises:
        TypeError: neither a model nor a function, or a batch that is no tuple.
        ValueError: an unknown target or `shard_state`; a strategy that is not planned; a model that
            is not compiled; a batch without arrays; a step that no strategy is known for.
        RuntimeError: no compiler can compile the step.

    Example:
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
        >>> model.compile("adam", "mse")
        >>> plan = sg.plan(model, (np.ones((16, 8)), np.ones((16, 2))), "2xH100")
        >>> plan.fits, plan.memory.parameters_bytes, plan.memory.optimizer_bytes
        (True, 72, 152)
    """
    machine = parse_target(target)
    if not isinstance(batch, tuple):
        raise TypeError(
            explain(
                f"batch={batch!r} is of type {type(batch).__name__}.",
                expected="a tuple: (x, y) for a model, the arguments of a step.",
                fix="write batch=(images, labels).",
            )
        )
    arrays = jax.tree.map(_array, batch)
    name = getattr(model_or_step, "name", None) or getattr(model_or_step, "__name__", "step")
    like = strategy or _own_strategy(model_or_step)
    planned = planned_strategy(machine, like, shard_state)
    with _step_of(model_or_step, arrays, machine, planned, like) as step:
        return plan_step(step, machine, title=str(name), assumptions=assumptions)


def _own_strategy(model_or_step: Any) -> Strategy | None:
    """The strategy of a model, or for a step the current one."""
    if is_model(model_or_step):
        own = model_or_step.distribute_strategy
        return None if own.topology.devices is None else own
    return get_strategy() if has_strategy() else None


def _step_of(
    model_or_step: Any, batch: Any, machine: Target, planned: Strategy, like: Strategy | None
) -> contextlib.AbstractContextManager[CapturedStep]:
    if is_model(model_or_step):
        return training_step(model_or_step, batch, planned)
    if not callable(model_or_step):
        raise TypeError(
            explain(
                f"plan received {model_or_step!r} of type {type(model_or_step).__name__}.",
                expected="a compiled Keras model, a function that makes one, or a replica "
                "function.",
                fix="pass one of these.",
            )
        )
    if _needs_arguments(model_or_step):
        return _step_of_function(model_or_step, batch, planned, like)
    with planning_for(machine.topology), planned.scope():
        model = model_or_step()
    if not is_model(model):
        raise TypeError(
            explain(
                f"The function that plan was given returned a {type(model).__name__}.",
                expected="a compiled Keras model.",
                fix="return it, or let the function have parameters if it is a step.",
            )
        )
    return training_step(model, batch, planned)


@contextlib.contextmanager
def _step_of_function(
    fn: Callable[..., Any], batch: Any, planned: Strategy, like: Strategy | None
) -> Generator[CapturedStep]:
    if like is None:
        raise ValueError(
            explain(
                "plan was given a step, and no strategy.",
                expected="the strategy whose variables the step uses.",
                fix="pass strategy=, that in whose scope they were made.",
            )
        )
    taken = take_batch(batch, planned.num_replicas_in_sync)
    args = place([taken], planned.topology).value()
    with as_planned(like.variables.live(), planned):
        step = capture(lambda: planned.run(fn, args=args), takes_all=True)
        assert step is not None
        yield step


def plan_step(
    step: CapturedStep,
    target: Target,
    *,
    title: str,
    notes: tuple[str, ...] = (),
    assumptions: Assumptions | None = None,
) -> Plan:
    """Compiles a step that was taken out of a program, and predicts.

    Args:
        step: traced for as many replicas as the target has devices, or for one.
        target: the machine.
        title: whose step it is.
        notes: what else one has to know.
        assumptions: what the prediction of times takes for given.

    Returns:
        The plan.

    Raises:
        RuntimeError: no compiler can compile the step.
    """
    topology: Topology = step.strategy.topology
    target, more_notes = _used(step, target)
    _check_rules(step)
    assumed = assumptions or Assumptions()
    compiled = compile_step(step, target)
    schedules = [Schedule(program.text) for program in compiled.of_replicas]
    reductions = _reductions(schedules, compiled.compiler) if target.num_devices > 1 else []
    flops = _flops(step)
    products_s, memory_s = compute_s(flops, compiled.accessed_bytes, target, assumed)
    computing_s = _computing_s(compiled, products_s, memory_s)
    return Plan(
        target=target,
        title=title,
        compiler=compiled.compiler,
        is_refused=compiled.is_refused,
        num_parameters=sum(math.prod(one.shape) for one in step.trace.written if one.trainable),
        global_batch=_num_examples(step),
        num_replicas=topology.num_replicas,
        shard_state=_shard_state(step),
        shared_state_bytes=shared_state_bytes(step),
        from_host_bytes=compiled.from_host_bytes,
        to_host_bytes=compiled.to_host_bytes,
        brought_bytes=compiled.brought_bytes,
        put_back_bytes=compiled.put_back_bytes,
        memory=_memory(step, compiled, target),
        reductions=tuple(reductions),
        is_scheduled=compiled.compiler != "cpu" and all(one.is_scheduled for one in schedules),
        flops=flops,
        accessed_bytes=compiled.accessed_bytes,
        products_s=products_s,
        memory_s=memory_s,
        scaling=tuple(
            predict_scaling(target, reductions, computing_s, assumed, topology.num_logical_devices)
        ),
        assumptions=assumed,
        notes=(*notes, *more_notes, *compiled.notes),
    )


def _computing_s(compiled: CompiledStep, products_s: float, memory_s: float) -> float:
    # Of a program for CPUs the bytes are those of another, which fuses less.
    return products_s if compiled.compiler == "cpu" else max(products_s, memory_s)


def _memory(step: CapturedStep, compiled: CompiledStep, target: Target) -> MemoryPlan:
    of_replicas = [program.memory for program in compiled.of_replicas]
    of_host = [program.memory for program in compiled.of_host]
    return plan_memory(step, of_replicas, of_host, target.accelerator)


def _check_rules(step: CapturedStep) -> None:
    """Raises where a rule for variables matches none, as the first step that runs would."""
    if step.strategy.placement.uses_stores:
        step.strategy.placement.check()
    require_layouts_used(step.strategy.placement.layouts, step.trace.written)


def _reductions(schedules: Sequence[Schedule], compiler: str) -> list[Reduction]:
    reductions = [one for schedule in schedules for one in schedule.reductions()]
    if compiler == "cpu":  # one thread runs it in order: that says nothing of others
        return [dataclasses.replace(one, behind=()) for one in reductions]
    return reductions


def _flops(step: CapturedStep) -> dict[str, float]:
    """Of one device: the devices of a replica share its products."""
    size = step.strategy.topology.num_logical_devices
    return {dtype: count / size for dtype, count in product_flops(step.trace.jaxpr).items()}


def _shard_state(step: CapturedStep) -> str | None:
    store = step.strategy.placement
    if not isinstance(store, ShardedState):
        return None
    return "all" if store.is_all else "optimizer"


def _used(step: CapturedStep, target: Target) -> tuple[Target, list[str]]:
    """The part of a machine that a step uses, and what one has to know of how it does."""
    notes: list[str] = []
    num_used = len(step.strategy.topology.all_devices or ())
    if num_used != target.num_devices:
        target = target.of_size(num_used)
        devices = "device" if num_used == 1 else "devices"
        notes.append(f"The strategy uses {num_used} {devices}: so does the plan.")
    store = step.strategy.placement
    if not (store is None or isinstance(store, ShardedState)) and target.num_hosts > 1:
        notes.append(
            "Variables are kept elsewhere than in copies by a process that has all devices. This "
            f"plan has one with those of {target.num_hosts} hosts, which there is not."
        )
    if step.strategy.topology.groups is not None:
        notes.append(
            "Products of a device: those of its replica, shared evenly by the replica's devices. "
            "What is not divided each of them computes whole."
        )
    return target, notes


def with_global_batch(step: CapturedStep, global_batch: int) -> CapturedStep:
    """Returns a step as it would be with another global batch.

    Args:
        step: the step.
        global_batch: examples of all replicas together, a multiple of their number.

    Returns:
        The step, traced anew.

    Raises:
        ValueError: another number, or a step without a batch.
    """
    replicas = step.strategy.num_replicas_in_sync
    old = step.arguments.batch.size
    if global_batch < 1 or global_batch % replicas:
        raise ValueError(
            explain(
                f"A global batch of {global_batch} was asked for on {replicas} replicas.",
                expected="a multiple of the number of replicas.",
                fix=f"ask for {max(replicas, global_batch - global_batch % replicas)}.",
            )
        )
    if old is None:
        raise ValueError(
            explain(
                "Another global batch was asked for, and the step takes none.",
                expected="a step with batched arguments.",
                fix="leave the global batch out.",
            )
        )
    size = global_batch // replicas
    several = replicas > 1
    leaves = tuple(_resized(leaf, old, size, several=several) for leaf in step.arguments.leaves)
    split = [placeholder(leaf.shape, leaf.dtype) for leaf in leaves if leaf.split and leaf.shape]
    arguments = Arguments(
        step.arguments.structure, leaves, split, step.arguments.shared, ReplicaBatch(size=size)
    )
    return dataclasses.replace(
        step, arguments=arguments, trace=step.retrace(arguments, step.strategy.topology)
    )


def _resized(leaf: Leaf, old: int, new: int, *, several: bool) -> Leaf:
    axis = 1 if several else 0
    if not leaf.split or leaf.shape is None or leaf.shape[axis : axis + 1] != (old,):
        return leaf
    shape = (*leaf.shape[:axis], new, *leaf.shape[axis + 1 :])
    return leaf._replace(shape=shape, lengths=None)


def _num_examples(step: CapturedStep) -> int:
    batch = step.arguments.batch
    if batch.lengths is not None:
        return sum(batch.lengths)
    return (batch.size or 0) * step.strategy.num_replicas_in_sync


def _needs_arguments(function: Callable[..., Any]) -> bool:
    return any(
        parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        for parameter in inspect.signature(function).parameters.values()
    )


def _array(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return placeholder(leaf.shape, leaf.dtype)
    return np.asarray(leaf)
