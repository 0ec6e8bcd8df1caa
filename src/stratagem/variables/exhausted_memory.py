"""Errors of devices that run out of memory: the largest variables, and the options that help."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras

from stratagem.errors import ResourceExhaustedError, explain

# A later program that reads a result of the failed one fails with another code and the same words.
_EXHAUSTED = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory")
# A small program runs within the call that starts it on CPU, and raises ValueErrors.
_ERRORS = (jax.errors.JaxRuntimeError, ValueError)
_PINNED = "pinned_host"
_NUM_LISTED = 5
_UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_ASKED = re.compile(
    r"(?:allocate|allocating)\s+([\d.]+)\s*(Ki|Mi|Gi|Ti|)B?(?:ytes?)?\b", re.IGNORECASE
)
# Activations are most of the memory if variables and slots take less than this share.
_STATE_SHARE = 0.5


def explain_exhausted_memory(error: BaseException, variables: Callable[[], Sequence[Any]]) -> None:
    """Raises an explanation of JAX's error of a device without free memory; ignores others.

    Args:
        error: of work of a strategy.
        variables: returns the strategy's variables.
    """
    if isinstance(error, _ERRORS) and any(words in str(error) for words in _EXHAUSTED):
        raise _explained(str(error), variables()) from error


@dataclasses.dataclass(frozen=True)
class _DeviceShare:
    """A variable's share of the memory of one device."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int  # in the device's memory
    is_slot: bool
    is_lost: bool

    def __str__(self) -> str:
        slot = ", optimizer slot" if self.is_slot else ""
        return f"{self.path} {self.shape} {self.dtype}, {self.num_bytes:,} bytes{slot}"

    @classmethod
    def of(cls, variable: Any, value: jax.Array, device: Any) -> _DeviceShare:
        sharding = value.sharding
        is_here = device in sharding.device_set and sharding.memory_kind in (
            None,
            device.default_memory().kind,
        )
        size = math.prod(sharding.shard_shape(value.shape)) * value.dtype.itemsize
        return cls(
            path=variable.path,
            shape=tuple(variable.shape),
            dtype=str(variable.dtype),
            num_bytes=size if is_here else 0,
            is_slot=getattr(variable, "slot_of", None) is not None,
            is_lost=_is_lost(value),
        )


def _is_lost(value: jax.Array) -> bool:
    """Returns True for a donated value, or a result of the program that failed."""
    if value.is_deleted():
        return True
    try:
        value.block_until_ready()
    except _ERRORS:
        return True
    return False


def _explained(message: str, variables: Sequence[Any]) -> ResourceExhaustedError:
    pairs = [(variable, getattr(variable, "stored", None)) for variable in variables]
    on_devices = [(one, value) for one, value in pairs if isinstance(value, jax.Array)]
    strategy = next((one.distribute_strategy for one, _ in on_devices), None)
    device = _device(strategy, on_devices)
    entries = [_DeviceShare.of(variable, value, device) for variable, value in on_devices]
    if "host memory" in message:
        return _host_error(message, entries)
    asked = _asked_bytes(message)
    stats = _memory_stats(device)
    return ResourceExhaustedError(
        explain(
            _received(device, asked, stats, entries),
            expected="memory for the variables, their slots and what a step computes.",
            fix=f"{'; '.join(_options(strategy, asked, stats, entries))}.",
            code="SG107",
        )
    )


def _device(strategy: Any, on_devices: Sequence[tuple[Any, jax.Array]]) -> jax.Device:
    """Returns a device of the strategy, which computes; else one of a variable; else JAX's."""
    own = getattr(getattr(strategy, "topology", None), "local_devices", None)
    if own:
        return own[0]
    if on_devices:
        return min(on_devices[0][1].sharding.addressable_devices, key=lambda device: device.id)
    return jax.local_devices()[0]


def _memory_stats(device: jax.Device) -> dict[str, int]:
    """Returns the allocator's numbers; none on CPU."""
    return device.memory_stats() or {}


def _asked_bytes(message: str) -> int | None:
    found = _ASKED.search(message)
    if found is None:
        return None
    unit = found[2].capitalize()
    return round(float(found[1].rstrip(".")) * _UNITS[unit])


