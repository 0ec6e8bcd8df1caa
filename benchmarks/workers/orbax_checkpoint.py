"""Reference: Orbax called by hand, on a state of arrays that steps give away and return."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from benchmarks.workers.checkpoint_rounds import NUM_ARRAYS, State, answer_rounds, first_values
from benchmarks.workers.peak_memory import memory_bytes
from benchmarks.workers.protocol import serve_questions

__all__ = ["prepare"]


def prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Answers how long saves and restores take, and how long training waits for them."""
    size = json.loads(sys.argv[1])["bytes"] // 4 // NUM_ARRAYS
    base_bytes = memory_bytes()
    state = {f"v{i}": jnp.asarray(first_values(i, size)) for i in range(NUM_ARRAYS)}
    handler = ocp.StandardCheckpointHandler()
    behind, now = ocp.AsyncCheckpointer(handler), ocp.Checkpointer(ocp.StandardCheckpointHandler())

    def changed(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: value * 0.999 + 0.001 for name, value in state.items()}

    program = jax.jit(changed, donate_argnums=0)

    def step() -> None:
        nonlocal state
        state = jax.block_until_ready(program(state))

    def save(folder: str, is_async: bool) -> Callable[[], None]:
        (behind if is_async else now).save(folder, args=ocp.args.StandardSave(state))
        return behind.wait_until_finished

    def restore(folder: str) -> None:
        nonlocal state
        wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        state = jax.block_until_ready(now.restore(folder, args=ocp.args.StandardRestore(wanted)))

    def first_value() -> float:
        return float(state["v0"][0])

    step()
    return answer_rounds(State(4 * size * NUM_ARRAYS, base_bytes, step, save, restore, first_value))


if __name__ == "__main__":
    serve_questions(prepare)
