"""Start of JAX in several processes that train together, and their exit, together or at once."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import logging
import multiprocessing
import os
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import jax

from stratagem import environment
from stratagem.cluster.preemption.signals import ignore_until_exit
from stratagem.devices.finding import local_devices
from stratagem.devices.private import (
    enable_compilation_cache,
    exit_now,
    gloo_bound_to,
    main_thread_file,
)
from stratagem.errors import INTERRUPTED, explain, invalid
from stratagem.group.authentication.secret import Credentials
from stratagem.group.current import Identity, current_group, set_current_group
from stratagem.group.elastic.group import ElasticGroup
from stratagem.group.member import Group
from stratagem.group.verdict import Activity, GroupLimits
from stratagem.observe.process_writer import close_events, current_events

# Exit of a process of a group: together with the others, or immediately if the group is broken.
#
# After another process is lost, a JAX program may never finish, and the interpreter would wait
# for XLA's threads forever. So a process of a broken group flushes Python's buffers and exits by
# itself.


SHUTDOWN_S = 10
# Time that the program may be stuck inside JAX after its group broke; nothing can interrupt it.
_GRACE_S = 5.0
# The same for a program that has caught the error and continues.
_REPORTED_GRACE_S = 30.0
_POLL_INTERVAL_S = 0.25
_DRAIN_S = 2.0


class _ExitState:
    """Exit code after an error, the planned exit code, and whether the loss was recorded."""

    exit_code: int | None = None
    planned_code: int = 0
    has_recorded_loss: bool = False


_state = _ExitState()


def watch(group: Group) -> None:
    """Handles the exit of this process from now on."""
    previous = sys.excepthook

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        _state.exit_code = INTERRUPTED if kind is KeyboardInterrupt else 1
        if group.verdict is None:
            group.report_error("".join(traceback.format_exception(kind, error, trace)))
        previous(kind, error, trace)

    sys.excepthook = report
    thread = threading.Thread(
        target=_exit_if_stuck, args=(group,), name="stratagem-exit", daemon=True
    )
    thread.start()


def expect_exit(code: object) -> None:
    """Records the code of the program's `SystemExit`, in case another process is lost then."""
    _state.planned_code = code if isinstance(code, int) else int(code is not None)


def _exit_if_stuck(group: Group) -> None:
    """Exits the process if its main thread is stuck inside JAX after the group broke."""
    group.wait_for_verdict()
    _record_loss(group)
    waited_s = 0.0
    pause = threading.Event()
    while waited_s < (_REPORTED_GRACE_S if group.is_reported else _GRACE_S):
        pause.wait(_POLL_INTERVAL_S)
        is_stuck = _is_in_jax() and (group.waits_in_vain or not group.is_reported)
        waited_s = waited_s + _POLL_INTERVAL_S if is_stuck else 0.0
    faulthandler.dump_traceback()
    _print_verdict(group)
    print(
        f"{group.identity.label} is stuck inside JAX, which cannot be interrupted, and exits now.",
        file=sys.stderr,
        flush=True,
    )
    _exit(1)


def _print_verdict(group: Group) -> None:
    assert group.verdict is not None
    group.mark_reported()
    print("".join(traceback.format_exception_only(group.verdict.exception())), file=sys.stderr)


def _record_loss(group: Group) -> None:
    """Records the loss as soon as it is known, since this process may not exit normally."""
    events, verdict = current_events(), group.verdict
    if events is None or verdict is None or _state.has_recorded_loss:
        return
    _state.has_recorded_loss = True
    loss = verdict.loss(group.identity.label)
    if loss is None:
        events.failure(verdict.message, silence_s=verdict.silent_s)
    else:
        events.failure(
            verdict.message,
            lost=loss.task,
            silence_s=verdict.silent_s,
            step=loss.step,
            reported_by=loss.reported_by,
        )


def _is_in_jax() -> bool:
    """Returns True if the main thread is in JAX, or in our code: C++ calls have no Python frame."""
    packages = [os.path.dirname(jax.__file__), str(Path(__file__).parents[1])]
    return main_thread_file().startswith(tuple(path + os.sep for path in packages))


@atexit.register
def _exit_with_group() -> None:
    group: Any = current_group()
    if isinstance(group, ElasticGroup):
        group.close()
    elif group is not None:
        _leave_group(group)
    ignore_until_exit()


def _leave_group(group: Group) -> None:
    if _state.exit_code is None and group.verdict is None and group.leave():
        with contextlib.suppress(Exception):  # another process may exit first
            if group.process_id:
                jax.distributed.shutdown()
            group.exchange("the end of all", None, timeout_s=SHUTDOWN_S)
        return
    _record_loss(group)
    group.drain(_DRAIN_S)
    verdict = group.verdict
    # This program has ended well, but its processes did not do the same.
    if verdict is not None and verdict.error == "RuntimeError" and not group.is_reported:
        _print_verdict(group)
        _exit(_state.exit_code or 1)
    # The program ended by itself while others still waited for it.
    planned = 1 if group.is_reported else _state.planned_code
    _exit(planned if _state.exit_code is None else _state.exit_code)


