"""Compiles an exported step for CPU devices in a process of its own: run as a script, not imported.

A process has as many CPU devices as it had when JAX started; one that plans for 64 replicas has
two. Reads the step from a file, and writes what the compiler says of it to another.
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np


def main(source: str, result: str, num_devices: int, donated: int) -> None:
    """Compiles the step.

    Args:
        source: file of the `jax.export.Exported`, pickled.
        result: file for what is found out, JSON.
        num_devices: that it is compiled for.
        donated: how many of its arguments, from the first on, it takes over.
    """
    jax.config.update("jax_num_cpu_devices", num_devices)
    exported = pickle.loads(Path(source).read_bytes())
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("replica",))
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
    costs: Any = compiled.cost_analysis()
    told = {
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "accessed_bytes": costs.get("bytes accessed", 0.0),
        "text": compiled.as_text(),
    }
    Path(result).write_text(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
