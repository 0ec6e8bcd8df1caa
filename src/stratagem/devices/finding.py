"""Lookup of devices by name or index, virtual CPU devices, and devices of a description.

Described devices compute nothing. Large arrays become NumPy arrays of the same shape whose elements
share one, so they take no memory. Small arrays keep their values, which programs read.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.util
import logging
import math
import os
import pkgutil
import re
import stat
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType

from stratagem import environment, settings
from stratagem.cluster.accelerators import local_gpus
from stratagem.cluster.addresses import free_ports
from stratagem.devices.mesh import Topology, adjacent_groups, check_groups
from stratagem.devices.private import SeparateNodes, write_cache_entries_whole
from stratagem.errors import check_type, explain, invalid
from stratagem.resources import cache_dir, changing, programs_folder

# Arrays up to this size keep their values.
_MAX_VALUE_BYTES = 2**16


@dataclasses.dataclass(frozen=True)
class AbstractDevice:
    """Stand-in for a `jax.Device`; `slice_index` is its TPU slice or GPU host."""

    id: int
    platform: str
    device_kind: str
    process_index: int = 0
    slice_index: int = 0

    def __str__(self) -> str:
        return f"{self.platform}:{self.id}"


class AbstractTopology(Topology):
    """A topology of abstract devices, seen by one process that plans for all."""

    is_abstract = True

    def with_shard_size(self, shard_size: int | None) -> Topology:
        """Returns the topology with the shard size that planning imposes, or this one."""
        return super().with_shard_size(_planned.shard_size or shard_size)

    @cached_property
    def local_replica_ids(self) -> tuple[int, ...]:
        """All replicas."""
        return tuple(range(self.num_replicas))

    @cached_property
    def spans_processes(self) -> bool:
        """False: a plan is made by one process."""
        return False

    @cached_property
    def mesh(self) -> Any:
        """An abstract mesh, which is enough to trace and lower a program."""
        names = (*self.replica_axes, *self.logical_axes)
        # The axis types of `jax.sharding.Mesh`; newer JAX defaults to others.
        axis_types = (AxisType.Auto,) * len(names)
        return AbstractMesh(self._mesh_shape, names, axis_types=axis_types)

    def replicate(self, value: object) -> Any:
        """Returns the abstract form of a replicated value."""
        return _abstract_value(value)

    def put_stacked(self, array: jax.Array | np.ndarray, *, axis: int = 0) -> Any:
        """Returns the abstract form of an array with a replica axis."""
        return _abstract_value(array)

    def stack(self, values: list[Any]) -> Any:
        """Returns the abstract form of stacked replica values."""
        if any(isinstance(value, Tracer) for value in values):
            return jax.numpy.stack([jax.numpy.asarray(value) for value in values])
        if exceeds_value_limit(values[0].shape, values[0].dtype):
            return placeholder((len(values), *values[0].shape), values[0].dtype)
        return _abstract_value(np.stack([np.asarray(value) for value in values]))


def placeholder(shape: Sequence[int], dtype: object) -> np.ndarray[Any, Any]:
    """Returns an array of zeros that takes no memory, with JAX's canonical dtype."""
    zero = np.zeros((), jax.dtypes.canonicalize_dtype(dtype))
    return np.broadcast_to(zero, tuple(shape))


def exceeds_value_limit(shape: Sequence[int], dtype: object) -> bool:
    """Returns True if abstract devices do not keep the values of such an array."""
    return math.prod(shape) * jax.dtypes.canonicalize_dtype(dtype).itemsize > _MAX_VALUE_BYTES


def _abstract_value(value: object) -> Any:
    if isinstance(value, Tracer):
        return value
    if not isinstance(value, jax.Array | np.ndarray):
        value = np.asarray(value)
    if exceeds_value_limit(value.shape, value.dtype):
        return placeholder(value.shape, value.dtype)
    return np.asarray(value).astype(jax.dtypes.canonicalize_dtype(value.dtype))


class _PlannedTarget:
    """Planned devices, sharded state and default strategy for all threads; None if not planned."""

    topology: AbstractTopology | None = None
    shard_state: str | None = None
    shard_size: int | None = None
    make_strategy: Callable[[], Any] | None = None


