"""What is known of a TPU's hosts and devices before JAX has started."""

from __future__ import annotations

import dataclasses

__all__ = ["TPUSystemMetadata", "metadata_of"]


@dataclasses.dataclass(frozen=True)
class TPUSystemMetadata:
    """How many hosts and devices a TPU has.

    Args:
        num_cores: devices of all hosts; 0 where that is not known.
        num_hosts: hosts.
        num_of_cores_per_host: devices of a host; 0 where that is not known.
        topology: None; `sg.tpu.experimental.initialize_tpu_system` returns it.
        devices: the devices' names.

    Source: TF 2.21 tpu_system_metadata.py, TPUSystemMetadata.
    """

    num_cores: int
    num_hosts: int
    num_of_cores_per_host: int
    topology: None
    devices: tuple[str, ...]


def metadata_of(job: str, num_hosts: int, num_of_cores_per_host: int) -> TPUSystemMetadata:
    """Returns what a TPU with hosts that are all alike has.

    Args:
        job: the task type of the hosts.
        num_hosts: how many there are.
        num_of_cores_per_host: devices of each.
    """
    names = tuple(
        f"/job:{job}/replica:0/task:{task}/device:TPU:{index}"
        for task in range(num_hosts)
        for index in range(num_of_cores_per_host)
    )
    return TPUSystemMetadata(len(names), num_hosts, num_of_cores_per_host, None, names)
