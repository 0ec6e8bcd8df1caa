"""The training step of each side, lowered for devices that are not here, compiled and described."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Sequence
from typing import Any

import stratagem  # isort: skip - before keras, because it selects the JAX backend
import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.large_models.cases import DECODERS, Case
from benchmarks.large_models.jax_decoder import lower_jax_step
from benchmarks.large_models.keras_decoder import build_decoder, compiled
from stratagem.devices.finding import placeholder, planning_for
from stratagem.devices.mesh import Topology
from stratagem.keras.training.planned_models import training_step
from stratagem.planning.compilers import devices_of
from stratagem.planning.memory import step_programs
from stratagem.planning.planner import planned_strategy
from stratagem.planning.schedule import Schedule, share_behind
from stratagem.planning.targets import parse_target

__all__ = ["chips_of", "describe_case", "lower_case"]

_AXES = ("batch", "model")
# The same sums and about the same memory, in a tenth of the time. Messages of a TPU do not overlap.
_QUICK: dict[str, Any] = {"exec_time_optimization_effort": -1.0}
_USED = re.compile(r"Used ([\d.]+)([KMG]) of")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
_KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


def chips_of(machine: str) -> list[Any]:
    """Returns the devices of a TPU slice or of hosts of GPUs for their compiler."""
    return list(devices_of(parse_target(machine)))


def _lower_ours(case: Case, devices: Sequence[Any], shard_state: str) -> Any:
    machine = parse_target(case.machine)
    planned = planned_strategy(machine, None, shard_state)
    with planning_for(machine.topology), planned.scope():
        model = compiled(_build(case))
        if case.scans:
            stratagem.scan_layers(model)
    tokens = placeholder((len(devices), case.length), "int32")
    with (
        training_step(model, (tokens, tokens), planned) as step,
        step_programs(step, Topology(tuple(devices))) as programs,
    ):
        (program,) = programs
        return program.function.lower(*program.shapes)


def _build(case: Case) -> keras.Model:
    return build_decoder(DECODERS[case.decoder], case.length, recomputes=case.recomputes)


def _tokens(case: Case, num_rows: int, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((num_rows, case.length), "int32", sharding=sharding)


def _lower_model_parallel(case: Case, devices: Sequence[Any], num_model_shards: int) -> Any:
    """Lowers Keras's own step with the shardings that its ModelParallel gives to variables.

    Variables of a stateless scope have no values, so that a model of any size takes no memory.
    """
    with keras.StatelessScope():
        model = _build(case)
    compiled(model)
    with keras.StatelessScope():
        model.optimizer.build(model.trainable_variables)
    shape = (len(devices) // num_model_shards, num_model_shards)
    mesh = Mesh(np.reshape(np.array(devices), shape), _AXES)
    distribution = _distribution(shape, devices[0].platform)

    def sharded(variable: Any, like: Any = None) -> Any:
        axes = distribution.get_variable_layout(variable if like is None else like).axes
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(variable.shape, variable.dtype, sharding=sharding)

    trained, slots = model.trainable_variables, model.optimizer.variables
    # Adam has a counter, a rate, and two slots for each variable, which are sharded like it.
    owners = [None, None, *(one for one in trained for _ in range(2))]
    state = (
        [sharded(one) for one in trained],
        [sharded(one) for one in model.non_trainable_variables],
        [sharded(one, owner) for one, owner in zip(slots, owners, strict=True)],
        [sharded(one) for one in model.metrics_variables],
    )
    batch = NamedSharding(mesh, PartitionSpec("batch"))
    tokens = _tokens(case, len(devices), batch)
    places = jax.tree.map(lambda one: one.sharding, state)
    step = jax.jit(model.train_step, donate_argnums=0, out_shardings=(None, places))
    return step.lower(state, (tokens, tokens, None))


def _distribution(shape: tuple[int, int], platform: str) -> keras.distribution.ModelParallel:
    """Returns weights sharded by their rows, or in two dimensions as by KerasHub's Llama."""
    names = np.reshape([f"{platform}:{index}" for index in range(math.prod(shape))], shape)
    layouts = keras.distribution.LayoutMap(
        keras.distribution.DeviceMesh(shape, _AXES, devices=names)
    )
    if shape[1] == 1:
        layouts[".*(kernel|embeddings)"] = ("batch", None)
    else:
        layouts[".*(query|key|value|output)/kernel"] = ("model", "batch")
        layouts[".*(gate|inner|logits)/kernel"] = ("batch", "model")
        layouts[".*outer/kernel"] = ("model", "batch")
        layouts["embedding/embeddings"] = ("model", "batch")
    return keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")


def lower_case(case: Case, devices: Sequence[Any]) -> Any:
    """Lowers the step of a case, of one sequence a device."""
    keras.config.set_dtype_policy(case.dtype)
    if case.side == "JAX":
        dtype = "bfloat16" if case.dtype == "mixed_bfloat16" else case.dtype
        return lower_jax_step(
            DECODERS[case.decoder],
            devices,
            dtype=dtype,
            recomputes=case.recomputes,
            length=case.length,
        )
    if case.side.startswith("ModelParallel"):
        return _lower_model_parallel(case, devices, 4 if case.side.endswith("2D") else 1)
    return _lower_ours(case, devices, case.side.removeprefix("shard_state="))


def describe_case(case: Case, devices: Sequence[Any], *, is_quick: bool = True) -> dict[str, Any]:
    """Compiles the step of a case; returns what a device holds and sends.

    A step that the compiler refuses has `used_bytes` only.

    Args:
        case: what to compile.
        devices: for which.
        is_quick: the compiler spends little time.
    """
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    lowered = lower_case(case, devices)
    lowered_s, lowered_cpu_s = time.perf_counter(), time.process_time()
    facts = {
        **dataclasses.asdict(case),
        "num_devices": len(devices),
        "num_parameters": DECODERS[case.decoder].num_parameters,
        "lowering_s": lowered_s - begin_s,
        "lowering_cpu_s": lowered_cpu_s - begin_cpu_s,
    }
    try:
        program = lowered.compile(compiler_options=_QUICK if is_quick else None)
    except jax.errors.JaxRuntimeError as error:
        return facts | {"compile_s": time.perf_counter() - lowered_s} | _refused(str(error))
    memory = program.memory_analysis()
    facts |= {
        "compile_s": time.perf_counter() - lowered_s,
        "compile_cpu_s": time.process_time() - lowered_cpu_s,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
    }
    return facts | _messages(Schedule(program.as_text()).reductions())


def _refused(message: str) -> dict[str, Any]:
    """Reads how much memory the compiler would have used."""
    found = _USED.search(message)
    if found is None:
        raise RuntimeError(message[:2000])
    return {"refusal": message[:2000], "used_bytes": float(found[1]) * _UNITS[found[2]]}


def _messages(messages: Sequence[Any]) -> dict[str, Any]:
    counts = dict.fromkeys(_KINDS, 0.0)
    sizes = dict.fromkeys(_KINDS, 0.0)
    for one in messages:
        counts[one.kind] += one.times
        sizes[one.kind] += one.times * one.num_bytes
    return {
        "messages": counts,
        "message_bytes": sizes,
        "overlapped_share": share_behind(messages),
    }