def _received(
    device: jax.Device, asked: int | None, stats: dict[str, int], entries: Sequence[_DeviceShare]
) -> str:
    request = "an allocation failed" if asked is None else f"{asked:,} bytes were requested"
    limit, used = stats.get("bytes_limit"), stats.get("bytes_in_use")
    lines = [f"{device} ({device.device_kind}) is out of memory: {request}."]
    if limit is not None:
        free = stats.get("largest_free_block_bytes")
        largest = f", and the largest free block {free:,}" if free else ""
        lines.append(f"JAX may use {limit:,} bytes of it; {used or 0:,} are in use{largest}.")
    slots = sum(entry.num_bytes for entry in entries if entry.is_slot)
    others = sum(entry.num_bytes for entry in entries if not entry.is_slot)
    rest = "" if used is None else f", all else {max(used - slots - others, 0):,}"
    lines.append(f"Variables take {others:,} bytes, optimizer slots {slots:,}{rest}.")
    largest_first = sorted(entries, key=lambda entry: -entry.num_bytes)[:_NUM_LISTED]
    if largest_first:
        lines.append("The largest:")
        lines += [f"  {entry}" for entry in largest_first]
    return "\n".join([*lines, _state_afterwards(entries)])


def _state_afterwards(entries: Sequence[_DeviceShare]) -> str:
    lost = [entry.path for entry in entries if entry.is_lost]
    if not lost:
        return "All variables still have their values; a smaller step can follow."
    return (
        f"{len(lost)} of {len(entries)} variables lost their values with the failed step, such as "
        f"{lost[0]}: restore a checkpoint, or create the model again."
    )


def _options(
    strategy: Any, asked: int | None, stats: dict[str, int], entries: Sequence[_DeviceShare]
) -> list[str]:
    """Returns the options that apply, those for the larger part of the memory first."""
    limit, used = stats.get("bytes_limit"), stats.get("bytes_in_use", 0)
    total = sum(entry.num_bytes for entry in entries)
    slots = sum(entry.num_bytes for entry in entries if entry.is_slot)
    options: list[str] = []
    if limit is not None and asked is not None and used + asked <= limit:
        options.append(
            "end other processes that hold memory of the device (nvidia-smi lists them), or set "
            "XLA_PYTHON_CLIENT_MEM_FRACTION for each of them, or "
            "XLA_PYTHON_CLIENT_PREALLOCATE=false"
        )
    of_steps = _options_of_steps(has_slots=slots > 0)
    of_state = _options_of_state(strategy, entries, has_slots=slots > 0)
    full = total if limit is None else limit
    is_state = limit is not None and total >= _STATE_SHARE * full
    return [*options, *([*of_state, *of_steps] if is_state else [*of_steps, *of_state])]


def _options_of_steps(*, has_slots: bool) -> list[str]:
    options = ["use a smaller global batch"]
    if has_slots:
        options.append(
            "accumulate gradients (gradient_accumulation_steps of the optimizer) over smaller ones"
        )
        options.append(
            "recompute activations: sg.remat(model), or create it in `with keras.RematScope():`"
        )
    policy = keras.config.dtype_policy()
    if policy.compute_dtype == "float32":
        options.append('compute in half precision: keras.config.set_dtype_policy("mixed_bfloat16")')
    return options


def _options_of_state(
    strategy: Any, entries: Sequence[_DeviceShare], *, has_slots: bool
) -> list[str]:
    topology = getattr(strategy, "topology", None)
    if topology is None or not entries:
        return []
    options: list[str] = []
    if topology.num_replicas > 1 and not strategy.placement.uses_stores:
        slots = 'shard_state="optimizer" or ' if has_slots else ""
        options.append(f'shard the state over the replicas: {slots}shard_state="all"')
    devices = topology.local_devices or ()
    kinds = {memory.kind for device in devices for memory in device.addressable_memories()}
    is_accelerator = topology.platform != "cpu"
    if is_accelerator and _PINNED in kinds and not strategy.placement.uses_stores:
        options.append(
            'store variables in host memory: CentralStorageStrategy(parameter_device="pinned_host")'
            ' for all, HybridStrategy(placement={...: "pinned_host"}) for some'
        )
    return options


def _host_error(message: str, entries: Sequence[_DeviceShare]) -> ResourceExhaustedError:
    asked = _asked_bytes(message)
    request = "An allocation" if asked is None else f"An allocation of {asked:,} bytes"
    return ResourceExhaustedError(
        explain(
            f"{request} in pinned host memory failed. {_state_afterwards(entries)}",
            expected="pinned memory within the limit of XLA, 64 GB by default, and of the machine.",
            fix="set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB to a larger number before Python starts, or "
            'store fewer variables in "pinned_host".',
            code="SG107",
        )
    )
