"""A step with a number of variables on a number of replicas: by `run`, and by hand in JAX."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.growth.costs.serving import Answer, elapsed_s, least, serve_costs

__all__ = ["measure"]

_AXIS = "replica"
_COMPILATION = "/jax/core/compile/backend_compile_duration"
# Steps in flight fill the memory, and the host then waits for the devices.
_CALLS_IN_FLIGHT = 20
_GROUPS, _SMALLEST_GROUPS = 10, 2
_CALLS_OF_VARIABLES = 20_000  # a group of calls updates so many


def measure(num_variables: int, num_replicas: int, *, is_smallest: bool) -> Answer:
    """Returns how long tracing, compilation and a call take, by `run` and by hand."""
    jax.config.update("jax_num_cpu_devices", num_replicas)
    jax.config.update("jax_enable_compilation_cache", False)
    jax.block_until_ready(jax.jit(lambda x: x + 1)(np.float32(0)))  # the start of JAX is no trace
    names = [f"cpu:{index}" for index in range(num_replicas)]
    compiled_s: list[float] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled_s.append(seconds) if event == _COMPILATION else None
    )
    costs: dict[str, dict[str, float]] = {}
    calls: dict[str, Callable[[], Any]] = {}
    for side, make in {"ours": _by_run, "by hand": _by_hand}.items():
        call = calls[side] = make(names, num_variables)
        compiled_s.clear()
        first_s = elapsed_s(lambda call=call: jax.block_until_ready(call()))
        compile_s = sum(compiled_s)
        costs[side] = {"trace_s": first_s - compile_s, "compile_s": compile_s}
    num_calls = 10 if is_smallest else max(10, _CALLS_OF_VARIABLES // num_variables // 10)
    for side, call in calls.items():
        num_groups = _SMALLEST_GROUPS if is_smallest else _GROUPS
        costs[side]["call_s"] = least(num_groups, lambda call=call: _call_s(call, num_calls))
    return costs


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
    serve_costs(measure)
