"""Number of hosts and devices of a TPU, known before JAX starts."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class TPUSystemMetadata:
    """Number of hosts and devices of a TPU.

    Args:
        num_cores: devices of all hosts; 0 if unknown.
        num_hosts: number of hosts.
        num_of_cores_per_host: devices per host; 0 if unknown.
        topology: None; `sg.tpu.experimental.initialize_tpu_system` returns the topology.
        devices: names of the devices.

    Example:
        >>> from unittest import mock
        >>> host = {"TPU_WORKER_HOSTNAMES": "host0,host1", "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1"}
        >>> with mock.patch.dict("os.environ", host):  # a TPU host sets them
        ...     metadata = sg.cluster_resolver.TPUClusterResolver().get_tpu_system_metadata()
        >>> metadata.num_hosts, metadata.num_of_cores_per_host, metadata.num_cores
        (2, 4, 8)

    Source: TF 2.21 tpu_system_metadata.py, TPUSystemMetadata.
    """

    num_cores: int
    num_hosts: int
    num_of_cores_per_host: int
    topology: None
    devices: tuple[str, ...]


def metadata_of(job: str, num_hosts: int, num_of_cores_per_host: int) -> TPUSystemMetadata:
    """Returns the metadata of a TPU with equal hosts, which are tasks of `job`."""
    names = tuple(
        f"/job:{job}/replica:0/task:{task}/device:TPU:{index}"
        for task in range(num_hosts)
        for index in range(num_of_cores_per_host)
    )
    return TPUSystemMetadata(len(names), num_hosts, num_of_cores_per_host, None, names)