_planned = _PlannedTarget()


def planning_for(
    topology: AbstractTopology,
    shard_state: str | None = None,
    make_strategy: Callable[[], Any] | None = None,
    shard_size: int | None = None,
) -> contextlib.AbstractContextManager[None]:
    """Gives strategies created within the block these devices instead of local ones.

    None for `shard_state` and `shard_size` keeps the strategies' own; None for `make_strategy`
    creates no strategy for models without one.
    """
    return changing(
        _planned,
        topology=topology,
        shard_state=shard_state,
        make_strategy=make_strategy,
        shard_size=shard_size,
    )


def planned_default_strategy() -> Any:
    """Returns a strategy for a model without one; None if nothing is planned."""
    return None if _planned.make_strategy is None else _planned.make_strategy()


def planned_shard_state() -> str | None:
    """Returns the `shard_state` that planning imposes, or None."""
    return _planned.shard_state


def planned_devices(num_named: int | None = None) -> tuple[Any, ...] | None:
    """Returns the devices to use instead of local ones, or None if nothing is planned.

    A program that named one device gets one, any other gets all.
    """
    if _planned.topology is None:
        return None
    devices = _planned.topology.devices
    assert devices is not None
    return devices[:1] if num_named == 1 else devices


def planned_groups(num_named: int, size: int) -> tuple[tuple[Any, ...], ...] | None:
    """Returns device groups to use instead of local ones, or None if nothing is planned.

    A program that named one group gets one, any other as many as fit. Raises ValueError if groups
    of this size do not fill a host.
    """
    if _planned.topology is None:
        return None
    devices = _planned.topology.devices
    assert devices is not None
    per_host = min(Counter(device.process_index for device in devices).values())
    if size > per_host or (num_named > 1 and per_host % size):
        raise invalid(
            f"Replicas of {size} devices do not fit on hosts of {per_host} devices.",
            expected="groups of devices of one process that fill its host evenly.",
            fix="use groups of another size, or MultiWorkerMirroredStrategy("
            f"devices_per_replica={size}), whose replicas may span hosts.",
            code="SG801",
        )
    if num_named == 1:
        return (devices[:size],)
    return adjacent_groups(devices, size)


def refuse_to_plan(what: str) -> None:
    """Raises ValueError for an object that cannot be planned, if a step is being planned."""
    if _planned.topology is not None:
        raise invalid(
            f"{what} cannot be planned.",
            expected="variables that are replicated or sharded over the replicas' devices.",
            fix="create the model under MirroredStrategy to plan it.",
            code="SG801",
        )


def planned_topology(topology: Topology) -> Topology:
    """Returns the topology, with abstract devices if a step is being planned."""
    if _planned.topology is None or topology.devices is None:
        return topology
    return AbstractTopology(topology.devices, topology.groups, shard_size=topology.shard_size)


DeviceLike: TypeAlias = str | int | jax.Device

_NAME = re.compile(
    r"/?(?:job:(?P<job>\w+)/)?(?:replica:(?P<replica>\d+)/)?(?:task:(?P<task>\d+)/)?(?:device:)?"
    r"(?P<platform>[a-zA-Z]+)(?::(?P<index>\d+))?"
)
_PLATFORMS = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}


def local_devices() -> tuple[jax.Device, ...]:
    """Returns all local accelerators or, without any, all local CPU devices, in JAX's order."""
    environment.require_unchanged_settings()
    if (planned := planned_devices()) is not None:
        return planned
    _size_thread_pool()
    return tuple(jax.local_devices())


def device_memory() -> tuple[int | None, int | None]:
    """Returns the memory in use on the fullest local device, and its limit; None if unknown."""
    try:
        stats = [device.memory_stats() or {} for device in jax.local_devices()]
    except RuntimeError:  # the platform does not count, or has shut down
        return None, None
    used = [(one["bytes_in_use"], one.get("bytes_limit")) for one in stats if "bytes_in_use" in one]
    return max(used, key=lambda one: one[0], default=(None, None))


def _size_thread_pool() -> None:
    """Sizes XLA:CPU's pool for the virtual devices to come; has no effect once JAX has started."""
    num_devices = num_cpu_devices()
    if num_devices > 1:
        environment.size_cpu_thread_pool(num_devices)


