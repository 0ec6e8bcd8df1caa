"""The device of the sides on PyTorch, and its memory."""

from __future__ import annotations

import platform
from typing import Any

import torch

__all__ = ["device_kind", "peak_bytes", "prepare_torch"]


def prepare_torch() -> Any:
    """Returns the GPU, or the CPU without one; float32 is multiplied as XLA does by default."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def device_kind(device: Any) -> str:
    """Returns the name of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or "cpu"


def peak_bytes() -> int | None:
    """Returns the largest memory in use so far; None without a GPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