def _exit(exit_code: int) -> NoReturn:
    for child in multiprocessing.active_children():
        child.terminate()
    close_events(exit_code)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    exit_now(exit_code)


# Startup of JAX in several processes that train together.
#
# Source: JAX, multi-process programming (jax.distributed.initialize).


# Refusal of one GPU in several processes of a lockstep cluster.
#
# NCCL, which sums over GPUs of several processes, does not accept it, and says so only in the first
# sum.

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
    return invalid(
        f"{', '.join(labels)} use the same GPU, {uuid}.",
        expected="GPUs of its own for each process: NCCL cannot sum over one GPU twice.",
        fix="start one process per GPU, with CUDA_VISIBLE_DEVICES or with `stratagem launch "
        "--devices-per-worker 1`. For several processes on one GPU use "
        "ParameterServerStrategy.",
        code="SG517",
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


# JAX's own time limits end the process without naming the lost one; the group detects it first.
_NEVER_S = 10_000_000


def start_processes(
    identity: Identity,
    limits: GroupLimits,
    local_device_ids: list[int] | None,
    credentials: Credentials | None = None,
) -> tuple[jax.Device, ...]:
    """Joins the group and starts JAX on all its processes; call it once per process.

    None for `local_device_ids` selects all accelerators of this host. Returns the devices of all
    processes, ordered by process. Raises RuntimeError if JAX has started or this process belongs to
    another group, DeadlineExceededError if some processes did not join, ValueError if they have
    different numbers of devices, or two the same GPU.
    """
    group = current_group()
    if group is None:
        _require_fresh_jax()
        current_events()  # record the start even if the other processes never join
        group = Group(identity, limits, credentials)
        set_current_group(group)
        _start_jax(group, local_device_ids)
        watch(group)
        require_own_gpus(group, jax.local_devices())
    elif group.identity != identity:
        raise RuntimeError(
            explain(
                f"This process is {group.identity.label} of {group.num_processes} processes, and "
                f"cannot become {identity.label} of {identity.num_processes}.",
                expected="the same cluster for the lifetime of a process.",
                fix="give all strategies the same cluster.",
            )
        )
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    _check_even(devices, identity.labels)
    return tuple(devices)


def end_coordination() -> None:
    """Ends the coordination service of JAX that a launcher began; call it on every process.

    Strangers could join it, and it would end all processes when one is lost.
    """
    if current_group() is None and jax.distributed.is_initialized() and not has_started():
        jax.distributed.shutdown()


def _require_fresh_jax() -> None:
    if not jax.distributed.is_initialized() and not has_started():
        return
    raise RuntimeError(
        explain(
            "JAX started before the multi-process strategy was created.",
            expected="the strategy before the first array and the first device query, since the "
            "processes must connect first.",
            fix="create the strategy at the top of the program, without "
            "jax.distributed.initialize, which it calls.",
            code="SG102",
        )
    )


def has_started() -> bool:
    """Returns True if JAX's backends have started, which fixes the number of CPU devices."""
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
    # Otherwise SIGTERM would no longer end this process.
    jax.config.update("jax_enable_preemption_service", False)
    # Otherwise JAX would end this process when another is lost, before the loss is reported.
    jax.config.update("jax_enable_recoverability", True)
    settings: Any = jax.config
    is_default = not settings.jax_compilation_cache_dir  # then a folder of this machine is used
    if group.process_id and (is_default or environment.lookup("STRATAGEM_PROGRAM_DIR")):
        enable_compilation_cache()
    door = group.open_coordination_port()
    jax.distributed.initialize(
        f"127.0.0.1:{door}",
        group.num_processes,
        group.process_id,
        local_device_ids=local_device_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=int(group.limits.join_s) + 1,
        heartbeat_timeout_seconds=_NEVER_S,
        shutdown_timeout_seconds=SHUTDOWN_S,
        coordinator_bind_address=f"127.0.0.1:{door}",
    )
    with group.at(Activity.COMPILE, "starting JAX"), gloo_bound_to(group.own_address):
        local_devices()


def _check_even(devices: list[jax.Device], labels: tuple[str, ...]) -> None:
    counts = Counter(device.process_index for device in devices)
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{labels[index]} has {count}" for index, count in sorted(counts.items()))
        raise invalid(
            f"The processes have different numbers of devices: {found}.",
            expected="the same number on each, so that batches can be split evenly.",
            fix="make the same number visible to each process (CUDA_VISIBLE_DEVICES).",
            code="SG510",
        )