def num_cpu_devices() -> int:
    """Returns the number of CPU devices requested by the program or its environment."""
    settings: Any = jax.config
    asked = int(settings.jax_num_cpu_devices)
    return asked if asked > 0 else environment.num_forced_cpu_devices()


def find_devices(specs: Sequence[DeviceLike]) -> tuple[jax.Device, ...]:
    """Returns the devices for names, indices or `jax.Device` objects, in the given order.

    Names are TensorFlow's and JAX's: `"GPU:0"`, `"/cpu:1"`, `"/device:TPU:3"`; an index counts
    `local_devices()`. Creates missing virtual CPU devices if JAX has not started. Raises ValueError
    for empty, duplicate, unknown or remote devices, TypeError for other types.

    Source: TF 2.21 mirrored_strategy.py, _infer_num_gpus_per_worker and device canonicalization.
    """
    if not specs:
        raise invalid(
            "devices=[] is empty.",
            expected="at least one device, or None for all local ones.",
            fix='omit the argument, or pass for example ["cpu:0", "cpu:1"].',
        )
    parsed = [_parse(spec) for spec in specs]
    if (planned := planned_devices(len(parsed))) is not None:
        return planned
    cpu_indices = [
        parsed_spec[1]
        for parsed_spec in parsed
        if isinstance(parsed_spec, tuple) and parsed_spec[0] == "cpu"
    ]
    if cpu_indices:
        _make_virtual_cpu_devices(max(cpu_indices) + 1)
    devices = tuple(_look_up(parsed_spec) for parsed_spec in parsed)
    _check_distinct(devices)
    _check_local(devices)
    return devices


