"""Starting JAX in several processes that train together, and ending it with them.

Source: JAX, multi-process programming (jax.distributed.initialize).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax

from stratagem import environment
from stratagem.goodput import current_events
from stratagem.group import Activity, Group, GroupLimits, Identity, current_group, set_current_group
from stratagem.messages import explain
from stratagem.topology import ending
from stratagem.topology.devices import local_devices
from stratagem.topology.private import cache_programs, gloo_at

__all__ = ["has_started", "start_processes"]

# JAX's own limits do not name anybody and end the process: the group is faster.
_NEVER_S = 10_000_000


def start_processes(
    identity: Identity, limits: GroupLimits, local_device_ids: list[int] | None
) -> tuple[jax.Device, ...]:
    """Joins the group and starts JAX for all its processes; once in the life of a process.

    Args:
        identity: which of the processes this is.
        limits: how long to wait.
        local_device_ids: of the accelerators of this host those of this process; None for all.

    Returns:
        The devices of all processes, those of each one after the other.

    Raises:
        RuntimeError: JAX has started already, or this process belongs to another group.
        DeadlineExceededError: not all processes came.
        ValueError: the processes do not fit together.
    """
    group = current_group()
    if group is None:
        _require_fresh_jax()
        current_events()  # one that waits in vain for the others has started too
        group = Group(identity, limits)
        set_current_group(group)
        _start_jax(group, local_device_ids)
        ending.watch(group)
    elif group.identity != identity:
        raise RuntimeError(
            explain(
                f"This process is {group.identity.label} of a group of "
                f"{group.num_processes}, and was to become {identity.label} of "
                f"{identity.num_processes}.",
                expected="one cluster in the life of a process.",
                fix="give all strategies the same cluster.",
            )
        )
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    _check_even(devices, identity.labels)
    return tuple(devices)


def _require_fresh_jax() -> None:
    if not jax.distributed.is_initialized() and not has_started():
        return
    raise RuntimeError(
        explain(
            "JAX has started before the strategy of several processes was made.",
            expected="the strategy before the first array and the first look at the devices: the "
            "processes have to find each other first.",
            fix="make the strategy at the top of the program, and leave out "
            "jax.distributed.initialize, which it calls.",
        )
    )


def has_started() -> bool:
    """Returns whether JAX's backends have started.

    Returns:
        True if it refuses to change the number of CPU devices, as it does from then on.
    """
    settings: Any = jax.config
    count = settings.jax_num_cpu_devices
    try:
        jax.config.update("jax_num_cpu_devices", max(count, 0) + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", count)
    return False


def _start_jax(group: Group, local_device_ids: list[int] | None) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Else SIGTERM would not end this process any more.
    jax.config.update("jax_enable_preemption_service", False)
    # Else JAX would end this process when another one is lost, before anybody can say which.
    jax.config.update("jax_enable_recoverability", True)
    if group.process_id and environment.lookup("STRATAGEM_PROGRAM_DIR"):
        cache_programs()
    door = group.open_coordination_port()
    jax.distributed.initialize(
        f"127.0.0.1:{door}",
        group.num_processes,
        group.process_id,
        local_device_ids=local_device_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=int(group.limits.join_s) + 1,
        heartbeat_timeout_seconds=_NEVER_S,
        shutdown_timeout_seconds=ending.SHUTDOWN_S,
        coordinator_bind_address=f"127.0.0.1:{door}",
    )
    with group.at(Activity.COMPILE, "starting JAX"), gloo_at(group.own_address):
        local_devices()


def _check_even(devices: list[jax.Device], labels: tuple[str, ...]) -> None:
    counts = Counter(device.process_index for device in devices)
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{labels[index]} has {count}" for index, count in sorted(counts.items()))
        raise ValueError(
            explain(
                f"The processes have different numbers of devices: {found}.",
                expected="as many on each, so that batches can be split evenly.",
                fix="make the same number visible to each process (CUDA_VISIBLE_DEVICES).",
            )
        )
