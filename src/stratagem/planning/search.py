"""Search for the fastest way to train a model on a machine: `sg.planning.search`."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from stratagem.devices.finding import placeholder, planning_for
from stratagem.errors import explain, invalid
from stratagem.execution.tracing.functionalize import CapturedStep
from stratagem.keras.training.planned_models import (
    computing_as,
    is_float32,
    is_model,
    repeated_blocks,
    training_step,
)
from stratagem.planning.candidates import (
    Form,
    Weight,
    Workload,
    assumptions_of,
    estimate,
    list_candidates,
)
from stratagem.planning.choices import PlanChoice, PlanSearch
from stratagem.planning.compilers import missing_compiler
from stratagem.planning.memory import variables_of
from stratagem.planning.planner import arrays_of, plan_step, planned_strategy
from stratagem.planning.step_time import Assumptions
from stratagem.planning.targets import Target, parse_target
from stratagem.planning.traced_costs import trace_costs
from stratagem.strategies.mirrored import MirroredStrategy
from stratagem.strategies.strategy import Strategy
from stratagem.variables.layouts import VariableLayouts

# Costs of a model, from traces of its step on one abstract device.


def workload_of(
    model: Any,
    batch: tuple[Any, ...],
    machine: Target,
    forms: Sequence[Form],
    *,
    layouts: Mapping[int, VariableLayouts | None] | None = None,
    blocks: Sequence[Any] | None = None,
) -> Workload:
    """Traces a model's step on one device in each form, and returns what it costs.

    Args:
        model: a compiled model.
        batch: the global batch, as shapes.
        machine: whose devices share the batch.
        forms: forms to trace.
        layouts: layouts by number of devices per replica.
        blocks: repeated blocks; None to find them.
    """
    blocks = repeated_blocks(model) if blocks is None else blocks
    whole = jax.tree.leaves(batch)[0].shape[0]
    num_examples = max(1, whole // machine.num_devices)
    part = jax.tree.map(
        lambda leaf: placeholder((num_examples, *leaf.shape[1:]), leaf.dtype), batch
    )
    one = planned_strategy(machine.of_size(1), None)
    costs: dict[tuple[Form, int], Any] = {}
    weights: list[Weight] = []
    for form in forms:
        inside = computing_as(model, form.remat, form.precision)
        with inside, training_step(model, part, one) as step:
            divided = {
                size: _divided(step, given) for size, given in (layouts or {1: None}).items()
            }
            for size, axes in divided.items():
                inputs = _divided_inputs(step, axes)
                costs[form, size] = trace_costs(step.trace.jaxpr, _trained(step), divisions=inputs)
            weights = weights or _weights(step, divided)
    candidates = [[one] for one in weights if one.is_trained]
    candidates += [[_weight(one) for one in block.weights] for block in blocks]
    return Workload(
        weights=weights,
        costs=costs,
        num_examples=num_examples,
        global_batch=whole,
        block=max(candidates, key=lambda block: sum(one.size for one in block), default=[]),
        num_blocks=len(blocks) or max(sum(len(one.shape) > 1 for one in weights) // 4, 1),
        example_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(part)) / num_examples,
    )


def _divided_inputs(step: CapturedStep, axes: Mapping[int, Any]) -> dict[int, Any]:
    """Returns the divided axes of each input that is a variable with any."""
    return {
        i: axes[id(variable)]
        for i, source in enumerate(step.trace.inputs)
        if id(variable := step.trace.variable(*source)) in axes
    }


def _trained(step: CapturedStep) -> dict[int, int]:
    """Returns the output of each trained weight by its input."""
    return {
        i: index
        for i, (source, index) in enumerate(step.trace.inputs)
        if source == "written" and step.trace.written[index].trainable
    }


def _divided(step: CapturedStep, layouts: VariableLayouts | None) -> dict[int, frozenset[int]]:
    """Returns the axes of each variable that a layout divides within replicas."""
    found: dict[int, frozenset[int]] = {}
    for variable in variables_of(step.trace) if layouts is not None else ():
        slot_of = getattr(variable, "slot_of", None)
        owner = variable if slot_of is None else slot_of
        shape = tuple(variable.shape)
        division = layouts.division(owner.path, shape, is_trainable=False) if layouts else None
        if division is not None:
            axes = {i for i in range(len(shape)) if not division.is_free(i)}
            found[id(variable)] = frozenset(axes)
    return found


def _weights(
    step: CapturedStep, divided: Mapping[int, Mapping[int, frozenset[int]]]
) -> list[Weight]:
    slots = {id(v) for optimizer in step.optimizers for v in optimizer.variables}
    found: list[Weight] = []
    for variable in variables_of(step.trace):
        weight = _weight(variable)
        if id(variable) in slots:
            weight = dataclasses.replace(
                weight, num_bytes=0, slot_bytes=weight.num_bytes, is_trained=False
            )
        axes = {count: named.get(id(variable), frozenset()) for count, named in divided.items()}
        found.append(dataclasses.replace(weight, divided=axes))
    return found


def _weight(variable: Any) -> Weight:
    shape = tuple(variable.shape)
    num_bytes = math.prod(shape) * jax.numpy.dtype(variable.dtype).itemsize
    return Weight(shape, num_bytes, is_trained=bool(variable.trainable))


_REMAT = ("full", "dots", "offload")
_MIXED = "mixed_bfloat16"
# Candidates whose times differ by less are equally fast.
_TOLERANCE = 0.02
# So are shorter steps: the host takes about that long to start one.
_SHORTEST_S = 1e-3


def search(
    model: Any,
    batch: Any,
    target: str,
    *,
    count: int = 5,
    strategy: Strategy | None = None,
    assumptions: Assumptions | None = None,
    compiles: bool = True,
) -> PlanSearch:
    """Finds the fastest meshes, sharded states, rematerializations and precisions for a model.

    The step is traced once for each policy of rematerialization and precision. All combinations
    with a mesh are ranked by arithmetic; the best are compiled, if the target's compiler is
    installed. Call outside every scope.

    Args:
        model: a compiled Keras model, or a function without arguments that returns one.
        batch: one global batch, `(x, y)` or `(x, y, sample_weight)`, as for `sg.plan`.
        target: the machine, as for `sg.plan`.
        count: number of results.
        strategy: strategy whose `layout_map` may be used; None for the model's own.
        assumptions: assumptions of the time prediction; None for those of the accelerator.
        compiles: False gives estimates only.

    Returns:
        The best results, the fastest that fits first.

    Raises:
        TypeError: `model` is neither a model nor a function that returns one, or `batch` is no
            tuple.
        ValueError: a `count` below 1, an unknown target, or a batch that no mesh can split.

    Example:
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
        >>> model.compile("adam", "mse")
        >>> found = sg.planning.search(model, (np.ones((16, 8)), np.ones((16, 2))), "2xH100",
        ...     count=1, compiles=False)
        >>> found.best.code
        'strategy = sg.MirroredStrategy()'

    Source: specific to Stratagem.
    """
    machine = parse_target(target)
    shapes = jax.tree.map(lambda leaf: placeholder(leaf.shape, leaf.dtype), arrays_of(batch))
    if not is_model(model) and callable(model):
        one = machine.of_size(1)
        with planning_for(one.topology), planned_strategy(one, None).scope():
            model = model()
    if not is_model(model):
        raise TypeError(
            explain(
                f"search received or built {model!r} of type {type(model).__name__}.",
                expected="a compiled Keras model, or a function that returns one.",
                fix="pass the model.",
            )
        )
    like = strategy or getattr(model, "distribute_strategy", None)
    return _search(model, shapes, machine, like, count, assumptions, compiles=compiles)


def search_step(
    step: CapturedStep,
    target: Target,
    *,
    title: str,
    count: int = 5,
    assumptions: Assumptions | None = None,
    compiles: bool = True,
) -> PlanSearch:
    """Finds the fastest settings for the captured step of a script that trains with `fit`.

    Args:
        step: the step.
        target: the machine.
        title: name of the script.
        count: number of results.
        assumptions: as for `search`.
        compiles: as for `search`.

    Returns:
        The best results.

    Raises:
        ValueError: the step is not that of a Keras model, and as for `search`.
    """
    model = getattr(getattr(step.fn, "__self__", None), "model", None)
    if not is_model(model):
        raise invalid(
            f"{title} trains with a function of its own, {step.fn!r}.",
            expected="a script whose first training step is that of fit or train_on_batch.",
            fix="plan each setting on its own: stratagem plan without --search.",
            code="SG801",
        )
    batch = _global_batch(step)
    found = _search(model, batch, target, step.strategy, count, assumptions, compiles=compiles)
    return dataclasses.replace(found, title=title)


def _global_batch(step: CapturedStep) -> tuple[Any, ...]:
    """Returns the whole batch of a captured step, as shapes."""
    several = step.strategy.num_replicas_in_sync > 1
    leaves = [
        placeholder((math.prod(leaf.shape[:2]), *leaf.shape[2:]), leaf.dtype)
        if several and leaf.split and leaf.shape
        else placeholder(leaf.shape or (), leaf.dtype)
        for leaf in step.arguments.leaves
    ]
    arguments: Any = jax.tree.unflatten(step.arguments.structure, leaves)[0]
    (data,) = arguments
    return (*data,) if isinstance(data, list | tuple) else (data,)


def _search(
    model: Any,
    batch: tuple[Any, ...],
    machine: Target,
    like: Any,
    count: int,
    assumptions: Assumptions | None,
    *,
    compiles: bool,
) -> PlanSearch:
    if count < 1:
        raise invalid(
            f"A search for {count} results was requested.",
            expected="at least 1.",
            fix="pass 5.",
        )
    recreate: Any = getattr(like, "recreate", None)
    layout_map = None if recreate is None else recreate.keywords.get("layout_map")
    sizes = _model_sizes(like, layout_map, machine)
    blocks = repeated_blocks(model)
    precisions = (None, _MIXED) if is_float32(model) else (None,)
    forms = [
        Form(policy, precision)
        for precision, policy in itertools.product(
            precisions, (None, *_REMAT) if blocks else (None,)
        )
    ]
    global_batch = jax.tree.leaves(batch)[0].shape[0]
    name = type(like).__name__
    if name not in ("MultiWorkerMirroredStrategy", "TPUStrategy"):
        name = "MultiWorkerMirroredStrategy" if machine.num_hosts > 1 else "MirroredStrategy"
    candidates = list_candidates(machine, global_batch, forms, strategy=name, model_sizes=sizes)
    if not candidates:
        raise invalid(
            f"A global batch of {global_batch} cannot be split over {machine.num_devices} devices.",
            expected="a multiple of the number of replicas.",
            fix="use another global batch, or a layout_map that several devices share.",
            code="SG306",
        )
    layouts = {size: _layouts(layout_map, machine, size) for size in sizes}
    work = workload_of(model, batch, machine, forms, layouts=layouts, blocks=blocks)
    ranked = _ranked(
        PlanChoice(one, estimate(one, work, machine, assumptions), machine) for one in candidates
    )
    best = ranked[:count]
    notes: list[str] = []
    if compiles and (install := missing_compiler(machine.accelerator.platform)):
        notes.append(f"Estimates: the compiler for {machine.name} is missing ({install}).")
    elif compiles:
        best = _ranked(_compiled(one, model, batch, layout_map, assumptions) for one in best)
    return PlanSearch(model.name, machine, global_batch, tuple(best), len(candidates), tuple(notes))


def _ranked(choices: Iterable[PlanChoice]) -> list[PlanChoice]:
    """Sorts choices: those that fit first, then the fastest, then those with fewer settings."""

    def key(one: PlanChoice) -> Any:
        if not one.fits:
            return (True, one.memory_bytes, one.step_s)
        speed = round(math.log(max(one.step_s, _SHORTEST_S)) / _TOLERANCE)
        return (False, speed, one.candidate.num_settings, one.memory_bytes)

    return sorted(choices, key=key)


def _model_sizes(like: Strategy, layout_map: Any, machine: Target) -> list[int]:
    """Returns the numbers of devices per replica for which there is a layout."""
    if layout_map is None:
        return [1]
    if getattr(layout_map, "device_mesh", None) is not None:
        return sorted({1, like.topology.num_logical_devices})
    per_host = min(machine.accelerator.devices_per_host, machine.num_devices)
    return [size for size in range(1, per_host + 1) if per_host % size == 0]


def _layouts(layout_map: Any, machine: Target, size: int) -> VariableLayouts | None:
    if layout_map is None or size == 1:
        return None
    with planning_for(machine.topology):
        topology = MirroredStrategy(devices_per_replica=size).topology
    return VariableLayouts(layout_map, topology)


def _compiled(
    choice: PlanChoice,
    model: Any,
    batch: tuple[Any, ...],
    layout_map: Any,
    assumptions: Assumptions | None,
) -> PlanChoice:
    machine, candidate, form = choice.target, choice.candidate, choice.candidate.form
    several = candidate.devices_per_replica > 1
    with planning_for(machine.topology):
        planned = MirroredStrategy(
            shard_state=candidate.shard_state,
            shard_size=candidate.shard_size if candidate.shard_state else None,
            devices_per_replica=candidate.devices_per_replica if several else None,
            layout_map=layout_map if several else None,
        )
    with (
        computing_as(model, form.remat, form.precision),
        training_step(model, batch, planned) as step,
    ):
        assumed = assumptions or assumptions_of(machine)
        plan = plan_step(step, machine, title=model.name, assumptions=assumed)
    return dataclasses.replace(choice, plan=plan)
