"""The sides of each workload, in the order in which they are measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.models import MODELS

__all__ = ["SIDES", "WORKLOAD_NAMES", "GpuSide", "cold_sides", "select"]

_OURS, _KERAS, _JAX, _TORCH = "stratagem_side", "keras_side", "jax_side", "torch_side"
_LLAMAS = ("llama1b", "llama3b", "llama8b-lora")
_OUR_LLAMA, _TORCH_LLAMA = "stratagem_llama", "torch_llama"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuSide:
    """A side of a workload: a process.

    Args:
        workload: heading in the report.
        name: in tables.
        program: module in `benchmarks.gpu.workers`, or another's whole name.
        priority: 1 is measured first; PyTorch's compiler takes the longest.
        estimate_s: whole duration with JAX's programs in the cache, and 3 rounds of 2 s.
        device_gb: memory of the device, for sides that run at the same time.
        prepared_gb: of it while the side waits for its turn to train; None for as much.
        options: of `SideOptions`.
        variables: of the environment.
        is_cold: True for an empty cache of compiled programs, and the first step only.
    """

    workload: str
    name: str
    program: str
    priority: int
    estimate_s: float
    device_gb: float
    options: dict[str, Any]
    variables: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    is_cold: bool = False
    prepared_gb: float | None = None

    @property
    def key(self) -> str:
        """Name for files and options of the command line."""
        words = f"{self.workload} {self.name}".replace(",", " ").replace(".", " ").split()
        return "-".join(words).lower()

    @property
    def is_ours(self) -> bool:
        """True for this project's sides."""
        return self.program.startswith("stratagem")


def _side(
    workload: str,
    name: str,
    program: str,
    priority: int = 1,
    estimate_s: float = 16,
    device_gb: float = 8,
    **options: Any,
) -> GpuSide:
    backend = options.pop("backend", "jax")
    variables = {"KERAS_BACKEND": backend}
    if workload in MODELS:
        options = {"model": workload, **options}
    return GpuSide(
        workload=workload,
        name=name,
        program=program,
        priority=priority,
        estimate_s=estimate_s,
        device_gb=device_gb,
        options=options,
        variables=variables,
        prepared_gb=20 if workload in _LLAMAS else None,
    )


_COMPILED = {"compiled": "default"}
_DEVICE = {"data": "device"}
_CHUNKS = {"loss": "chunks"}
_PINNED = {"optimizer_memory": "pinned_host"}
_8K = {"model": "llama1b-8k"}
_BY_4 = {"accumulation": 4}
_MASK = {"attention": "mask"}

