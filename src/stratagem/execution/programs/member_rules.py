"""Collectives of a traced replica function as operations of an elastic group's round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from stratagem.devices.collectives.elastic_rounds import RoundOperation, Rounds
from stratagem.devices.mesh import REPLICA_AXIS
from stratagem.errors import explain

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn

    from stratagem.execution.jaxprs import Rule


_Combination = Callable[[Any, list[Any]], Sequence[Any]]


def member_rules(rounds: Rounds, rank: jax.Array, num_members: int) -> Mapping[str, Rule]:
    """Returns the rules for the collectives of one member; `rank` is its place among all."""
    member = _MemberCollectives(rounds, rank, num_members)
    operations: dict[str, _Combination] = {
        "psum": member.add,
        "psum_invariant": member.add,
        "pmax": member.maximum,
        "pmin": member.minimum,
        "all_gather": member.gather,
        "all_gather_invariant": member.gather,
        "reduce_scatter": member.reduce_scatter,
        "all_to_all": member.all_to_all,
        "ppermute": member.permute,
    }
    rules: dict[str, Rule] = {name: _outside(one) for name, one in operations.items()}
    rules["axis_index"] = lambda eqn, inputs, is_inside: [rank]
    return rules


def _outside(operation: _Combination) -> Rule:
    def rule(eqn: JaxprEqn, inputs: list[Any], is_inside: bool) -> Sequence[Any]:
        if is_inside or eqn.params.get("axis_index_groups") is not None:
            where = "in a branch or a loop" if is_inside else "over groups of replicas"
            raise NotImplementedError(
                explain(
                    f"A step of an ElasticStrategy calls {eqn.primitive.name} {where}.",
                    expected="collectives over all replicas, outside of lax.cond, lax.scan and "
                    "lax.while_loop: members combine values in one order.",
                    fix="combine the values after the loop, or use MultiWorkerMirroredStrategy.",
                )
            )
        _check_axes(eqn)
        return operation(eqn, inputs)

    return rule


def _check_axes(eqn: JaxprEqn) -> None:
    axes = eqn.params.get("axes", eqn.params.get("axis_name"))
    names = axes if isinstance(axes, tuple | list) else (axes,)
    if tuple(names) != (REPLICA_AXIS,):
        raise NotImplementedError(
            explain(
                f"A step of an ElasticStrategy calls {eqn.primitive.name} over {names}.",
                expected=f"the axis {REPLICA_AXIS!r} alone.",
                fix="use one axis for each collective.",
            )
        )


class _MemberCollectives:
    """The collectives of one member."""

    def __init__(self, rounds: Rounds, rank: jax.Array, num_members: int) -> None:
        self._rounds, self._rank, self._num_members = rounds, rank, num_members

    def add(self, eqn: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
        del eqn
        return [self._rounds.combine(RoundOperation.SUM, jnp.asarray(one)) for one in inputs]

    def maximum(self, eqn: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
        del eqn
        return [self._rounds.combine(RoundOperation.MAX, jnp.asarray(one)) for one in inputs]

    def minimum(self, eqn: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
        del eqn
        return [self._rounds.combine(RoundOperation.MIN, jnp.asarray(one)) for one in inputs]

    def gather(self, eqn: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
        axis, is_tiled = eqn.params["all_gather_dimension"], eqn.params["tiled"]
        results: list[Any] = []
        for one in inputs:
            rows = jnp.moveaxis(self._rounds.gather(one, self._num_members), 0, axis)
            if is_tiled:  # axes (members, size) at the place of one
                shape = (*one.shape[:axis], -1, *one.shape[axis + 1 :])
                rows = rows.reshape(shape)
            results.append(rows)
        return results

    def reduce_scatter(self, eqn: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
        axis, is_tiled = eqn.params["scatter_dimension"], eqn.params["tiled"]
        [total] = self.add(eqn, inputs)
        size = total.shape[axis] // self._num_members
        own = jax.lax.dynamic_slice_in_dim(total, self._rank * size, size, axis)
        return [own if is_tiled else jnp.squeeze(own, axis)]

    def all_to_all(self, eqn: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
        split, joined = eqn.params["split_axis"], eqn.params["concat_axis"]
        [array] = inputs
        count = self._num_members
        shape = (*array.shape[:split], count, -1, *array.shape[split + 1 :])
        received = self._rounds.all_to_all(jnp.moveaxis(array.reshape(shape), split, 0))
        return [jnp.concatenate([received[place] for place in range(count)], joined)]

    def permute(self, eqn: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
        sources = [self._num_members] * self._num_members  # a row of zeros
        for source, target in eqn.params["perm"]:
            sources[target] = source
        results: list[Any] = []
        for one in inputs:
            rows = self._rounds.gather(one, self._num_members)
            rows = jnp.concatenate([rows, jnp.zeros_like(rows[:1])])
            results.append(rows[jnp.asarray(sources)[self._rank]])
        return results
