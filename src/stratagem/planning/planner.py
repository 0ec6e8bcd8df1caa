"""Entry points of the planner: `sg.plan` for models and steps, `plan_step` for captured steps."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Callable, Generator
from typing import Any

import jax
import numpy as np

from stratagem.contexts import get_strategy, has_strategy
from stratagem.devices.finding import placeholder, planning_for
from stratagem.errors import explain, invalid
from stratagem.execution.tracing.functionalize import CapturedStep, capture
from stratagem.input.batches import take_batch
from stratagem.input.placement import place
from stratagem.keras.training.planned_models import as_planned, is_model, training_step
from stratagem.planning.compilers import compile_step
from stratagem.planning.memory import plan_memory, shared_state_bytes
from stratagem.planning.result import Plan
from stratagem.planning.schedule import Schedule
from stratagem.planning.step_time import Assumptions, compute_s, operations_s, predict_scaling
from stratagem.planning.targets import Target, parse_target
from stratagem.planning.traced_costs import product_flops
from stratagem.strategies.local_update import LocalUpdateStrategy
from stratagem.strategies.membership import local_topology
from stratagem.strategies.mirrored import (
    CentralStorageStrategy,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
)
from stratagem.strategies.placement import (
    PINNED_HOST,
    OffloadedState,
    PlacementRules,
    state_placement,
)
from stratagem.strategies.strategy import Strategy
from stratagem.strategies.tpu import TPUStrategy
from stratagem.variables.layouts import require_layouts_used
from stratagem.variables.placement import ShardedState, UniformPlacement

# The part of a machine that a step uses.


def used_machine(step: CapturedStep, target: Target) -> tuple[Target, list[str]]:
    """Returns the part of the machine that the step uses, with notes about it."""
    notes: list[str] = []
    num_used = len(step.strategy.topology.all_devices or ())
    if num_used != target.num_devices:
        target = target.of_size(num_used)
        devices = "device" if num_used == 1 else "devices"
        notes.append(f"The plan is for {num_used} {devices}, as the strategy uses.")
    method = step.strategy.local_updates
    if method is not None and num_used > 1:
        notes.append(
            f"Replicas synchronize every {method.least_period} steps. "
            "Communication is a step's mean."
        )
    placement = step.strategy.placement
    rules = placement.placement.values() if isinstance(placement, PlacementRules) else ()
    is_central = "central" in rules or isinstance(placement, UniformPlacement)
    if is_central and target.num_hosts > 1:
        notes.append(
            "Central storage needs a process that has all devices, but each of the "
            f'{target.num_hosts} hosts has one of its own. Place variables "sharded" or '
            '"pinned_host" there.'
        )
    if step.strategy.topology.groups is not None:
        notes.append(
            "FLOPs per device assume that the devices of a replica split its products evenly. "
            "Products that are not sharded run on every device in full."
        )
    return target, notes


# Strategies on abstract devices, modeled on an existing strategy.


def planned_strategy(
    machine: Target, like: Strategy | None, shard_state: str | None = None
) -> Strategy:
    """Returns a strategy like `like`, with its replicas on the abstract devices of a machine.

    Takes over cross-device ops, local updates, devices per replica, layouts, the sequence axis and,
    without `shard_state`, sharded state. None for `like` replicates everything. Raises ValueError
    for a strategy that the machine or the planner does not support.
    """
    if like is None:
        with planning_for(machine.topology, shard_state):
            return MirroredStrategy()
    rules = like.placement if isinstance(like.placement, PlacementRules) else None
    if shard_state is None and isinstance(like.placement, ShardedState):
        shard_state = like.placement.shard_state
    size = like.topology.num_logical_devices
    layouts: Any = like.placement.layouts
    with planning_for(machine.topology):
        if like.local_updates is not None:
            return LocalUpdateStrategy(like.local_updates, ["cpu:0", "cpu:1"])  # all planned ones
        if rules is not None and shard_state is None:
            in_lockstep = (MirroredStrategy, MultiWorkerMirroredStrategy, TPUStrategy)
            if isinstance(like, in_lockstep):
                topology = local_topology(None, name="devices")
                placement = state_placement(topology, placement=rules.placement)
                return Strategy(topology, like.cross_device_ops, placement=placement)
            # HybridStrategy, of a package above this one.
            kind: Any = type(like)
            return kind(None, like.cross_device_ops, placement=rules.placement)
        if isinstance(like.placement, OffloadedState) and shard_state is None:
            return CentralStorageStrategy(parameter_device=PINNED_HOST)
        if isinstance(like.placement, UniformPlacement) and shard_state is None:
            return CentralStorageStrategy()
        return MirroredStrategy(
            None,
            like.cross_device_ops,
            shard_state=shard_state,
            layout_map=layouts,
            shard_size=like.topology.shard_size,
            devices_per_replica=size,
            sequence_axis=like.sequence_axis,
        )


def plan(
    model_or_step: object,
    batch: object,
    target: str,
    *,
    strategy: Strategy | None = None,
    shard_state: str | None = None,
    assumptions: Assumptions | None = None,
) -> Plan:
    """Estimates memory, step time and scaling of a training step on hardware you don't have.

    Nothing is executed: the step is traced for the target's number of replicas, and compiled by
    the compiler for its devices if installed, else for CPU. Call outside every scope.

    Args:
        model_or_step: a compiled Keras model; a function without arguments that returns one, called
            in the scope of a strategy for the target, whose variables take no memory; or a replica
            function, called as in `strategy.run(fn, batch)`.
        batch: one global batch, a tuple of pytrees of arrays or `jax.ShapeDtypeStruct`: `(x, y)` or
            `(x, y, sample_weight)` for a model, the arguments of a step otherwise.
        target: the machine, such as "8xH100", "64xH100", "v5e:4x4" or "2xv5e:4x4".
        strategy: strategy whose variables the step uses. The plan takes over its cross-device ops,
            devices per replica, layouts and sharded state. None for the current strategy, or the
            model's.
        shard_state: sharded state, as in `MirroredStrategy`; None for the strategy's own choice.
        assumptions: assumptions of the time prediction; None for the defaults.

    Returns:
        The plan.

    Raises:
        TypeError: `model_or_step` is neither a model nor a function, or `batch` is not a tuple.
        ValueError: an unknown target or `shard_state`, a strategy that cannot be planned, a model
            that is not compiled, a batch without arrays, or a step without a strategy.
        RuntimeError: no compiler can compile the step.

    Example:
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
        >>> model.compile("adam", "mse")
        >>> plan = sg.plan(model, (np.ones((16, 8)), np.ones((16, 2))), "2xH100")
        >>> plan.fits, plan.memory.parameters_bytes, plan.memory.optimizer_bytes
        (True, 72, 152)

    Source: specific to Stratagem.
    """
    machine = parse_target(target)
    name = getattr(model_or_step, "name", None) or getattr(model_or_step, "__name__", "step")
    like = strategy or _default_strategy(model_or_step)
    with _captured_step(model_or_step, arrays_of(batch), machine, like, shard_state) as step:
        return plan_step(step, machine, title=str(name), assumptions=assumptions)


def arrays_of(batch: Any) -> Any:
    """Returns a batch with placeholders for shapes; raises TypeError if it is no tuple."""
    if not isinstance(batch, tuple):
        raise TypeError(
            explain(
                f"batch={batch!r} is of type {type(batch).__name__}.",
                expected="a tuple: (x, y) for a model, the arguments for a step.",
                fix="pass batch=(images, labels).",
            )
        )
    return jax.tree.map(
        lambda leaf: (
            placeholder(leaf.shape, leaf.dtype)
            if isinstance(leaf, jax.ShapeDtypeStruct)
            else np.asarray(leaf)
        ),
        batch,
    )


def _default_strategy(model_or_step: Any) -> Strategy | None:
    """Returns a model's strategy, or the current one for a step."""
    if is_model(model_or_step):
        own = model_or_step.distribute_strategy
        return None if own.topology.devices is None else own
    return get_strategy() if has_strategy() else None


