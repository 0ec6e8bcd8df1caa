"""Compilation of exported programs for CPU devices in a subprocess; run as a script.

JAX fixes the number of CPU devices when it starts: a process that plans for 64 replicas may have
two.
"""

from __future__ import annotations

import json
import math
import pickle
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

if TYPE_CHECKING:
    from jax.export import Exported


def main(source: str, result: str) -> None:
    """Compiles the programs in the file `source`, and writes the analysis to `result` as JSON.

    `source` holds, pickled, the mesh axes as (name, size) pairs, and for each program its
    `jax.export.Exported` and the number of leading arguments to donate.
    """
    axes, programs = pickle.loads(Path(source).read_bytes())  # noqa: S301 - from the parent
    names, sizes = zip(*axes, strict=True)
    jax.config.update("jax_num_cpu_devices", math.prod(sizes))
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(sizes), names)
    reports = [_compile_program(exported, donated, mesh) for exported, donated in programs]
    Path(result).write_text(json.dumps(reports))


def _compile_program(exported: Exported, donated: int, mesh: jax.sharding.Mesh) -> dict[str, Any]:
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
