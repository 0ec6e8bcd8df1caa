"""Costs of a model, from traces of its step on one abstract device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from stratagem.devices.abstract_devices import placeholder
from stratagem.execution.programs.step_capture import CapturedStep
from stratagem.keras.training.planned_forms import computing_as, repeated_blocks
from stratagem.keras.training.planned_models import training_step
from stratagem.planning.candidate_costs import Weight, Workload
from stratagem.planning.candidates import Form
from stratagem.planning.planned_strategy import planned_strategy
from stratagem.planning.programs import variables_of
from stratagem.planning.targets import Target
from stratagem.planning.traced_costs import trace_costs
from stratagem.variables.layouts import VariableLayouts


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
        i: axes[id(getattr(step.trace, source)[index])]
        for i, (source, index) in enumerate(step.trace.inputs)
        if source in ("written", "read_only") and id(getattr(step.trace, source)[index]) in axes
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
