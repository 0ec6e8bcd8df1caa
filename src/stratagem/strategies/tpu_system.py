"""TPU system: finding the TPU, starting JAX on all its hosts, freeing its memory."""

from __future__ import annotations

import gc

import jax

from stratagem import environment
from stratagem.cluster.detection import detect
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.cluster.resolvers.tpu import TPUClusterResolver
from stratagem.devices.abstract_devices import planned_devices
from stratagem.devices.devices import local_devices
from stratagem.devices.tpu_coordinates import tpu_topology_of
from stratagem.devices.tpu_topology import TPUTopology
from stratagem.errors import NotFoundError
from stratagem.messages import explain
from stratagem.strategies.membership import check_resolver, join


def initialize_tpu_system(cluster_resolver: ClusterResolver | None = None) -> TPUTopology:
    """Finds the TPU, starts JAX on all its hosts, and returns the positions of its devices.

    `TPUStrategy` does the same by itself. Call it on every host, before any other use of JAX. Later
    calls are harmless: JAX starts a TPU once, and nothing is lost.

    Args:
        cluster_resolver: the TPU's hosts; None reads the environment.

    Returns:
        The topology, with several slices stacked along z.

    Raises:
        NotFoundError: no TPU.
        ValueError: a resolver of another type, or one that does not name all hosts.

    Example:
        >>> sg.tpu.experimental.initialize_tpu_system().num_tasks  # with STRATAGEM_TPU_PLATFORM=cpu
        1

    Source: TF 2.21 tpu_strategy_util.py, initialize_tpu_system.
    """
    check_resolver(cluster_resolver, "cluster_resolver")
    return tpu_topology_of(tpu_devices(find_resolver(cluster_resolver)))


def shutdown_tpu_system(cluster_resolver: ClusterResolver | None = None) -> None:
    """Drops all compiled programs to free their device memory.

    JAX holds the devices until the process ends; arrays and variables stay.

    Args:
        cluster_resolver: the TPU's hosts; None reads the environment.

    Raises:
        NotFoundError: no TPU.
        ValueError: a resolver of another type.

    Example:
        >>> topology = sg.tpu.experimental.initialize_tpu_system()
        >>> sg.tpu.experimental.shutdown_tpu_system()

    Source: TF 2.21 tpu_strategy_util.py, shutdown_tpu_system.
    """
    check_resolver(cluster_resolver, "cluster_resolver")
    tpu_devices(find_resolver(cluster_resolver))
    jax.clear_caches()
    gc.collect()


def find_resolver(cluster_resolver: ClusterResolver | None) -> ClusterResolver:
    """Returns the given resolver, or one from the environment.

    Without any, the TPU is in this machine alone.
    """
    return cluster_resolver or detect() or TPUClusterResolver("local")


def tpu_devices(resolver: ClusterResolver) -> tuple[jax.Device, ...]:
    """Returns the devices of the TPU, grouped by process, after joining its other hosts.

    They are CPU devices if `STRATAGEM_TPU_PLATFORM` is "cpu".

    Raises:
        NotFoundError: there is no TPU.
        ValueError: the TPU has more hosts than the resolver names.
    """
    if (planned := planned_devices()) is not None:
        return planned
    platform = environment.read("tpu_platform")
    processes = resolver.processes()
    try:
        if processes.num_processes > 1:
            devices = join(resolver, processes)
        else:
            local_devices()
            devices = tuple(jax.devices(platform))
    except RuntimeError as error:
        if "backend" not in str(error):  # JAX's error for a missing platform
            raise
        raise _not_found(platform, str(error)) from error
    if devices[0].platform != platform:
        raise _not_found(platform, f"JAX uses the platform {devices[0].platform!r}.")
    num_hosts = len({device.process_index for device in devices})
    if num_hosts != processes.num_processes:
        raise ValueError(
            explain(
                f"The TPU has {num_hosts} hosts, and the resolver tells of "
                f"{processes.num_processes}.",
                expected="a resolver that names all of them: no environment variable does.",
                fix='pass sg.cluster_resolver.TPUClusterResolver("the TPU\'s name").',
            )
        )
    return devices


def _not_found(platform: str, why: str) -> NotFoundError:
    return NotFoundError(
        explain(
            f"This machine has no {platform.upper()} that JAX can use: {why}",
            expected="a TPU host with jax[tpu] installed, on which no other program uses the TPU.",
            fix="see docs/guides/tpu.md; to try the program without a TPU, set "
            "STRATAGEM_TPU_PLATFORM=cpu and JAX_NUM_CPU_DEVICES=8.",
            code="SG106",
        )
    )
