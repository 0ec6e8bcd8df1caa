"""Refusal of one GPU in several processes of a lockstep cluster.

NCCL, which sums over GPUs of several processes, does not accept it, and says so only in the first
sum.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from stratagem.group.member import Group
from stratagem.messages import explain

_DRIVER = "libcuda.so.1"
_UUID_BYTES = 16


def require_own_gpus(group: Group, devices: Sequence[Any]) -> None:
    """Raises ValueError on all processes if two of them have the same GPU.

    `devices` are those of this process. Does nothing on other platforms.
    """
    if not devices or devices[0].platform != "gpu":
        return
    own = [_uuid_of(device.local_hardware_id) for device in devices]
    owners: dict[str, list[int]] = {}
    for process_id, uuids in enumerate(group.exchange("the GPUs of each process", own)):
        for uuid in filter(None, uuids):
            owners.setdefault(uuid, []).append(process_id)
    for uuid, process_ids in owners.items():
        if len(process_ids) > 1:
            labels = [group.identity.labels[process_id] for process_id in process_ids]
            raise _shared(uuid, labels)


def _shared(uuid: str, labels: Sequence[str]) -> ValueError:
    return ValueError(
        explain(
            f"{', '.join(labels)} use the same GPU, {uuid}.",
            expected="GPUs of its own for each process: NCCL cannot sum over one GPU twice.",
            fix="start one process per GPU, with CUDA_VISIBLE_DEVICES or with `stratagem launch "
            "--devices-per-worker 1`. For several processes on one GPU use "
            "ParameterServerStrategy.",
            code="SG517",
        )
    )


def _uuid_of(index: int) -> str | None:
    """Returns the UUID of a GPU by its number in this process; None if the driver gives none."""
    try:
        driver = ctypes.CDLL(_DRIVER)
        device, uuid = ctypes.c_int(), (ctypes.c_ubyte * _UUID_BYTES)()
        query = getattr(driver, "cuDeviceGetUuid_v2", None) or driver.cuDeviceGetUuid
    except (OSError, AttributeError):
        return None
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), index):
        return None
    return None if query(uuid, device) else f"GPU-{bytes(uuid).hex()}"
