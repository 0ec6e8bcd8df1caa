"""Programs of what a step sends before it ends: ids of its lookups, and early gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import PartitionSpec

from stratagem.devices.mesh import Topology
from stratagem.errors import explain
from stratagem.execution.jaxprs import without_unused
from stratagem.execution.tracing.functionalize import Trace
from stratagem.execution.tracing.remote_state import Ids
from stratagem.variables.registry import VariableKind, home_of

if TYPE_CHECKING:
    from stratagem.execution.tracing.arguments import Shaped

# `StepProgram`: a jitted function of a step and the shapes of its arguments, for planning.


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """One jitted function of a step. Shapes are `jax.ShapeDtypeStruct`s with shardings."""

    name: str
    function: Any
    shapes: tuple[Any, ...]  # of its arguments
    lasting: Sequence[jax.ShapeDtypeStruct]  # arguments in device memory between steps
    num_donated: int = 0  # leading arguments that are donated
    is_of_replicas: bool = True  # True on the replicas' devices, False on the store's
    brought: Sequence[jax.ShapeDtypeStruct] = ()  # arguments copied from pinned host memory
    put_back: Sequence[jax.ShapeDtypeStruct] = ()  # results copied to pinned host memory


def shape_on(
    value: Shaped, sharding: jax.sharding.Sharding, before: tuple[int, ...] = ()
) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of an array with a sharding, after the leading axes in `before`."""
    return jax.ShapeDtypeStruct((*before, *value.shape), value.dtype, sharding=sharding)


class EarlyProgram:
    """Computes some of what a step sends, by their places, without the effects of the step."""

    def __init__(self, trace: Trace, topology: Topology, places: Sequence[int]) -> None:
        jaxpr = trace.jaxpr.jaxpr
        first = len(trace.written) + trace.num_outputs
        reduced, stays = without_unused(
            jaxpr.replace(outvars=[jaxpr.outvars[first + place] for place in places]),
            [False] * len(jaxpr.invars),
            keeps_effects=False,  # the step itself has the effects
        )
        self._inputs = [one for one, stay in zip(trace.inputs, stays, strict=True) if stay]
        run: Any = jaxpr_as_fun(ClosedJaxpr(reduced, trace.jaxpr.consts))
        if topology.num_replicas > 1:
            run = jax.shard_map(
                run,
                mesh=topology.mesh,
                in_specs=tuple(
                    spec_of_input(source, index, trace, topology) for source, index in self._inputs
                ),
                out_specs=PartitionSpec(topology.replica_axis),
                axis_names={*topology.replica_axes},
                check_vma=False,
            )
        self._run = jax.jit(run)

    def run(self, pools: Mapping[str, Sequence[Any]]) -> list[Any]:
        """Returns the values; in `pools`, a variable is a function that returns its value."""
        inputs = [pools[source][index] for source, index in self._inputs]
        return self._run(*[one() if callable(one) else one for one in inputs])


class IdsProgram(EarlyProgram):
    """Computes the ids of each lookup of a step; raises ValueError if they depend on other rows."""

    def __init__(self, trace: Trace, topology: Topology, name: str) -> None:
        # Tracing may have discarded a lookup, whose rows are then unused.
        places = {
            what.lookup: place for place, what in enumerate(trace.sent) if isinstance(what, Ids)
        }
        self._lookups = sorted(places)
        super().__init__(trace, topology, [places[lookup] for lookup in self._lookups])
        if any(source == "rows" for source, _ in self._inputs):
            raise ValueError(
                explain(
                    f"{name} looks up rows with ids that it computes from other looked-up rows.",
                    expected="ids that depend only on the arguments and variables of the step.",
                    fix="look up the second rows in a separate step that receives the ids.",
                )
            )
        self._num_lookups = len(trace.lookups)

    def run(self, pools: Mapping[str, Sequence[Any]]) -> list[Any]:
        """Returns the ids of each lookup; None if its rows are unused, or if it has none."""
        return self._by_lookup(super().run(pools))

    def program(self, pools: dict[str, list[Any]]) -> tuple[StepProgram, list[Any]]:
        """Returns the program with arguments and the shapes of the ids, given shapes in `pools`."""
        inputs = tuple(pools[source][index] for source, index in self._inputs)
        program = StepProgram("ids", self._run, inputs, inputs)
        return program, self._by_lookup(jax.eval_shape(self._run, *inputs))

    def _by_lookup(self, computed: Sequence[Any]) -> list[Any]:
        ids: list[Any] = [None] * self._num_lookups
        for lookup, value in zip(self._lookups, computed, strict=True):
            ids[lookup] = value
        return ids


def spec_of_input(source: str, index: int, trace: Trace, topology: Topology) -> PartitionSpec:
    """Returns the partition spec of an input of a step."""
    variables = {"read_only": trace.read_only, "written": trace.written}.get(source)
    home = None if variables is None else home_of(variables[index])
    is_on_read = home is not None and home.kind is VariableKind.ON_READ
    is_split = source in ("split", "rows") or is_on_read
    return PartitionSpec(topology.replica_axis) if is_split else PartitionSpec()