def find_groups(
    specs: Sequence[Sequence[DeviceLike]],
) -> tuple[tuple[jax.Device, ...], ...]:
    """Returns the devices of each replica, given as a list of devices per replica.

    Raises as `find_devices`, and ValueError for groups of unequal size, TypeError if groups and
    single devices are mixed.
    """
    for spec in specs:
        if not isinstance(spec, list | tuple):
            raise TypeError(
                explain(
                    f"devices={list(specs)!r} mixes groups with the single device {spec!r}.",
                    expected="one device per replica, or a list of devices per replica.",
                    fix='pass devices=[["gpu:0", "gpu:1"], ["gpu:2", "gpu:3"]].',
                    code="SG104",
                )
            )
    named = [device for group in specs for device in group]
    sizes = {len(group) for group in specs}
    if len(sizes) == 1 and named:
        parsed = list(map(_parse, named))
        if (planned := planned_groups(len(specs), len(parsed) // len(specs))) is not None:
            return planned
    found = iter(find_devices(named))
    return check_groups([[next(found) for _ in group] for group in specs])


def _parse(spec: DeviceLike) -> tuple[str, int] | int | jax.Device:
    """Returns (platform, index), an index into the local devices, or the device itself."""
    if isinstance(spec, jax.Device):
        return spec
    if isinstance(spec, int) and not isinstance(spec, bool):
        return spec
    check_type("device", spec, str, 'a name such as "gpu:0", an index, or a jax.Device')
    name = str(spec)
    match = _NAME.fullmatch(name)
    platform = _PLATFORMS.get(match["platform"].lower()) if match else None
    if match is None or platform is None:
        # Listing the devices would start JAX, after which a corrected call could not create virtual
        # CPU devices any more.
        raise invalid(
            f"{spec!r} is not a device name.",
            expected='a platform (cpu, gpu, tpu) and an index, such as "gpu:0" or "/cpu:1".',
            fix="correct the name; the command `stratagem devices` lists the devices.",
            code="SG103",
        )
    is_local = match["job"] in (None, "localhost") and not int(match["replica"] or 0)
    if not is_local or int(match["task"] or 0):
        raise _remote_device_error([name])
    return platform, int(match["index"] or 0)


def _look_up(parsed_spec: tuple[str, int] | int | jax.Device) -> jax.Device:
    if isinstance(parsed_spec, jax.Device):
        return parsed_spec
    if isinstance(parsed_spec, int):
        name, platform, index, devices = f"number {parsed_spec}", "", parsed_spec, local_devices()
    else:
        platform, index = parsed_spec
        name, devices = f"{platform}:{index}", _platform_devices(platform)
    if not 0 <= index < len(devices):
        raise invalid(
            f"device {name} does not exist.",
            expected=f"one of {_device_names(_all_local_devices())}.",
            fix=_missing_device_fix(platform, index),
            code="SG103",
        )
    return devices[index]


def _missing_device_fix(platform: str, index: int) -> str:
    if platform == "cpu" and _platform_devices("cpu"):
        return (
            "create the strategy before the first JAX computation (JAX has started and cannot add "
            "virtual CPU devices any more), or call "
            f'jax.config.update("jax_num_cpu_devices", {index + 1}) at the top of the program.'
        )
    return "use a device that exists, or omit `devices` to use all local ones."


def _platform_devices(platform: str) -> tuple[jax.Device, ...]:
    try:
        return tuple(jax.local_devices(backend=platform))
    except RuntimeError:  # JAX has no such platform on this machine
        return ()


def _all_local_devices() -> tuple[jax.Device, ...]:
    accelerators = local_devices()
    cpus = _platform_devices("cpu")
    return accelerators + tuple(device for device in cpus if device not in accelerators)


def _device_names(devices: Sequence[jax.Device]) -> str:
    counts: dict[str, int] = {}
    names: list[str] = []
    for device in devices:
        index = counts.get(device.platform, 0)
        counts[device.platform] = index + 1
        names.append(f"{device.platform}:{index}")
    return ", ".join(names)


def _make_virtual_cpu_devices(num_devices: int) -> None:
    """Requests CPU devices from JAX; does nothing if its backends have started."""
    if num_devices > num_cpu_devices():
        try:
            jax.config.update("jax_num_cpu_devices", num_devices)
        except RuntimeError:  # JAX has started: the lookup that follows explains what to do
            return
    _size_thread_pool()


def _check_distinct(devices: Sequence[jax.Device]) -> None:
    repeated = sorted({str(device) for device in devices if devices.count(device) > 1})
    if repeated:
        raise invalid(
            f"devices contains {', '.join(repeated)} more than once.",
            expected="each device at most once: a device holds one replica.",
            fix="remove the duplicates.",
        )


def _check_local(devices: Sequence[jax.Device]) -> None:
    process_index = jax.process_index()
    remote = [str(device) for device in devices if device.process_index != process_index]
    if remote:
        raise _remote_device_error(remote)


def _remote_device_error(names: Sequence[str]) -> ValueError:
    return invalid(
        f"devices contains {', '.join(names)}, which belongs to another process.",
        expected="devices of this process.",
        fix="choose from jax.local_devices().",
    )


# Startup of JAX in processes that know each other's devices, and never talk to each other in JAX.
#
# Arrays over the devices of all processes describe values of which each process has its own part.
# No
# program of JAX combines the parts, so that no process depends on another one.


@functools.cache
def start_separately(num_processes: int, process_id: int) -> tuple[jax.Device, ...]:
    """Starts JAX, and returns a device of each process, in their order.

    The devices of other processes are names: only this process's own computes. Raises RuntimeError
    if this process has several devices, or another platform than CPU.
    """
    settings: Any = jax.config
    check_platform(settings.jax_platforms)
    nodes = SeparateNodes(free_ports(1)[0], num_processes, process_id)
    with concurrent.futures.ThreadPoolExecutor(num_processes) as pool:
        others = [pool.submit(nodes.start_other, one) for one in nodes.others]
        own = local_devices()
        for other in others:
            other.result()
    atexit.register(nodes.close)
    check_device(own)
    return tuple(sorted(jax.devices(), key=lambda device: device.process_index))


def check_platform(platforms: str | None) -> None:
    """Raises RuntimeError if JAX would start on GPUs, where it waits for those of other processes.

    `platforms` is the value of JAX_PLATFORMS, if any.
    """
    if platforms:
        first = platforms.split(",")[0]
        found = "" if first == "cpu" else f"JAX_PLATFORMS is {platforms!r}"
    else:
        gpus = local_gpus() if _has_gpu_plugin() else ()
        found = f"JAX would start on this host's GPUs: {', '.join(gpus)}" if gpus else ""
    if found:
        raise RuntimeError(
            explain(
                f"{found}.",
                expected="CPU devices: processes of an ElasticStrategy do not compute on others.",
                fix="set JAX_PLATFORMS=cpu, or use MultiWorkerMirroredStrategy.",
            )
        )


def _has_gpu_plugin() -> bool:
    plugins = importlib.util.find_spec("jax_plugins")
    folders = None if plugins is None else plugins.submodule_search_locations
    names = [module.name for module in pkgutil.iter_modules(folders or ())]
    return any(name.startswith(("xla_cuda", "xla_rocm")) for name in names)


def check_device(own: Sequence[Any]) -> None:
    """Raises RuntimeError unless a process has one CPU device."""
    if len(own) > 1 or own[0].platform != "cpu":
        raise RuntimeError(
            explain(
                f"This process has {len(own)} devices: {', '.join(map(str, own))}.",
                expected="one CPU device for each process of an ElasticStrategy.",
                fix="start one process for each device, with JAX_PLATFORMS=cpu; "
                "MultiWorkerMirroredStrategy supports other platforms and several devices.",
            )
        )


# JAX's persistent cache of compiled programs, on by default in a private folder of limited size.
#
# The first step of a program that ran before then loads what it would compile. JAX looks programs
# up by a digest of the program, the compiler's version and its flags; the folder adds the kind of
# CPU, because programs for the CPU use the instructions of the machine that compiled them.


_logger = logging.getLogger(__name__)

# JAX stores programs that took a second to compile; the step of a small model takes less.
_MIN_COMPILE_TIME_S = 0.1
_JAX_MIN_COMPILE_TIME_S = 1.0


def use_compilation_cache() -> Path | None:
    """Makes JAX store compiled programs, unless the user chose otherwise; returns the folder.

    None if JAX's own settings name a folder or turn its cache off, if
    `STRATAGEM_COMPILATION_CACHE_BYTES` is 0, or if no private folder can be written.
    """
    limit_bytes = settings.read("compilation_cache_bytes")
    folder = programs_folder(cache_dir())
    jax_config: Any = jax.config
    if jax_config.jax_compilation_cache_dir == str(folder):
        return folder  # an earlier strategy
    is_wanted = limit_bytes and jax_config.jax_enable_compilation_cache
    if not is_wanted or jax_config.jax_compilation_cache_dir or not _make_private(folder):
        return None
    if not write_cache_entries_whole():
        return None
    _sweep(folder.parent, limit_bytes)
    jax_config.update("jax_compilation_cache_dir", str(folder))
    if jax_config.jax_persistent_cache_min_compile_time_secs == _JAX_MIN_COMPILE_TIME_S:
        jax_config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_TIME_S)
    return folder


def _make_private(folder: Path) -> bool:
    """Makes the folder if it is missing; returns True if only this user can write to it."""
    try:
        if not folder.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _logger.info("Compiled programs are cached in %s.", folder)
        is_private = _is_private(folder)
    except OSError as error:
        _logger.debug("Compiled programs are not cached: %s", error)
        return False
    if not is_private:
        _logger.warning(
            "Compiled programs are not cached, because others can write to %s, and programs in it "
            "are executed. Run `chmod 700 %s`, or set STRATAGEM_COMPILATION_CACHE_BYTES=0.",
            folder,
            folder,
        )
    return is_private


def _is_private(folder: Path) -> bool:
    """Returns True if a folder belongs to this user, and no other can write to it."""
    status = folder.stat()
    is_own = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    return is_own and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _sweep(root: Path, limit_bytes: int) -> None:
    """Removes the programs that were not read for the longest time until the rest fits."""
    entries: list[tuple[float, int, Path]] = []
    for path in root.rglob("*"):
        with contextlib.suppress(OSError):  # another process removed it
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                last_use_s = max(status.st_atime, status.st_mtime)
                entries.append((last_use_s, status.st_size, path))
    total_bytes = sum(size_bytes for _, size_bytes, _ in entries)
    for _, size_bytes, path in sorted(entries):
        if total_bytes <= limit_bytes:
            return
        with contextlib.suppress(OSError):
            path.unlink()
        total_bytes -= size_bytes
