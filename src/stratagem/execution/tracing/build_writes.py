"""Build writes: values that a layer's build assigns to the variables it creates in a step.

The trace that creates variables is discarded, and the next one finds them built, so the build's
assignments would be lost. The first trace therefore records assignments to variables without a
value. A variable's first ones, as many as the next trace does not repeat, are the build's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from stratagem.errors import explain
from stratagem.execution.tracing.arguments import Arguments
from stratagem.execution.tracing.functionalize import Trace
from stratagem.execution.tracing.remote_state import without_unused, without_unused_variables
from stratagem.variables.distributed import PerReplica
from stratagem.variables.initial_values import agree_on_initial_values
from stratagem.variables.registry import VariableKind, home_of

if TYPE_CHECKING:
    import keras

    from stratagem.contexts import StrategyParts


def lost_writes(
    early: list[Any], num_early: Mapping[int, int], num_writes: Mapping[int, int]
) -> dict[int, int]:
    """Returns, for each variable assigned by a build, the index of its last such assignment.

    `early` is the variable of each assignment in the first trace; the counts are by id.
    """
    lost: dict[int, int] = {}
    for key in dict.fromkeys(map(id, early)):
        places = [place for place, variable in enumerate(early) if id(variable) == key]
        num_lost = num_early[key] - num_writes.get(key, 0)
        if num_lost > 0:
            lost[key] = places[num_lost - 1]
    return lost


def store_initial(variable: keras.Variable, value: object) -> None:
    """Sets the initial value of a new variable: `PerReplica`, or one value for all replicas."""
    home = home_of(variable)
    if home is not None and home.kind is VariableKind.ON_READ:
        if not isinstance(value, PerReplica):
            topology = home.strategy.topology
            value = PerReplica(stacked=topology.stack([value] * topology.num_local_replicas))
        variable.storage = value.stacked
        return
    value = np.array(value.components[0] if isinstance(value, PerReplica) else value)
    if home is None:
        variable.assign(value)
    else:
        variable.store_whole(value)


@dataclasses.dataclass
class BuildWrites:
    """The assignments of a first trace, as a program whose results are their values."""

    name: str  # of the replica function
    variables: list[Any]  # of each assignment
    num_writes: Mapping[int, int]  # assignments to each variable, by id
    trace: Trace

    @classmethod
    def of(
        cls, name: str, variables: list[Any], num_writes: Mapping[int, int], trace: Trace
    ) -> BuildWrites:
        """Extracts the assignments from the first trace, whose last outputs are the values."""
        jaxpr = trace.jaxpr.jaxpr
        jaxpr = jaxpr.replace(outvars=jaxpr.outvars[len(jaxpr.outvars) - len(variables) :])
        reduced, stays = without_unused(jaxpr, [False] * len(trace.inputs), keeps_effects=False)
        inputs = [one for one, stay in zip(trace.inputs, stays, strict=True) if stay]
        closed, inputs, read_only, _ = without_unused_variables(
            ClosedJaxpr(reduced, []), inputs, trace.read_only
        )
        places = list(range(len(variables)))
        values = Trace(
            jaxpr=closed,
            read_only=read_only,
            written=[],
            inputs=inputs,
            constants=trace.constants,
            result_structure=jax.tree.structure(places),
            results=[(True, place) for place in places],
            result_lengths=[None] * len(places),
        )
        return cls(name, variables, num_writes, values)

    def keep(
        self,
        strategy: StrategyParts,
        num_writes: Mapping[int, int],
        arguments: Arguments,
    ) -> None:
        """Stores the values that the build assigned and the next trace does not assign again.

        Raises RuntimeError if they depend on rows of a table.
        """
        lost = lost_writes(self.variables, self.num_writes, num_writes)
        topology = strategy.topology
        if not lost or topology.is_abstract or not strategy.executor.has_values:
            return
        sources = {source for source, _ in self.trace.inputs}
        if "rows" in sources:
            first = self.variables[next(iter(lost.values()))]
            raise RuntimeError(
                explain(
                    f"The build of variable {first.path!r} assigns it a value that depends on rows "
                    "of a table.",
                    expected="a value that depends only on other variables and on arguments.",
                    fix="build the model first: model.build(input_shape) in the scope.",
                )
            )
        agree_on_initial_values(strategy.variables, topology)
        needs_arguments = bool(sources & {"split", "shared"})
        split, shared = (arguments.split, arguments.shared) if needs_arguments else ([], [])
        values = strategy.executor.evaluate(self.trace, self.name, split, shared)
        for place in lost.values():
            store_initial(self.variables[place], values[place])
