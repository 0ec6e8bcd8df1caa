"""Local GPUs, and the hosts and devices of a TPU, counted without starting a JAX backend."""

from __future__ import annotations

import dataclasses
import subprocess

from stratagem import environment
from stratagem.errors import explain

_COMMAND = ("nvidia-smi", "--list-gpus")
_TIMEOUT_S = 60


def local_gpus() -> tuple[str, ...]:
    """Returns the IDs of this host's GPUs that are visible to this process.

    These come from `CUDA_VISIBLE_DEVICES` or, if it is not set, from `nvidia-smi`; empty without
    that command. Raises RuntimeError if `nvidia-smi` fails.

    Source: TF 2.21 slurm_cluster_resolver.py, get_num_gpus.
    """
    visible = environment.visible_gpus()
    if visible is not None:
        return visible
    try:
        listed = subprocess.run(  # noqa: S603 - a constant command
            _COMMAND, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S
        ).stdout
    except FileNotFoundError:
        return ()
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(
            explain(
                f"{' '.join(_COMMAND)} failed: {error} {error.stdout or ''}".rstrip(),
                expected="a list of this host's GPUs.",
                fix="repair the driver, set CUDA_VISIBLE_DEVICES, or pass the number of GPUs.",
            )
        ) from error
    num_gpus = sum(line.startswith("GPU ") for line in listed.splitlines())
    return tuple(map(str, range(num_gpus)))


# Number of hosts and devices of a TPU, known before JAX starts.


@dataclasses.dataclass(frozen=True)
class TPUSystemMetadata:
    """Number of hosts and devices of a TPU.

    Args:
        num_cores: devices of all hosts; 0 if unknown.
        num_hosts: number of hosts.
        num_of_cores_per_host: devices per host; 0 if unknown.
        topology: None; `sg.tpu.initialize_tpu_system` returns the topology.
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