_ALL = (
    _side("mlp", "fit, 100 a call", _OURS, 1, 13, 2, steps_per_call=100),
    _side("mlp", "fit, 1 a call", _OURS, 1, 13, 2),
    _side("mlp", "Keras fit, 1 a call", _KERAS, 1, 15, 2),
    _side("mlp", "Keras fit, 100 a call", _KERAS, 2, 15, 2, steps_per_call=100),
    _side("mlp", "JAX scan by hand, 100 a call", _JAX, 1, 11, 2, steps_per_call=100),
    _side("mlp", "JAX loop by hand", _JAX, 2, 11, 2),
    _side("mlp", "fit, data on device, 100 a call", _OURS, 2, 13, 2, steps_per_call=100, **_DEVICE),
    _side("mlp", "JAX scan, data on device", _JAX, 2, 11, 2, steps_per_call=100, **_DEVICE),
    _side("mlp", "PyTorch eager", _TORCH, 2, 14, 2),
    _side("mlp", "torch.compile", _TORCH, 2, 40, 2, **_COMPILED),
    _side("mlp", "torch.compile, reduce-overhead", _TORCH, 3, 40, 2, compiled="reduce-overhead"),
    _side("mlp", "Keras fit on PyTorch", _KERAS, 3, 18, 2, backend="torch"),
    _side("resnet50", "fit, data on device", _OURS, 1, 24, 20, steps_per_call=8, **_DEVICE),
    _side("resnet50", "fit, data on host", _OURS, 1, 24, 20, steps_per_call=8),
    _side("resnet50", "JAX scan, data on device", _JAX, 1, 22, 20, steps_per_call=8, **_DEVICE),
    _side("resnet50", "torch.compile, data on device", _TORCH, 2, 120, 20, **_COMPILED, **_DEVICE),
    _side("resnet50", "Keras fit, data on host", _KERAS, 1, 24, 20),
    _side("resnet50", "PyTorch eager, data on device", _TORCH, 2, 17, 20, **_DEVICE),
    _side("resnet50", "torch.compile, data on host", _TORCH, 3, 120, 20, **_COMPILED),
    _side("resnet50", "fit, 1 a call, data on device", _OURS, 3, 24, 20, **_DEVICE),
    _side("resnet50", "JAX scan, data on host", _JAX, 3, 22, 20, steps_per_call=8),
    _side("gpt", "fit, 4 a call", _OURS, 1, 24, 21, steps_per_call=4),
    _side("gpt", "JAX scan by hand, 4 a call", _JAX, 1, 24, 21, steps_per_call=4, **_DEVICE),
    _side("gpt", "torch.compile", _TORCH, 2, 110, 21, **_COMPILED, **_DEVICE),
    _side("gpt", "Keras fit, 1 a call", _KERAS, 1, 24, 21),
    _side("gpt", "PyTorch eager", _TORCH, 2, 18, 21, **_DEVICE),
    _side("gpt", "fit, 1 a call", _OURS, 3, 24, 21),
    _side("bert", "fit, 10 a call", _OURS, 1, 20, 9, steps_per_call=10),
    _side("bert", "JAX scan by hand, 10 a call", _JAX, 1, 20, 9, steps_per_call=10, **_DEVICE),
    _side("bert", "torch.compile", _TORCH, 2, 55, 9, **_COMPILED, **_DEVICE),
    _side("bert", "Keras fit, 1 a call", _KERAS, 1, 20, 9),
    _side("bert", "PyTorch eager", _TORCH, 2, 16, 9, **_DEVICE),
    _side("bert", "fit, 1 a call", _OURS, 3, 20, 9),
    _side("dlrm", "fit, tables on device", _OURS, 2, 18, 30, steps_per_call=10),
    _side("dlrm", "fit, tables in host memory", _OURS, 2, 24, 4, table="central"),
    _side("dlrm", "fit, tables in pinned host memory", _OURS, 2, 30, 30, table="pinned_host"),
    _side("dlrm", "PyTorch, tables on device", _TORCH, 2, 16, 16, **_DEVICE),
    _side("dlrm", "PyTorch, tables in host memory", _TORCH, 2, 20, 4, table="host", **_DEVICE),
    _side("dlrm", "Keras fit, tables on device", _KERAS, 3, 20, 35),
    _side("llama1b", "fit, 4 a call", _OUR_LLAMA, 1, 75, 95, steps_per_call=4),
    _side("llama1b", "JAX by hand, 4 a call", "jax_llama", 1, 75, 95, steps_per_call=4),
    _side("llama1b", "torch.compile", _TORCH_LLAMA, 1, 90, 90, **_COMPILED),
    _side("llama1b", "fit, chunked loss", _OUR_LLAMA, 1, 75, 80, steps_per_call=4, **_CHUNKS),
    _side("llama1b", "Keras fit, 1 a call", "keras_llama_side", 1, 75, 100, **_MASK),
    _side("llama1b", "fit, 4 an update", _OUR_LLAMA, 2, 75, 105, steps_per_call=4, **_BY_4),
    _side("llama1b", "JAX, 4 an update", "jax_llama", 2, 75, 105, steps_per_call=4, **_BY_4),
    _side("llama1b", "torch.compile, 4 an update", _TORCH_LLAMA, 2, 90, 95, **_COMPILED, **_BY_4),
    _side("llama1b", "Keras fit, 4 an update", "keras_llama_side", 2, 75, 115, **_MASK, **_BY_4),
    _side("llama1b", "Trainer", "trainer_llama", 2, 45, 100),
    _side("llama1b", "PyTorch eager", _TORCH_LLAMA, 2, 40, 100),
    _side("llama1b", "fit, remat dots", _OUR_LLAMA, 2, 75, 70, steps_per_call=4, remat="dots"),
    _side("llama1b", "fit, mask", _OUR_LLAMA, 2, 75, 100, steps_per_call=4, **_MASK),
    _side("llama1b", "fit, pinned optimizer state", _OUR_LLAMA, 2, 75, 90, **_PINNED),
    _side("llama1b", "fit, 8192 tokens", _OUR_LLAMA, 2, 80, 80, steps_per_call=4, **_8K, **_CHUNKS),
    _side("llama1b", "Keras fit, 8192 tokens", "keras_llama_side", 3, 80, 100, **_8K),
    _side("llama1b", "fit, remat", _OUR_LLAMA, 3, 75, 40, remat="full", **_CHUNKS),
    _side("llama1b", "fit, 1 a call", _OUR_LLAMA, 3, 75, 95),
    _side("llama1b", "Keras fit, causal kernel", "keras_llama_side", 3, 75, 95),
    _side("llama1b", "Trainer, compiled", "trainer_llama", 3, 90, 90, **_COMPILED),
    _side("llama1b", "Trainer, 4 an update", "trainer_llama", 3, 45, 105, **_BY_4),
    _side("llama8b-lora", "fit, chunked loss", _OUR_LLAMA, 2, 110, 90, **_CHUNKS),
    _side("llama8b-lora", "peft, torch.compile", _TORCH_LLAMA, 2, 110, 95, **_COMPILED),
    _side("llama8b-lora", "peft, eager", _TORCH_LLAMA, 3, 45, 105),
    _side("llama3b", "fit, chunked loss", _OUR_LLAMA, 2, 110, 100, **_CHUNKS),
    _side("llama3b", "torch.compile", _TORCH_LLAMA, 2, 110, 105, **_COMPILED),
    _side("checkpoint", "asynchronous save", "stratagem_checkpoint", 1, 45, 25),
    _side("checkpoint", "torch.distributed async_save", "torch_checkpoint", 2, 60, 12),
)
SIDES: tuple[GpuSide, ...] = tuple(sorted(_ALL, key=lambda side: side.priority))
WORKLOAD_NAMES = ("mlp", "resnet50", "bert", "gpt", "dlrm", *_LLAMAS, "checkpoint")

