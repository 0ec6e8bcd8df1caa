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
from stratagem.execution.programs.step_capture import CapturedStep
from stratagem.execution.programs.step_program import StepProgram
from stratagem.messages import explain
from stratagem.planning.memory import CompilerMemory
from stratagem.planning.programs import device_bytes, step_programs
from stratagem.planning.reductions import Schedule
from stratagem.planning.targets import Target
from stratagem.topology import Topology

__all__ = ["CompiledProgram", "CompiledStep", "compile_step", "missing_compiler"]

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
class CompiledProgram:
    """What a compiler says of one program of a step on one device.

    Args:
        name: what the program does.
        memory: that it takes.
        accessed_bytes: that it reads and writes.
        text: the program.
        is_of_replicas: whether their devices run it, and not the host.
    """

    name: str
    memory: CompilerMemory
    accessed_bytes: float
    text: str
    is_of_replicas: bool = True


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """What a compiler says of a step on one device.

    Args:
        compiler: "tpu", "gpu" or "cpu".
        programs: of the step, in the order in which they run.
        notes: what whoever reads the plan has to know of this.
        is_refused: whether the compiler for the devices refused it because it does not fit; the
            rest is then of the one for CPUs.
    """

    compiler: str
    programs: tuple[CompiledProgram, ...]
    notes: tuple[str, ...] = ()
    is_refused: bool = False

    @property
    def of_replicas(self) -> list[CompiledProgram]:
        """The programs that each device of the machine runs."""
        return [program for program in self.programs if program.is_of_replicas]

    @property
    def of_host(self) -> list[CompiledProgram]:
        """The programs that the host runs for the variables that it keeps."""
        return [program for program in self.programs if not program.is_of_replicas]

    @property
    def from_host_bytes(self) -> int:
        """What each device is given in a step because the host keeps variables."""
        return sum(one.memory.passed_bytes for one in self.of_replicas) if self.of_host else 0

    @property
    def to_host_bytes(self) -> int:
        """What the host gets in a step."""
        return sum(one.memory.passed_bytes for one in self.of_host)

    @property
    def brought_bytes(self) -> int:
        """What each device brings over from pinned memory of the host in a step."""
        return sum(program.memory.brought_bytes for program in self.of_replicas)

    @property
    def put_back_bytes(self) -> int:
        """What each device puts back there."""
        return sum(program.memory.put_back_bytes for program in self.of_replicas)

    @property
    def accessed_bytes(self) -> float:
        """What all programs of a device read and write."""
        return sum(program.accessed_bytes for program in self.of_replicas)


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
    with step_programs(step, _like(step.strategy.topology, devices)) as programs:
        return CompiledStep(compiler, tuple(map(_compiled, programs)))


def _compiled(program: StepProgram) -> CompiledProgram:
    compiled = program.function.lower(*program.shapes).compile()
    costs: Any = compiled.cost_analysis() or {}
    text = compiled.as_text()
    # The compiler for GPUs does not tell.
    accessed_bytes = costs.get("bytes accessed") or Schedule(text).accessed_bytes()
    memory = CompilerMemory.of(compiled.memory_analysis(), **_known_bytes(program))
    return CompiledProgram(
        program.name, memory, float(accessed_bytes), text, program.is_of_replicas
    )


def _known_bytes(program: StepProgram) -> dict[str, int]:
    """What is known of a program's arguments without its compiler."""
    return {
        "lasting_bytes": sum(map(device_bytes, program.lasting)),
        "brought_bytes": sum(map(device_bytes, program.brought)),
        "put_back_bytes": sum(map(device_bytes, program.put_back)),
    }


def _like(planned: Topology, devices: tuple[Any, ...]) -> Topology:
    """The devices in groups like those that the step was traced for, where these have several."""
    if planned.groups is None:
        return Topology(devices)
    known: tuple[Any, ...] = planned.all_devices or ()
    ranks = {id: rank for rank, id in enumerate(sorted(device.id for device in known))}
    groups = tuple(tuple(devices[ranks[device.id]] for device in group) for group in planned.groups)
    return Topology(tuple(group[0] for group in groups), groups)


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
        programs = _ask_another_process(step, Path(folder))
    return CompiledStep("cpu", programs, (note,))


def _ask_another_process(step: CapturedStep, folder: Path) -> tuple[CompiledProgram, ...]:
    """This process has as many CPU devices as it had when JAX started, and too few."""
    topology: Topology = step.strategy.topology
    source, result = folder / "step", folder / "told.json"
    with step_programs(step, topology, is_other=False) as programs:
        of_replicas = [one for one in programs if one.is_of_replicas]
        # What else serialises a program needs a library that nothing else here does.
        exported = [
            dataclasses.replace(
                jax.export.export(one.function, platforms=("cpu",))(*one.shapes), _get_vjp=None
            )
            for one in of_replicas
        ]
        of_host = [_compiled(one) for one in programs if not one.is_of_replicas]
        donated = [one.num_donated for one in of_replicas]
        known = [(one.name, _known_bytes(one)) for one in of_replicas]
    axes = list(topology.mesh.shape.items())
    source.write_bytes(pickle.dumps((axes, list(zip(exported, donated, strict=True)))))
    script = Path(__file__).with_name("cpu_compiler.py")
    ended = subprocess.run(
        [sys.executable, "-P", script, source, result],
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
    found = zip(known, json.loads(result.read_text()), strict=True)
    compiled = [
        CompiledProgram(
            name,
            CompilerMemory(**told["memory"], **known_bytes).without_host(),
            told["accessed_bytes"],
            told["text"],
        )
        for (name, known_bytes), told in found
    ]
    return (*compiled, *of_host)