def _captured_step(
    model_or_step: Any,
    batch: tuple[Any, ...],
    machine: Target,
    like: Strategy | None,
    shard_state: str | None,
) -> contextlib.AbstractContextManager[CapturedStep]:
    planned = planned_strategy(machine, like, shard_state)
    if is_model(model_or_step):
        return training_step(model_or_step, batch, planned)
    if not callable(model_or_step):
        raise TypeError(
            explain(
                f"plan received {model_or_step!r} of type {type(model_or_step).__name__}.",
                expected="a compiled Keras model, a function that returns one, or a replica "
                "function.",
                fix="pass a model or a function.",
            )
        )
    if _needs_arguments(model_or_step):
        return _captured_function(model_or_step, batch, planned, like)
    with planning_for(machine.topology), planned.scope():
        model = model_or_step()
    if not is_model(model):
        raise TypeError(
            explain(
                f"The function passed to plan returned a {type(model).__name__}.",
                expected="a compiled Keras model.",
                fix="return the model, or give the function parameters if it is a step.",
            )
        )
    return training_step(model, batch, planned)


@contextlib.contextmanager
def _captured_function(
    fn: Callable[..., Any], batch: object, planned: Strategy, like: Strategy | None
) -> Generator[CapturedStep]:
    if like is None:
        raise invalid(
            "plan received a step without a strategy.",
            expected="the strategy whose variables the step uses.",
            fix="pass strategy=, the strategy in whose scope the variables were created.",
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
    """Compiles a captured step for a target, and predicts its memory and time.

    Args:
        step: step traced for the target's number of replicas, or for one replica.
        target: the machine.
        title: name of the model or script, for reports.
        notes: notes to include in the plan.
        assumptions: assumptions of the time prediction; None for the defaults.

    Returns:
        The plan.

    Raises:
        RuntimeError: no compiler can compile the step.
    """
    target, more_notes = used_machine(step, target)
    _check_variables(step)
    compiled = compile_step(step, target)
    is_own = compiled.compiler != "cpu"
    assumed = assumptions or Assumptions()
    topology = step.strategy.topology
    schedules = [Schedule(program.text) for program in compiled.device_programs]
    reductions = [one for schedule in schedules for one in schedule.reductions()]
    if not is_own:  # a CPU runs it in order on one thread, without overlap
        reductions = [dataclasses.replace(one, behind=()) for one in reductions]
    # The devices of a replica split its products.
    size = topology.num_logical_devices
    flops = {key: count / size for key, count in product_flops(step.trace.jaxpr).items()}
    products_s, memory_s = compute_s(flops, compiled.accessed_bytes, target, assumed)
    computing_s, num_launches = products_s, 0
    if is_own:  # a CPU program fuses less: its operations say nothing about the accelerator
        costs = [cost for schedule in schedules for cost in schedule.operations()]
        counted_bytes = sum(one.times * one.num_bytes for one in costs)
        scale = compiled.accessed_bytes / counted_bytes if counted_bytes else 1.0
        # A kernel of unknown shape has no products in `costs`, but those of the step are known.
        computing_s = max(products_s, operations_s(costs, target, assumed, scale))
        if target.accelerator.platform == "gpu":  # TPUs read their program themselves
            num_launches = round(sum(one.times for one in costs))
    if target.num_devices == 1:
        reductions = []
    placement, batch = step.strategy.placement, step.arguments.batch
    num_examples = (batch.size or 0) * step.strategy.num_replicas_in_sync
    return Plan(
        target=target,
        title=title,
        compiler=compiled.compiler,
        is_refused=compiled.is_refused,
        num_parameters=sum(math.prod(one.shape) for one in step.trace.written if one.trainable),
        global_batch=num_examples if batch.lengths is None else sum(batch.lengths),
        num_replicas=topology.num_replicas,
        shard_state=placement.shard_state if isinstance(placement, ShardedState) else None,
        shared_state_bytes=shared_state_bytes(step),
        from_host_bytes=compiled.from_host_bytes,
        to_host_bytes=compiled.to_host_bytes,
        brought_bytes=compiled.brought_bytes,
        put_back_bytes=compiled.put_back_bytes,
        memory=plan_memory(
            step,
            [program.memory for program in compiled.device_programs],
            [program.memory for program in compiled.host_programs],
            target.accelerator,
        ),
        reductions=tuple(reductions),
        is_scheduled=is_own and all(one.is_scheduled for one in schedules),
        flops=flops,
        accessed_bytes=compiled.accessed_bytes,
        products_s=products_s,
        memory_s=memory_s,
        num_launches=num_launches,
        scaling=tuple(
            predict_scaling(
                target, reductions, computing_s, assumed, size, num_launches * assumed.launch_s
            )
        ),
        assumptions=assumed,
        notes=(*notes, *more_notes, *compiled.notes),
    )


def _check_variables(step: CapturedStep) -> None:
    """Raises for a rule that matches no variable, and for one without a copy for each replica."""
    if step.strategy.placement.uses_stores:
        step.strategy.placement.check()
    require_layouts_used(step.strategy.placement.layouts, step.trace.written)
    if step.strategy.local_updates is None or step.strategy.num_replicas_in_sync == 1:
        return
    missing = [one for one in step.trace.written if one.trainable and one.local_copy is None]
    if missing:  # the model was made for lockstep or for one replica
        raise invalid(
            f"Variable {missing[0].path!r} has no copy for each replica to train.",
            expected="a model whose optimizer was built under a LocalUpdateStrategy of several "
            "replicas.",
            fix="pass the function that makes and compiles the model, and strategy=.",
            code="SG801",
        )


def _needs_arguments(function: Callable[..., Any]) -> bool:
    return any(
        parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        for parameter in inspect.signature(function).parameters.values()
    )
