"""Updates of single variables that a device computes for its own shard.

Most optimizers update each element of a weight from the same element of its gradient and its
slots. Then a device needs no more than its shard of the summed gradient. It updates its shard as
soon as it has the sum, which takes no memory from then on.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, Literal

from stratagem.execution.analysis.elements import is_by_element
from stratagem.execution.analysis.retracing import Rule, retrace
from stratagem.execution.late_gathers.exchanges import Sharded
from stratagem.execution.late_gathers.weights import shape_of

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn


_Source = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class ShardUpdate:
    """The part of an update that reads the same sums, and variables of one shape.

    `sources` are the inputs of `jaxpr`: ("input", i) of the step, ("handed", i) by the replicas.
    `outputs` are the places of its outputs among those of the whole update. All are sharded the
    same way.
    """

    jaxpr: Jaxpr
    sources: Sequence[_Source]
    outputs: Sequence[int]
    shape: tuple[int, ...]
    sharded: Sharded

    def values(self, inputs: Sequence[Any], shard_shape: tuple[int, ...]) -> list[Any]:
        """Returns the new shards, from shards of this shape and from scalars."""
        return retrace(self.jaxpr, inputs, rules=self._rules(shard_shape))

    def _rules(self, shard_shape: tuple[int, ...]) -> Mapping[str, Rule]:
        def broadcast(eqn: JaxprEqn, inputs: list[Any], _: bool) -> list[Any]:
            if np.shape(inputs[0]):  # has its shape already
                return inputs
            is_whole = tuple(eqn.params["shape"]) == self.shape
            return [jnp.broadcast_to(inputs[0], shard_shape if is_whole else eqn.params["shape"])]

        return {"broadcast_in_dim": broadcast}


def shard_updates(
    update: Jaxpr, sources: Sequence[_Source], sharded: Callable[[_Source], Sharded | None]
) -> list[ShardUpdate]:
    """Returns the parts of an update that each device can compute for its own shards.

    `sources` are the inputs of the update, as in `StepParts`. `sharded` maps one to how it is
    sharded; None if it is whole.
    """
    makers = {atom: eqn for eqn in update.eqns for atom in eqn.outvars}
    source_of = dict(zip(update.invars, sources, strict=True))
    groups: dict[Any, list[_Cone]] = collections.defaultdict(list)
    for place, atom in enumerate(update.outvars):
        if isinstance(atom, Literal) or not shape_of(atom):
            continue
        cone = _Cone.of(place, atom, makers, source_of)
        if cone is not None and (key := cone.key(sharded)) is not None:
            groups[key].append(cone)
    order = {id(eqn): number for number, eqn in enumerate(update.eqns)}
    return [_joined(update, group, order, one) for (_, one, _), group in groups.items()]


@dataclasses.dataclass(frozen=True)
class _Cone:
    """The operations that one output of an update follows from, all of them by element."""

    place: int
    atom: Any
    eqns: Mapping[int, JaxprEqn]
    inputs: Mapping[Any, _Source]

    @classmethod
    def of(
        cls, place: int, atom: Any, makers: Mapping[Any, JaxprEqn], source_of: Mapping[Any, _Source]
    ) -> _Cone | None:
        shape = shape_of(atom)
        eqns: dict[int, JaxprEqn] = {}
        inputs: dict[Any, _Source] = {}
        waiting = [atom]
        while waiting:
            one = waiting.pop()
            if shape_of(one) not in (shape, ()):
                return None
            if one in source_of:
                inputs[one] = source_of[one]
                continue
            eqn = makers.get(one)
            if eqn is None:
                return None
            if id(eqn) in eqns:
                continue
            eqns[id(eqn)] = eqn
            variables = [each for each in eqn.invars if not isinstance(each, Literal)]
            is_of_scalars = not any(shape_of(each) for each in (*variables, *eqn.outvars))
            if not (is_of_scalars or is_by_element(eqn, also=("broadcast_in_dim",))):
                return None
            waiting += variables
        return cls(place, atom, eqns, inputs)

    def key(self, sharded: Callable[[_Source], Sharded | None]) -> Any:
        """Returns the shape, how it is sharded, and the sums; None if an input is not a shard."""
        found = {sharded(source) for one, source in self.inputs.items() if shape_of(one)}
        sums = frozenset(source for source in self.inputs.values() if source[0] == "handed")
        if not sums or len(found) != 1 or None in found:
            return None
        return shape_of(self.atom), found.pop(), sums


def _joined(
    update: Jaxpr,
    cones: Sequence[_Cone],
    order: Mapping[int, int],
    sharded: Sharded,
) -> ShardUpdate:
    eqns = {key: eqn for cone in cones for key, eqn in cone.eqns.items()}
    inputs = {atom: source for cone in cones for atom, source in cone.inputs.items()}
    jaxpr = update.replace(
        invars=[*inputs],
        outvars=[cone.atom for cone in cones],
        eqns=[eqns[key] for key in sorted(eqns, key=order.__getitem__)],
    )
    outputs = [cone.place for cone in cones]
    shape = shape_of(cones[0].atom)
    return ShardUpdate(jaxpr, [*inputs.values()], outputs, shape, sharded)
