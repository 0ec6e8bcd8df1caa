"""Compiles a step for devices that are not here, by their own compiler or by that for CPUs."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from stratagem import environment
from stratagem.execution import Program
from stratagem.execution.step_capture import CapturedStep
from stratagem.messages import explain
from stratagem.planning.memory import CompilerMemory
from stratagem.planning.reductions import Schedule
from stratagem.planning.targets import Target
from stratagem.topology import Topology
from stratagem.topology.absent import AbsentTopology

__all__ = ["CompiledStep", "compile_step", "missing_compiler"]

_TIMEOUT_S = 1800
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
_PLUGINS = {
    "tpu": ("libtpu", "pip install libtpu"),
    "gpu": ("jax_plugins.xla_cuda12", "pip install jax-cuda12-pjrt"),
}
# What is the same for all GPUs of these kinds: limits of CUDA, and of one multiprocessor.
_GPU_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_memory_per_core}
  threads_per_core_limit: 2048
  core_count: {core_count}
  fpus_per_core: {fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {memory_bytes_per_s}
  l2_cache_size: {l2_cache_size}
  clock_rate_ghz: {clock_rate_ghz}
  device_memory_size: {memory_bytes}
  shared_memory_per_block_optin: {shared_memory_per_block}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
runtime_version {{ major: 12 minor: 8 }}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
device_description_str: "{device_kind}"
"""


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """What a compiler says of a step on one device.

    Args:
        compiler: "tpu", "gpu" or "cpu".
        memory: that it takes.
        accessed_bytes: that it reads and writes.
        text: the program.
        notes: what whoever reads the plan has to know of this.
        is_refused: whether the compiler for the devices refused it because it does not fit; the
            rest is then of the one for CPUs.
    """

    compiler: str
    memory: CompilerMemory
    accessed_bytes: float
    text: str
    notes: tuple[str, ...] = ()
    is_refused: bool = False


def missing_compiler(platform: str) -> str | None:
    """Returns how to install the compiler for a platform; None if it is there.

    Args:
        platform: "gpu" or "tpu".
    """
    module, install = _PLUGINS[platform]
    try:
        is_there = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # nor is the package that it would be in
        is_there = False
    return None if is_there else install


def compile_step(step: CapturedStep, target: Target) -> CompiledStep:
    """Compiles a step for the devices of a target.

    Args:
        step: the training step, traced for as many replicas.
        target: the devices.

    Returns:
        What the compiler says. Where that for the devices is not installed, or cannot compile the
        step without them, that for CPUs is asked.

    Raises:
        RuntimeError: no compiler can compile it.
    """
    platform = target.accelerator.platform
    install = missing_compiler(platform)
    if install is not None:
        note = (
            f"Compiled for CPU: the compiler for {platform.upper()} is not installed here "
            f"({install}). Temporaries and bytes accessed are those of the CPU's program, which "
            "fuses less; which sums run behind products is not known."
        )
        return _compile_for_cpus(step, target, note)
    try:
        return _compile_for(step, target)
    except jax.errors.JaxRuntimeError as error:
        if _OUT_OF_MEMORY in str(error):
            return _too_large(step, target, str(error))
        reason = str(error).strip().splitlines()[0][:200]
    note = f"Compiled for CPU: the compiler for {platform.upper()} cannot do it here ({reason})."
    return _compile_for_cpus(step, target, note)


def _compile_for(step: CapturedStep, target: Target) -> CompiledStep:
    return _compile_on(step, _devices(target), target.accelerator.platform)


def _compile_on(step: CapturedStep, devices: tuple[Any, ...], compiler: str) -> CompiledStep:
    topology = Topology(devices)
    trace = step.retrace(step.arguments, topology)  # which names the kind of its devices
    compiled = Program(trace, topology, "step").lower(step.arguments).compile()
    costs: Any = compiled.cost_analysis() or {}
    text = compiled.as_text()
    # The compiler for GPUs does not tell.
    accessed_bytes = costs.get("bytes accessed") or Schedule(text).accessed_bytes()
    return CompiledStep(
        compiler, CompilerMemory.of(compiled.memory_analysis()), float(accessed_bytes), text
    )


def _devices(target: Target) -> tuple[Any, ...]:
    kind = target.accelerator
    if kind.platform == "gpu":
        config = _GPU_CONFIG.format(
            **kind.gpu_info,
            memory_bytes=kind.memory_bytes,
            memory_bytes_per_s=int(kind.memory_bytes_per_s),
            shared_memory_per_block=int(kind.gpu_info["shared_memory_per_core"]) - 1024,
            device_kind=kind.device_kind,
        )
        # One slice, whose hosts are joined by the network.
        shape = f"1x{target.num_groups}x{target.devices_per_group}"
        description = topologies.get_topology_desc(
            kind.name, platform="cuda", topology=shape, target_config=config
        )
        return tuple(description.devices)
    environment.set_defaults(
        {
            "TPU_SKIP_MDS_QUERY": "1",  # nobody to ask which TPU this is
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # others may compile at the same time
        }
    )
    shape = "x".join(map(str, target.shape))
    several: dict[str, Any] = {"num_slices": target.num_groups} if target.num_groups > 1 else {}
    description = topologies.get_topology_desc(f"{kind.name}:{shape}", platform="tpu", **several)
    return tuple(description.devices)


def _too_large(step: CapturedStep, target: Target, said: str) -> CompiledStep:
    lines = [line.strip() for line in said.splitlines() if line.strip().startswith("Used")]
    reason = (lines or said.splitlines())[0][:200]
    note = (
        f"The compiler for {target.accelerator.platform.upper()} refuses the step because it does "
        f"not fit ({reason}). The sizes are those of the CPU's program."
    )
    return dataclasses.replace(_compile_for_cpus(step, target, note), is_refused=True)


def _compile_for_cpus(step: CapturedStep, target: Target, note: str) -> CompiledStep:
    here = jax.local_devices(backend="cpu")
    if len(here) >= target.num_devices:
        compiled = _compile_on(step, tuple(here[: target.num_devices]), "cpu")
        return dataclasses.replace(compiled, notes=(note,))
    with tempfile.TemporaryDirectory(prefix="stratagem-plan-") as folder:
        told = _ask_another_process(step, target, Path(folder))
    text, accessed_bytes = told.pop("text"), told.pop("accessed_bytes")
    return CompiledStep("cpu", CompilerMemory(**told), accessed_bytes, text, (note,))


def _ask_another_process(step: CapturedStep, target: Target, folder: Path) -> dict[str, Any]:
    """This process has as many CPU devices as it had when JAX started, and too few."""
    topology = AbsentTopology(target.topology.devices)
    function, shapes = Program(step.trace, topology, "step").with_shapes(step.arguments)
    exported = jax.export.export(function, platforms=("cpu",))(*shapes)
    source, result = folder / "step", folder / "told.json"
    # What else serialises it needs a library that nothing else here does.
    source.write_bytes(pickle.dumps(dataclasses.replace(exported, _get_vjp=None)))
    script = Path(__file__).with_name("cpu_compiler.py")
    ended = subprocess.run(
        [sys.executable, "-P", script, source, result, str(target.num_devices), "1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
        env=environment.snapshot() | {"JAX_PLATFORMS": "cpu"},
    )
    if ended.returncode:
        last = " ".join(ended.stderr.strip().splitlines()[-3:])
        raise RuntimeError(
            explain(
                f"The compiler for CPUs ended with exit code {ended.returncode}: {last[:500]}",
                expected="a step that it can compile for so many devices.",
                fix="see what it says; a smaller target may do.",
            )
        )
    return json.loads(result.read_text())
