"""Axes of replicas, functions that run on them, and the messages that a reduction sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from stratagem.devices.all_reduce import ReplicaAxis
from stratagem.execution.communicator import MeshCommunicator
from stratagem.options import ReduceOp

AXES = {
    2: ReplicaAxis("row", 2),
    3: ReplicaAxis("row", 3),
    4: ReplicaAxis("row", 4, ((0, 1), (2, 3))),
    6: ReplicaAxis("row", 6, ((0, 2, 4), (1, 3, 5))),
}


def on_axis(axis: ReplicaAxis, function: Callable[..., Any], *parts: Any) -> Any:
    """Calls a function once a replica; axis 0 of the parts and of the results is the replicas."""

    def body(*local: Any) -> Any:
        own = jax.tree.map(lambda part: part[0], local)
        return jax.tree.map(lambda value: jnp.asarray(value)[None], function(*own))

    mesh = Mesh(np.array(jax.devices()[: axis.size]), (axis.name,))
    spec = PartitionSpec(axis.name)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.tree.map(np.asarray, jax.jit(mapped)(*parts))


def messages(reduction: MeshCommunicator, *parts: Any) -> list[str]:
    """The collectives of a reduction of many values, as its program names them."""

    def primitives(jaxpr):
        for equation in jaxpr.eqns:
            yield equation.primitive.name
            for inner in jax.tree.leaves(
                list(equation.params.values()),
                is_leaf=lambda leaf: hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr"),
            ):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from primitives(getattr(inner, "jaxpr", inner))

    program = jax.make_jaxpr(
        lambda parts: reduction.all_reduce_many(ReduceOp.SUM, parts),
        axis_env=[(reduction.axis.name, reduction.axis.size)],
    )(list(parts))
    known = ("psum", "ppermute", "all_gather", "all_to_all", "reduce_scatter", "psum_scatter")
    return [name for name in primitives(program.jaxpr) if name.startswith(known)]
