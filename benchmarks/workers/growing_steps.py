"""A step with a number of variables on a number of replicas: by `run`, and by hand in JAX."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.workers.protocol import serve_questions

__all__ = ["prepare"]

_AXIS = "replica"
_COMPILATION = "/jax/core/compile/backend_compile_duration"
# Steps in flight fill the memory, and the host then waits for the devices.
_CALLS_IN_FLIGHT = 20


def prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
    options = json.loads(sys.argv[1])
    num_variables, num_replicas = options["num_variables"], options["num_replicas"]
    jax.config.update("jax_num_cpu_devices", num_replicas)
    jax.config.update("jax_enable_compilation_cache", False)
    jax.block_until_ready(jax.jit(lambda x: x + 1)(np.float32(0)))  # the start of JAX is no trace
    names = [f"cpu:{index}" for index in range(num_replicas)]
    sides = {"run": _by_run, "by hand": _by_hand}
    compiled_s: list[float] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled_s.append(seconds) if event == _COMPILATION else None
    )
    calls: dict[str, Callable[[], Any]] = {}

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        side = question["side"]
        if side not in calls:
            calls[side] = sides[side](names, num_variables)
            compiled_s.clear()
            begun_s = time.perf_counter()
            jax.block_until_ready(calls[side]())
            first_s = time.perf_counter() - begun_s
            return {"trace_s": first_s - sum(compiled_s), "compile_s": sum(compiled_s)}
        # The best of several groups: a pause of the machine is no cost of the step.
        groups = [_call_s(calls[side], question["calls"]) for _ in range(question["groups"])]
        return {"call_s": min(groups)}

    return answer


def _call_s(call: Callable[[], Any], num_calls: int) -> float:
    begun_s = time.perf_counter()
    for index in range(num_calls):
        result = call()
        if index % _CALLS_IN_FLIGHT == 0:
            jax.block_until_ready(result)
    jax.block_until_ready(result)
    return (time.perf_counter() - begun_s) / num_calls


def _by_run(names: list[str], num_variables: int) -> Callable[[], Any]:
    strategy: Any = (
        sg.OneDeviceStrategy(names[0]) if len(names) == 1 else sg.MirroredStrategy(names)
    )
    with strategy.scope():
        variables = [keras.Variable(np.zeros((), "float32")) for _ in range(num_variables)]
    (batch,) = strategy.distribute_dataset([np.ones((64, 2), "float32")])

    def step(x: Any) -> None:
        total = sg.get_replica_context().all_reduce("sum", x.sum())
        for variable in variables:
            variable.assign(variable + total)

    def call() -> Any:
        strategy.run(step, args=(batch,))
        return variables[0].storage

    return call


def _by_hand(names: list[str], num_variables: int) -> Callable[[], Any]:
    mesh = Mesh(np.array(jax.devices("cpu")[: len(names)]), (_AXIS,))
    copied, split = PartitionSpec(), PartitionSpec(_AXIS)

    def step(values: list[Any], x: Any) -> list[Any]:
        total = x.sum() if len(names) == 1 else jax.lax.psum(x.sum(), _AXIS)
        return [value + total for value in values]

    function: Any = step
    if len(names) > 1:
        function = jax.shard_map(
            step, mesh=mesh, in_specs=(copied, split), out_specs=copied, check_vma=False
        )
    program = jax.jit(function, donate_argnums=0)
    x = jax.device_put(np.ones((64, 2), "float32"), NamedSharding(mesh, split))
    zeros = [np.zeros((), "float32") for _ in range(num_variables)]
    state = jax.device_put(zeros, NamedSharding(mesh, copied))

    def call() -> Any:
        nonlocal state
        state = program(state, x)
        return state[0]

    return call


if __name__ == "__main__":
    serve_questions(prepare)
