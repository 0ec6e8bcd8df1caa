"""Ahead-of-time compilation of a step for devices that are not attached, or for CPU instead."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import jax
from jax.experimental import topologies

from stratagem import environment
from stratagem.devices.mesh import Topology
from stratagem.devices.private import more_cpu_devices
from stratagem.execution.programs.steps import StepProgram
from stratagem.execution.tracing.functionalize import CapturedStep
from stratagem.planning.memory import CompilerMemory, device_bytes, step_programs
from stratagem.planning.schedule import Schedule
from stratagem.planning.targets import Target

_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
# Modules of which one is enough, and what installs it.
_PLUGINS = {
    "tpu": (("libtpu",), "pip install libtpu"),
    "gpu": (("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"), "pip install jax-cuda12-pjrt"),
}
# Constants shared by all listed GPUs: limits of CUDA, and of one multiprocessor.
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
class CompiledProgram:
    """One compiled program of a step, on one device or, unless `is_of_replicas`, on the host."""

    name: str
    memory: CompilerMemory
    accessed_bytes: float
    text: str
    is_of_replicas: bool = True


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """All compiled programs of a step, in execution order.

    `is_refused` means that the compiler for the devices ran out of memory; the programs are then
    for CPU.
    """

    compiler: str
    programs: tuple[CompiledProgram, ...]
    notes: tuple[str, ...] = ()
    is_refused: bool = False

    @property
    def device_programs(self) -> list[CompiledProgram]:
        """Programs that every device of the machine runs."""
        return [program for program in self.programs if program.is_of_replicas]

    @property
    def host_programs(self) -> list[CompiledProgram]:
        """Programs that the host runs for variables in host memory."""
        return [program for program in self.programs if not program.is_of_replicas]

    @property
    def from_host_bytes(self) -> int:
        """Bytes that each device receives per step for variables in host memory."""
        return (
            sum(one.memory.passed_bytes for one in self.device_programs)
            if self.host_programs
            else 0
        )

    @property
    def to_host_bytes(self) -> int:
        """Bytes that the host receives per step."""
        return sum(one.memory.passed_bytes for one in self.host_programs)

    @property
    def brought_bytes(self) -> int:
        """Bytes that each device copies from pinned host memory per step."""
        return sum(program.memory.brought_bytes for program in self.device_programs)

    @property
    def put_back_bytes(self) -> int:
        """Bytes that each device copies back to pinned host memory per step."""
        return sum(program.memory.put_back_bytes for program in self.device_programs)

    @property
    def accessed_bytes(self) -> float:
        """Bytes that all programs of one device read and write."""
        return sum(program.accessed_bytes for program in self.device_programs)


def missing_compiler(platform: str) -> str | None:
    """Returns the command that installs the compiler for "gpu" or "tpu", or None if installed."""
    modules, install = _PLUGINS[platform]
    return None if any(map(_is_installed, modules)) else install


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing, too
        return False


def compile_step(step: CapturedStep, target: Target) -> CompiledStep:
    """Compiles a step for the devices of a target; raises RuntimeError if no compiler can.

    Falls back to the CPU compiler, with a note, if the devices' compiler is not installed or
    cannot compile the step without them.
    """
    platform = target.accelerator.platform
    install = missing_compiler(platform)
    if install is not None:
        note = (
            f"Compiled for CPU: the compiler for {platform.upper()} is not installed ({install}). "
            "Temporaries and bytes accessed are those of the CPU program, which fuses less; "
            "the overlap of communication is unknown."
        )
        return _compile_for_cpu(step, target, note)
    try:
        return _compile_on(step, devices_of(target), target.accelerator.platform)
    except jax.errors.JaxRuntimeError as error:
        if _OUT_OF_MEMORY in str(error):
            lines = [line.strip() for line in str(error).splitlines()]
            reason = next((one for one in lines if one.startswith("Used")), lines[0])[:200]
            note = (
                f"The compiler for {platform.upper()} rejects the step because it does not fit "
                f"({reason}). The sizes are those of the CPU program."
            )
            compiled = _compile_for_cpu(step, target, note)
            return dataclasses.replace(compiled, is_refused=True)
        reason = str(error).strip().splitlines()[0][:200]
    note = f"Compiled for CPU: the compiler for {platform.upper()} failed ({reason})."
    return _compile_for_cpu(step, target, note)


def _compile_on(step: CapturedStep, devices: tuple[Any, ...], compiler: str) -> CompiledStep:
    with step_programs(step, _group_like(step.strategy.topology, devices)) as programs:
        return CompiledStep(compiler, tuple(map(_compile_program, programs)))


def _compile_program(program: StepProgram) -> CompiledProgram:
    compiled = program.function.lower(*program.shapes).compile()
    costs: Any = compiled.cost_analysis() or {}
    text = compiled.as_text()
    # The GPU compiler does not report it.
    accessed_bytes = costs.get("bytes accessed") or Schedule(text).accessed_bytes()
    memory = CompilerMemory.of(
        compiled.memory_analysis(),
        lasting_bytes=sum(map(device_bytes, program.lasting)),
        brought_bytes=sum(map(device_bytes, program.brought)),
        put_back_bytes=sum(map(device_bytes, program.put_back)),
    )
    return CompiledProgram(
        program.name, memory, float(accessed_bytes), text, program.is_of_replicas
    )


def _group_like(planned: Topology, devices: tuple[Any, ...]) -> Topology:
    """Groups the devices like the topology that the step was traced for."""
    if planned.groups is None:
        return Topology(devices, shard_size=planned.shard_size)
    known: tuple[Any, ...] = planned.all_devices or ()
    ranks = {id: rank for rank, id in enumerate(sorted(device.id for device in known))}
    groups = tuple(tuple(devices[ranks[device.id]] for device in group) for group in planned.groups)
    first = tuple(group[0] for group in groups)
    return Topology(first, groups, shard_size=planned.shard_size)


def attached_devices(target: Target) -> tuple[jax.Device, ...]:
    """Returns the target's devices if this process has as many of their kind, else none.

    A compiler that has the device measures which kernels are fastest, as before a real step.
    """
    kind = target.accelerator.device_kind
    attached = [device for device in jax.local_devices() if device.device_kind == kind]
    is_enough = target.num_groups == 1 and len(attached) >= target.num_devices
    return tuple(attached[: target.num_devices]) if is_enough else ()


def devices_of(target: Target) -> tuple[Any, ...]:
    """Returns the target's devices: attached ones, or descriptions for its compiler."""
    kind = target.accelerator
    if attached := attached_devices(target):
        return attached
    if kind.platform == "gpu":
        config = _GPU_CONFIG.format(
            **kind.gpu_info,
            memory_bytes=kind.memory_bytes,
            memory_bytes_per_s=int(kind.memory_bytes_per_s),
            shared_memory_per_block=int(kind.gpu_info["shared_memory_per_core"]) - 1024,
            device_kind=kind.device_kind,
        )
        # One slice; the network connects its hosts.
        shape = f"1x{target.num_groups}x{target.devices_per_group}"
        description = topologies.get_topology_desc(
            kind.name, platform="cuda", topology=shape, target_config=config
        )
        return tuple(description.devices)
    environment.set_defaults(
        {
            "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # other processes may compile at the same time
        }
    )
    shape = "x".join(map(str, target.shape))
    several: dict[str, Any] = {"num_slices": target.num_groups} if target.num_groups > 1 else {}
    description = topologies.get_topology_desc(f"{kind.name}:{shape}", platform="tpu", **several)
    return tuple(description.devices)


def _compile_for_cpu(step: CapturedStep, target: Target, note: str) -> CompiledStep:
    devices = tuple(jax.local_devices(backend="cpu"))
    if len(devices) < target.num_devices:  # JAX fixes their number when it starts
        devices = more_cpu_devices(target.num_devices)
    compiled = _compile_on(step, devices[: target.num_devices], "cpu")
    return dataclasses.replace(compiled, notes=(note,))
