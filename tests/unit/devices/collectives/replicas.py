"""Running functions on three replicas: one program over a mesh axis, parts in and parts out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

NUM_REPLICAS = 3
AXIS = "row"


def on_replicas(function: Callable[..., Any], *parts: Any) -> Any:
    """Calls a function once a replica, as the compiled execution does.

    Args:
        function: takes and returns pytrees of local arrays.
        *parts: pytrees of arrays whose axis 0 are the replicas.

    Returns:
        What it returned, with the replicas on axis 0, as NumPy arrays.
    """

    def body(*local: Any) -> Any:
        own = jax.tree.map(lambda part: part[0], local)
        return jax.tree.map(lambda value: jax.numpy.asarray(value)[None], function(*own))

    mesh = Mesh(np.array(jax.devices()[:NUM_REPLICAS]), (AXIS,))
    spec = PartitionSpec(AXIS)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.tree.map(np.asarray, jax.jit(mapped)(*parts))