_COLD_KEYS = (
    "resnet50-fit-data-on-device",
    "resnet50-jax-scan-data-on-device",
    "resnet50-torch-compile-data-on-device",
    "resnet50-keras-fit-data-on-host",
    "gpt-fit-4-a-call",
    "gpt-jax-scan-by-hand-4-a-call",
    "gpt-torch-compile",
    "gpt-keras-fit-1-a-call",
)


def cold_sides() -> list[GpuSide]:
    """Returns the sides whose first step is taken with an empty cache."""
    by_key = {side.key: side for side in SIDES}
    cold = [dataclasses.replace(by_key[key], is_cold=True, estimate_s=60.0) for key in _COLD_KEYS]
    return sorted(cold, key=lambda side: side.priority)


def select(names: Sequence[str]) -> list[GpuSide]:
    """Returns the sides of workloads, or those whose key begins with a name; all for no names.

    "cold" stands for the first steps with an empty cache, which only this name selects.

    Raises:
        ValueError: no side has such a name.
    """
    if not names:
        return list(SIDES)
    chosen: list[GpuSide] = []
    for name in names:
        if name == "cold":
            chosen += cold_sides()
            continue
        found = [side for side in SIDES if side.workload == name or side.key.startswith(name)]
        if not found:
            keys = ", ".join([*WORKLOAD_NAMES, "cold", *(side.key for side in SIDES)])
            raise ValueError(f"No side is called {name!r}. There are: {keys}.")
        chosen += found
    unique = {(side.key, side.is_cold): side for side in chosen}
    return sorted(unique.values(), key=lambda side: side.priority)
