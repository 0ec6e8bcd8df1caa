"""The sides of each workload on one GPU, in the order in which they are measured, and the goals."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks.sides import Side, worker_side

_OURS, _KERAS, _JAX, _TORCH = "stratagem_fit", "keras_fit", "jax_by_hand", "torch_gpu"
_LLAMAS = ("llama1b", "llama3b", "llama8b_lora")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuSide:
    """A side of a workload."""

    workload: str  # heading in the report; one of `GPU_WORKLOADS`
    side: Side  # its program; `name` is the name in tables
    priority: int  # 1 is measured first; PyTorch's compiler takes the longest
    estimate_s: float  # whole duration with JAX's programs in the cache, and 3 rounds of 2 s
    device_gb: float  # memory of the device

    @property
    def key(self) -> str:
        """Name for files and options of the command line."""
        words = f"{self.workload} {self.side.name}".replace(",", " ").replace(".", " ").split()
        return "-".join(words).lower().replace("gpu_", "").replace("_", "-")

    @property
    def is_ours(self) -> bool:
        return self.side.module.endswith(_OURS)

    @property
    def prepared_gb(self) -> float:
        """Memory of the device while the side waits for its turn to train."""
        return 20.0 if self.workload in _LLAMAS else self.device_gb


def _side(
    heading: str,
    name: str,
    module: str,
    priority: int = 1,
    estimate_s: float = 16,
    device_gb: float = 8,
    **options: Any,
) -> GpuSide:
    return GpuSide(
        workload=heading,
        side=worker_side(
            name, module, variables={"KERAS_BACKEND": "jax"}, **{"workload": heading, **options}
        ),
        priority=priority,
        estimate_s=estimate_s,
        device_gb=device_gb,
    )


_SCAN = {"kind": "scan"}
_DEVICE = {"data_on_device": True}
_COMPILED = {"compiled": True}
_CHUNKS = {"has_chunks": True}
_PINNED = {"optimizer_memory": "pinned_host"}
_8K = {"workload": "llama1b_8k"}
_BY_4 = {"accumulation": 4}
_MASK = {"attention": "mask"}


def _calls(steps: int) -> dict[str, int]:
    return {"steps_per_call": steps}


_JAX_4 = {**_SCAN, **_DEVICE, **_calls(4)}

_ALL = (
    _side("gpu_mlp", "fit, 100 a call", _OURS, 1, 13, 2, **_calls(100)),
    _side("gpu_mlp", "fit, 1 a call", _OURS, 1, 13, 2),
    _side("gpu_mlp", "Keras fit, 1 a call", _KERAS, 1, 15, 2),
    _side("gpu_mlp", "JAX scan by hand, 100 a call", _JAX, 1, 11, 2, **_SCAN, **_calls(100)),
    _side("gpu_mlp", "JAX loop by hand", _JAX, 2, 11, 2, **_SCAN),
    _side("gpu_mlp", "fit, data on device", _OURS, 2, 13, 2, **_DEVICE, **_calls(100)),
    _side("gpu_mlp", "JAX scan, data on device", _JAX, 2, 11, 2, **_SCAN, **_DEVICE, **_calls(100)),
    _side("gpu_mlp", "torch.compile", _TORCH, 2, 40, 2, **_COMPILED),
    _side("resnet50", "fit, data on device", _OURS, 1, 24, 20, **_DEVICE, **_calls(8)),
    _side("resnet50", "fit, data on host", _OURS, 1, 24, 20, **_calls(8)),
    _side("resnet50", "JAX scan, data on device", _JAX, 1, 22, 20, **_SCAN, **_DEVICE, **_calls(8)),
    _side("resnet50", "torch.compile, data on device", _TORCH, 2, 120, 20, **_COMPILED, **_DEVICE),
    _side("resnet50", "Keras fit, data on host", _KERAS, 1, 24, 20),
    _side("resnet50", "PyTorch eager, data on device", _TORCH, 2, 17, 20, **_DEVICE),
    _side("resnet50", "torch.compile, data on host", _TORCH, 3, 120, 20, **_COMPILED),
    _side("resnet50", "JAX scan, data on host", _JAX, 3, 22, 20, **_SCAN, **_calls(8)),
    _side("gpt", "fit, 4 a call", _OURS, 1, 24, 21, **_calls(4)),
    _side("gpt", "JAX scan by hand, 4 a call", _JAX, 1, 24, 21, **_JAX_4),
    _side("gpt", "torch.compile", _TORCH, 2, 110, 21, **_COMPILED, **_DEVICE),
    _side("gpt", "Keras fit, 1 a call", _KERAS, 1, 24, 21),
    _side("llama1b", "fit, 4 a call", _OURS, 1, 75, 95, **_calls(4)),
    _side("llama1b", "JAX by hand, 4 a call", _JAX, 1, 75, 95, **_JAX_4),
    _side("llama1b", "torch.compile", _TORCH, 1, 90, 90, **_COMPILED, **_DEVICE),
    _side("llama1b", "fit, chunked loss", _OURS, 1, 75, 80, **_CHUNKS, **_calls(4)),
    _side("llama1b", "Keras fit, 1 a call", _KERAS, 1, 75, 100, **_MASK),
    _side("llama1b", "fit, 4 an update", _OURS, 2, 75, 105, **_BY_4, **_calls(4)),
    _side("llama1b", "JAX, 4 an update", _JAX, 2, 75, 105, **_BY_4, **_JAX_4),
    _side("llama1b", "torch.compile, 4 an update", _TORCH, 2, 90, 95, **_COMPILED, **_BY_4),
    _side("llama1b", "Keras fit, 4 an update", _KERAS, 2, 75, 115, **_MASK, **_BY_4),
    _side("llama1b", "fit, remat dots", _OURS, 2, 75, 70, remat="dots", **_calls(4)),
    _side("llama1b", "fit, mask", _OURS, 2, 75, 100, **_MASK, **_calls(4)),
    _side("llama1b", "fit, pinned optimizer state", _OURS, 2, 75, 90, **_PINNED),
    _side("llama1b", "fit, 8192 tokens", _OURS, 2, 80, 80, **_8K, **_CHUNKS, **_calls(4)),
    _side("llama1b", "Keras fit, 8192 tokens", _KERAS, 3, 80, 100, **_8K),
    _side("llama1b", "fit, remat", _OURS, 3, 75, 40, remat="full", **_CHUNKS),
    _side("llama8b_lora", "fit, chunked loss", _OURS, 2, 110, 90, **_CHUNKS),
    _side("llama8b_lora", "peft, torch.compile", _TORCH, 2, 110, 95, **_COMPILED, **_DEVICE),
    _side("llama3b", "fit, chunked loss", _OURS, 2, 110, 100, **_CHUNKS),
    _side("llama3b", "torch.compile", _TORCH, 2, 110, 105, **_COMPILED, **_DEVICE),
)
SIDES: tuple[GpuSide, ...] = tuple(sorted(_ALL, key=lambda one: one.priority))

# Least ratios of the speed of one side to another's.
WANTED = {
    ("mlp-fit-100-a-call", "mlp-keras-fit-1-a-call"): 8.0,
    ("mlp-fit-100-a-call", "mlp-jax-scan-by-hand-100-a-call"): 0.99,
    ("mlp-fit-data-on-device", "mlp-jax-scan-data-on-device"): 0.99,
    ("resnet50-fit-data-on-device", "resnet50-jax-scan-data-on-device"): 0.99,
    ("resnet50-fit-data-on-device", "resnet50-torch-compile-data-on-device"): 1.0,
    ("resnet50-fit-data-on-host", "resnet50-fit-data-on-device"): 0.97,
    ("gpt-fit-4-a-call", "gpt-jax-scan-by-hand-4-a-call"): 0.99,
    ("llama1b-fit-4-a-call", "llama1b-torch-compile"): 1.0,
    ("llama1b-fit-4-a-call", "llama1b-jax-by-hand-4-a-call"): 0.99,
    ("llama1b-fit-4-a-call", "llama1b-keras-fit-1-a-call"): 1.3,
    ("llama1b-fit-chunked-loss", "llama1b-torch-compile"): 1.0,
    ("llama1b-fit-8192-tokens", "llama1b-keras-fit-8192-tokens"): 1.0,
    ("llama1b-fit-4-an-update", "llama1b-torch-compile-4-an-update"): 1.0,
    ("llama1b-fit-4-an-update", "llama1b-jax-4-an-update"): 0.99,
    ("llama1b-fit-4-an-update", "llama1b-keras-fit-4-an-update"): 1.3,
    ("llama3b-fit-chunked-loss", "llama3b-torch-compile"): 1.0,
    ("llama8b-lora-fit-chunked-loss", "llama8b-lora-peft-torch-compile"): 1.0,
}


def select(names: Sequence[str]) -> list[GpuSide]:
    """Returns the sides of workloads, or those whose key begins with a name; all for no names."""
    for name in names:
        if not any(one.key.startswith(name) for one in SIDES):
            keys = ", ".join(one.key for one in SIDES)
            raise ValueError(f"No side is called {name!r}. There are: {keys}.")
    return [one for one in SIDES if not names or one.key.startswith(tuple(names))]
