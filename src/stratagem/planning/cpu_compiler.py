"""Compiles exported programs for CPU devices in a process of its own; run as a script.

A process has as many CPU devices as it had when JAX started; one that plans for 64 replicas has
two. Reads the programs of a step from a file, and writes what the compiler says of them to another.
"""

from __future__ import annotations

import json
import math
import pickle
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np


def main(source: str, result: str) -> None:
    """Compiles the programs.

    Args:
        source: file of the names and sizes of the mesh's axes, and for each program the
            `jax.export.Exported` and how many of its arguments, from the first on, it takes over;
            pickled.
        result: file for what is found out, JSON.
    """
    axes, programs = pickle.loads(Path(source).read_bytes())
    names, sizes = zip(*axes, strict=True)
    jax.config.update("jax_num_cpu_devices", math.prod(sizes))
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(sizes), names)
    told = [_compiled(exported, donated, mesh) for exported, donated in programs]
    Path(result).write_text(json.dumps(told))


def _compiled(exported: Any, donated: int, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    args, kwargs = jax.tree.unflatten(
        exported.in_tree,
        [
            jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
            for aval, sharding in zip(
                exported.in_avals, exported.in_shardings_jax(mesh), strict=True
            )
        ],
    )
    function = jax.jit(exported.call, donate_argnums=tuple(range(donated)))
    compiled = function.lower(*args, **kwargs).compile()
    memory: Any = compiled.memory_analysis()
    costs: Any = compiled.cost_analysis() or {}
    return {
        "memory": {
            "argument_bytes": memory.argument_size_in_bytes,
            "output_bytes": memory.output_size_in_bytes,
            "alias_bytes": memory.alias_size_in_bytes,
            "temp_bytes": memory.temp_size_in_bytes,
        },
        "accessed_bytes": costs.get("bytes accessed", 0.0),
        "text": compiled.as_text(),
    }


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
