"""This process's identity in its process group, and the group's startup."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import math
import platform
from collections.abc import Sequence
from typing import Any

import jax

from stratagem import environment, settings
from stratagem.cluster.addresses import split_address
from stratagem.cluster.detection import RAY_TRAIN, detect
from stratagem.cluster.processes import Processes
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.cluster.resolvers.tf_config import TFConfigClusterResolver
from stratagem.devices.finding import (
    AbstractDevice,
    DeviceLike,
    find_devices,
    find_groups,
    local_devices,
    planned_devices,
    planned_topology,
    refuse_to_plan,
)
from stratagem.devices.mesh import Topology, adjacent_groups
from stratagem.devices.processes import end_coordination, start_processes
from stratagem.errors import check_type, invalid
from stratagem.group.authentication.secret import Credentials
from stratagem.group.current import Identity
from stratagem.group.verdict import GroupLimits

_LOOPBACK = "127.0.0.1"
_MOST_CHARACTERS = 2000


def check_resolver(resolver: object, argument: str) -> None:
    """Raises a ValueError unless a resolver is a `ClusterResolver` or None."""
    wanted = "a ClusterResolver, or None to ask the environment"
    check_type(argument, resolver, ClusterResolver | None, wanted, error=ValueError)


def resolver_of(resolver: ClusterResolver | None) -> ClusterResolver:
    """Returns the resolver that a strategy was given, or one from the environment."""
    check_resolver(resolver, "cluster_resolver")
    return resolver or detect() or TFConfigClusterResolver()


def devices_of_cluster(
    resolver: ClusterResolver, timeout_s: float | None, *, allow_unauthenticated: bool
) -> tuple[tuple[jax.Device, ...], bool]:
    """Returns the devices of all processes, and True if there are several.

    Without a cluster, and while a plan is made, they are this process's devices. Arguments as for
    `join`.
    """
    processes = resolver.processes()
    if processes.num_processes == 1 or planned_devices() is not None:
        return tuple(local_devices()), False
    devices = join(resolver, processes, timeout_s, allow_unauthenticated=allow_unauthenticated)
    return devices, True


def join(
    resolver: ClusterResolver,
    processes: Processes,
    timeout_s: float | None = None,
    *,
    allow_unauthenticated: bool = False,
) -> tuple[jax.Device, ...]:
    """Joins the processes of a cluster and starts JAX for all of them.

    Args:
        resolver: the resolver of the cluster.
        processes: its processes; more than one.
        timeout_s: seconds that a process may make no progress; 0 for no limit, None for
            `STRATAGEM_STUCK_TIMEOUT_S`.
        allow_unauthenticated: True to run on several hosts without a secret.

    Returns:
        The devices of all processes, grouped by process.
    """
    limits = GroupLimits(
        join_s=settings.read("join_timeout_s"),
        peer_s=settings.read("peer_timeout_s"),
        stuck_s=settings.read("stuck_timeout_s") if timeout_s is None else timeout_s or math.inf,
        barrier_s=settings.read("barrier_timeout_s"),
    )
    if resolver.environment == RAY_TRAIN:
        end_coordination()
    identity = identity_of(resolver, processes)
    credentials = Credentials.find(
        identity.label,
        [identity.host, *identity.hosts],
        allow_unauthenticated=allow_unauthenticated,
    )
    return start_processes(identity, limits, own_accelerators(processes), credentials)


def copy_refused(strategy: object) -> ValueError:
    """Returns the error for copying a strategy of several processes."""
    return invalid(
        f"{strategy} was passed to copy.deepcopy, which cannot copy it.",
        expected="one strategy for a cluster: its processes belong together once.",
        fix="use the strategy itself.",
    )


def identity_of(
    resolver: ClusterResolver, processes: Processes, *, with_addresses: bool = False
) -> Identity:
    """Returns this process's identity in its group, with the values that must match on all.

    `with_addresses` requires those of all processes, also on one machine; ValueError without.
    """
    assert processes.coordinator_address is not None
    host, port = split_address(processes.coordinator_address)
    labels = _labels(resolver, processes)
    # The resolver of a TPU slice has only the hosts of that slice.
    knows_all = labels is not None
    is_one_machine = processes.num_local_processes == processes.num_processes
    if with_addresses and not knows_all:
        raise invalid(
            f"{resolver!r} does not list the address of every process.",
            expected="a cluster with an address for each process, which all others reach.",
            fix="set TF_CONFIG, or pass sg.cluster_resolver.SimpleClusterResolver.",
        )
    return Identity(
        process_id=processes.process_id,
        labels=labels or tuple(f"process {index}" for index in range(processes.num_processes)),
        host=_LOOPBACK if is_one_machine else host,
        port=port,
        same={
            "the cluster": _shortened(str(resolver.cluster_spec()))
            if knows_all
            else f"that of {host}",
            **{f"{name}": _version(name) for name in ("stratagem", "jax", "jaxlib", "keras")},
            "Python": ".".join(platform.python_version_tuple()[:2]),
        },
        addresses=_addresses(resolver)
        if knows_all and (with_addresses or not is_one_machine)
        else (),
    )


def _shortened(text: str) -> str:
    """Returns a text, or the start of a long one with its hash: each process sends it."""
    if len(text) <= _MOST_CHARACTERS:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{text[:_MOST_CHARACTERS]}... (SHA-256 {digest})"


def _version(package: str) -> str:
    for distribution in (package, f"{package}-nightly"):  # the same package by another name
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return "unknown"  # running from a source tree


def _labels(resolver: ClusterResolver, processes: Processes) -> tuple[str, ...] | None:
    """Returns the processes by task and address; None if the cluster does not list them all."""
    labels = [
        f"{job if job == 'chief' else f'{job} {index}'} ({address})"
        for job, index, address in _trainers(resolver)
    ]
    return tuple(labels) if len(labels) == processes.num_processes else None


def _addresses(resolver: ClusterResolver) -> tuple[tuple[str, int], ...]:
    return tuple(split_address(address) for _, _, address in _trainers(resolver))


def _trainers(resolver: ClusterResolver) -> list[tuple[str, int, str]]:
    spec = resolver.cluster_spec()
    return [
        (job, index, spec.task_address(job, index))
        for job in ("chief", "worker")
        if job in spec.jobs
        for index in spec.task_indices(job)
    ]


def own_accelerators(processes: Processes) -> list[int] | None:
    """Returns this process's share of the host's visible GPUs; None for all.

    Processes on one host share its GPUs if each of them sees all.
    """
    count, place = processes.num_local_processes, processes.local_process_id
    if count is None or place is None or count == 1:
        return None
    gpus = environment.visible_gpus()
    if gpus is None:  # Unassigned GPUs: one each, as in JAX.
        return [place]
    share = len(gpus) // count
    return list(range(place * share, (place + 1) * share)) or None


# Local devices of a strategy, from the user's argument.


def local_topology(devices: Any, *, name: str, devices_per_replica: int | None = None) -> Topology:
    """Returns the replicas on devices.

    Args:
        devices: one device, a list of them, or a list of equally long lists, one per replica; None
            for all local devices.
        name: name of the argument, for messages.
        devices_per_replica: number of adjacent devices per replica; None for one, or as listed.

    Raises:
        TypeError: devices of another type.
        ValueError: an empty list; an unknown, repeated or remote device; lists of unequal length;
            lists and `devices_per_replica`, or one that does not divide the devices.
    """
    if isinstance(devices, str | jax.Device):
        devices = [devices]
    fix = f'write {name}=["gpu:0", "gpu:1"].'
    wanted = "a list of devices, one a replica, or None for all local ones"
    check_type(name, devices, Sequence | None, wanted, fix)
    if devices is not None and any(isinstance(device, list | tuple) for device in devices):
        if devices_per_replica is not None:
            raise invalid(
                f"{name}={devices!r} and devices_per_replica={devices_per_replica!r} were given.",
                expected="at most one of them: each groups the devices.",
                fix=f"leave one of them out, or list the devices of {name} without groups.",
            )
        return planned_topology(Topology.of_groups(find_groups(devices)))
    found = local_devices() if devices is None else find_devices(list(devices))
    if devices_per_replica is None:
        return planned_topology(Topology(found))
    return planned_topology(Topology.of_groups(adjacent_groups(found, devices_per_replica)))


def parameter_device_of(device: DeviceLike | None) -> jax.Device:
    """Returns the device for single-copy variables; None selects the host.

    Raises:
        ValueError: an unknown or remote device, or no host that JAX may use.
    """
    if device is not None and planned_devices() is not None:
        name = device.platform if isinstance(device, jax.Device | AbstractDevice) else str(device)
        if not name.lower().removeprefix("/").removeprefix("device:").startswith("cpu"):
            refuse_to_plan(f"A strategy with variables on {device}")
        device = None
    if device is not None:
        return find_devices([device])[0]
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise invalid(
            f"JAX was told to leave the host out: {error}",
            expected="the platform cpu beside that of the replicas: the host keeps variables.",
            fix="set JAX_PLATFORMS=cuda,cpu or unset it, or pass parameter_device.",
        ) from error
