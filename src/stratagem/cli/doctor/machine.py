"""The checks of a machine: versions, settings, limits, devices, and its view of the cluster."""

from __future__ import annotations

import contextlib
import ctypes.util
import dataclasses
import difflib
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stratagem import environment
from stratagem.cli.doctor.findings import Finding, error, note, ok, under, warning
from stratagem.resources import available_cores, cache_dir
from stratagem.settings import SETTINGS

_INITIAL_VARIABLES = Path("/proc/self/environ")


def examine(
    probe: Probe | None = None, check_cluster: Callable[[], Iterable[Finding]] = tuple
) -> Iterator[Finding]:
    """Examines this machine, in the order in which problems hide each other.

    `probe` has the devices that JAX found; by default JAX is started. A survey of all hosts checks
    the cluster by itself.
    """
    installed, variables = installed_versions(), variables_of_user()
    driver = gpu_driver()

    def check_all_devices() -> Iterator[Finding]:
        yield from check_gpu_driver(driver, installed)
        found = probe or probe_devices()
        yield from check_devices(found, installed, driver)
        finds_library = ctypes.util.find_library("nccl") is not None
        yield from check_nccl(found, installed, driver, finds_library=finds_library)

    def check_limits() -> Iterator[Finding]:
        yield from check_machine(read_limits())
        yield from check_caches(variables)

    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "versions": lambda: check_versions(installed),
        "settings": lambda: check_settings(variables),
        "machine": check_limits,
        "devices": check_all_devices,
        "cluster": check_cluster,
    }
    for topic, check in checks.items():
        yield from under(topic, check())


def variables_of_user() -> dict[str, str]:
    """Returns the environment without the Keras backend that importing this package selected."""
    variables = environment.snapshot()
    try:
        initial = _INITIAL_VARIABLES.read_bytes()
    except OSError:
        return variables
    if variables.get("KERAS_BACKEND") == "jax" and b"KERAS_BACKEND=" not in initial:
        del variables["KERAS_BACKEND"]
    return variables


# Versions of packages. Whether they fit together, `pip check` says.

PACKAGES = (
    "stratagem",
    "jax",
    "jaxlib",
    "keras",
    "numpy",
    "jax-cuda12-plugin",
    "jax-cuda12-pjrt",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "libtpu",
    "orbax-checkpoint",
    "ray",
    "grain",
    "tensorboard",
    "tensorflow",
    "torch",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)


def installed_versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Returns the versions of those packages that are installed."""
    found: dict[str, str] = {}
    for name in packages:
        # A nightly build is the same package by another name.
        for distribution in (name, f"{name}-nightly"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found.setdefault(name, importlib.metadata.version(distribution))
    return found


def check_versions(installed: Mapping[str, str]) -> Iterator[Finding]:
    """Shows the versions, and plugins that JAX ignores."""
    shown = ", ".join(f"{name} {version}" for name, version in installed.items())
    yield ok(f"Python {platform.python_version()}, {shown}.")
    jaxlib = installed.get("jaxlib")
    for name, version in installed.items():
        # Built for exactly one version of jaxlib.
        if name.startswith("jax-cuda") and jaxlib and version != jaxlib:
            yield error(
                f"{name} {version} was built for another jaxlib than {jaxlib}; JAX ignores it.",
                f'pip install "{name}=={jaxlib}"',
            )


# Environment variables that are wrong, misspelled or without effect.

# Set by launchers for their tasks, or by options of `stratagem launch`.
_OF_LAUNCHERS = {
    *("STRATAGEM_MEMORY_DIR", "STRATAGEM_NODE_HOST", "STRATAGEM_PROGRAM_DIR"),
    *("STRATAGEM_REMOTE_JOB", "STRATAGEM_RESTART_COUNT", "STRATAGEM_RUN_DIR"),
    "STRATAGEM_SECRET",
    *(setting.variable for setting in SETTINGS.values() if not setting.meaning),
}
# JAX refuses other wrong variables of its memory by itself, as the check of devices shows.
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_BOOLEANS = ("", "true", "True", "1", "false", "False", "0")
_WITHOUT_EFFECT = {
    "TF_FORCE_GPU_ALLOW_GROWTH": "XLA_PYTHON_CLIENT_PREALLOCATE=false",
    "TF_GPU_ALLOCATOR": "XLA_PYTHON_CLIENT_ALLOCATOR",
    "TF_XLA_FLAGS": "XLA_FLAGS",
}
_SLOW = {
    "NCCL_P2P_DISABLE": "GPUs exchange data through host memory",
    "NCCL_SHM_DISABLE": "processes of one host exchange data through the network",
    "NCCL_IB_DISABLE": "hosts do not use InfiniBand",
    "JAX_DISABLE_JIT": "nothing is compiled",
    "JAX_DEBUG_NANS": "each operation is checked",
}


def check_settings(
    variables: Mapping[str, str], keras_config: Path | None = None
) -> Iterator[Finding]:
    """Checks environment variables, and Keras's configuration, by default `~/.keras/keras.json`."""
    findings = [*_check_backend(variables, keras_config), *_check_own(variables)]
    if (text := variables.get(_PREALLOCATE, "")) not in _BOOLEANS:
        findings.append(
            warning(
                f"{_PREALLOCATE}={text} counts as true: JAX takes most of the device's memory.",
                f"set {_PREALLOCATE}=false, or unset it.",
            )
        )
    for name, instead in _WITHOUT_EFFECT.items():
        if name in variables:
            findings.append(note(f"{name} has no effect here: {instead} is the setting of JAX."))
    for name, effect in _SLOW.items():
        if variables.get(name, "0").lower() not in ("", "0", "false"):
            text = f"{name}={variables[name]} makes training slow: {effect}."
            findings.append(warning(text, f"unset {name}, unless you are debugging."))
    yield from findings or [ok("No environment variable is wrong.")]


def _configured(keras_config: Path | None) -> tuple[Path, str | None]:
    """Returns Keras's configuration file, and the backend that it selects."""
    file = keras_config or Path.home() / ".keras" / "keras.json"
    try:
        return file, str(json.loads(file.read_text())["backend"])
    except (OSError, ValueError, TypeError, KeyError):
        return file, None


def _check_backend(variables: Mapping[str, str], keras_config: Path | None) -> Iterator[Finding]:
    backend, (file, configured) = variables.get("KERAS_BACKEND", ""), _configured(keras_config)
    if backend and backend != "jax":
        yield error(
            f"KERAS_BACKEND={backend}; strategies run on the jax backend only.",
            "unset KERAS_BACKEND, or set KERAS_BACKEND=jax.",
        )
    elif not backend and configured not in (None, "jax"):
        yield note(
            f"{file} selects the {configured} backend: import stratagem before keras, which "
            "selects jax."
        )


def _check_own(variables: Mapping[str, str]) -> Iterator[Finding]:
    known = {setting.variable: setting for setting in SETTINGS.values() if setting.meaning}
    for name, text in sorted(variables.items()):
        if not name.startswith("STRATAGEM_") or name in _OF_LAUNCHERS:
            continue
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            meant = f"write {close[0]}" if close else "see docs/reference/environment.md"
            yield warning(f"{name} is not a setting.", f"{meant}.")
            continue
        try:
            known[name].kind.parse(text)
        except ValueError as wrong:
            fix = f"{known[name].meaning} Default: {known[name].default}."
            yield error(f"{name}: {str(wrong).splitlines()[0]}", fix)


# Limits of the machine: cores, memory, shared memory, open files, and disks.

_BYTES_PER_GIB = 2**30
_LOW_SHM_BYTES = 2**30
_LOW_FILES = 4096
_FEW_FREE_FILES = 1000
_LOW_DISK_BYTES, _FULL_DISK_BYTES = 10 * _BYTES_PER_GIB, _BYTES_PER_GIB


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of this process, those of its container included.

    `shm_bytes` is the size of `/dev/shm`, None without one. `max_open_files` is the soft limit, -1
    without one. `free_bytes` has one folder of each file system; `free_files` says how many files
    can be created there, and leaves out those without a limit.
    """

    num_cores: float
    num_machine_cores: int
    memory_bytes: int
    shm_bytes: int | None
    max_open_files: int
    free_bytes: Mapping[str, int]
    free_files: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])


def read_limits(cgroup: Path = Path("/sys/fs/cgroup")) -> Limits:
    """Reads the limits."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = cgroup / "memory.max"
    if limit.exists() and (text := limit.read_text().strip()).isdecimal():
        memory_bytes = min(memory_bytes, int(text))
    shm = Path("/dev/shm")  # noqa: S108 - only measured
    statuses = {folder: os.statvfs(folder) for folder in _folders()}
    return Limits(
        num_cores=available_cores(cgroup),
        num_machine_cores=os.cpu_count() or 1,
        memory_bytes=memory_bytes,
        shm_bytes=shutil.disk_usage(shm).total if shm.exists() else None,
        max_open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        free_bytes={name: one.f_bavail * one.f_frsize for name, one in statuses.items()},
        free_files={name: one.f_favail for name, one in statuses.items() if one.f_files},
    )


def _folders() -> list[str]:
    """Returns one folder of each file system that runs write to."""
    found: dict[int, str] = {}
    candidates = (
        os.getcwd(),
        environment.lookup("TMPDIR") or "/tmp",  # noqa: S108 - only measured
        str(Path.home()),
        environment.lookup("STRATAGEM_RUN_DIR"),
    )
    for folder in filter(None, candidates):
        if os.path.isdir(folder):
            found.setdefault(os.stat(folder).st_dev, folder)
    return list(found.values())


def check_machine(limits: Limits) -> Iterator[Finding]:
    """Reports the limits, and those that are too low."""
    shm_bytes, num_files = limits.shm_bytes, limits.max_open_files
    shared = "" if shm_bytes is None else f", {_size(shm_bytes)} of shared memory"
    files = "" if num_files < 0 else f", {num_files} open files"
    yield ok(
        f"{limits.num_cores:g} of {limits.num_machine_cores} cores, "
        f"{_size(limits.memory_bytes)} of memory{shared}{files}."
    )
    if shm_bytes is not None and shm_bytes < _LOW_SHM_BYTES:
        yield warning(
            f"/dev/shm has {_size(shm_bytes)}; NCCL, Ray and input workers exchange data "  # noqa: S108
            "through it.",
            "docker run --shm-size=4g, or in Kubernetes an emptyDir with medium: Memory mounted at "
            "/dev/shm.",
        )
    if 0 <= num_files < _LOW_FILES:
        yield warning(
            f"This process may open {num_files} files; each connection is one.",
            "ulimit -n 65536; where the hard limit forbids it, docker run --ulimit nofile=65536, "
            "LimitNOFILE=65536 in the systemd unit, or /etc/security/limits.conf.",
        )
    for folder, free_bytes in limits.free_bytes.items():
        num_free = limits.free_files.get(folder, _FEW_FREE_FILES)
        if num_free < _FEW_FREE_FILES:
            yield error(
                f"{folder} has room for {num_free} more files (inodes), whatever their size.",
                "remove small files; df -i shows the limit, du --inodes where they are.",
            )
        elif free_bytes < _LOW_DISK_BYTES:
            problem = error if free_bytes < _FULL_DISK_BYTES else warning
            yield problem(
                f"The disk of {folder} has {_size(free_bytes)} free; checkpoints and caches need "
                "space.",
                f"remove files (du -xh {folder} | sort -h | tail), or write checkpoints and TMPDIR "
                "elsewhere.",
            )


def _size(num_bytes: int) -> str:
    for unit, unit_bytes in (("GiB", _BYTES_PER_GIB), ("MiB", 2**20)):
        if num_bytes >= unit_bytes:
            return f"{num_bytes / unit_bytes:.1f} {unit}"
    return f"{num_bytes / 2**10:.0f} KiB"


def check_caches(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Reports folders of caches that cannot be written, or made."""
    chosen = variables.get("JAX_COMPILATION_CACHE_DIR", "")
    folders = {"STRATAGEM_CACHE_DIR": cache_dir()}
    if chosen and "://" not in chosen:
        folders["JAX_COMPILATION_CACHE_DIR"] = Path(chosen)
    for variable, folder in folders.items():
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
            continue
        reason = "is read-only here" if existing.is_dir() else "is a file"
        yield warning(
            f"{variable} cannot be written: {existing} {reason}. Each start repeats the work.",
            f"mount it writable, or set {variable} to a folder that is.",
        )


# Devices that JAX finds, and accelerators that it does not.

_PROBE_LIMIT_S = 120
_PROGRAM = """
import json, jax
print("STRATAGEM_DEVICES", json.dumps([
    {"platform": d.platform, "kind": d.device_kind, "process": d.process_index,
     "memory_bytes": (d.memory_stats() or {}).get("bytes_limit")}
    for d in jax.local_devices()]))
"""
_UNKNOWN_FLAGS = re.compile(r"Unknown flags? in XLA_FLAGS: (?P<flags>.*)")
# Errors of XLA's log: level, date, time, thread, and file.
_LOG_PREFIX = re.compile(r"[EF]\d{4} [\d:.]+ +\d+ (?P<file>\S+)\] ")
_UNKNOWN_FIX = 'run python -c "import jax; print(jax.devices())" for the whole error.'
_START_FIXES = {
    "Couldn't interpret value": "correct this flag in XLA_FLAGS.",
    '"XLA_FLAGS"': "begin each flag in XLA_FLAGS with --.",
    "JAX_PLATFORMS": "correct JAX_PLATFORMS, or unset it; a platform needs its plugin: pip install "
    "'stratagem[cuda]' for GPUs, 'stratagem[tpu]' for TPUs.",
    "for environment": "correct or unset that variable.",
    "for JAX flag": "correct or unset the variable of this name in capitals.",
    "jaxlib": "pip install --upgrade jax jaxlib, both of one version.",
}
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
# Lowest driver by major version of CUDA: NVIDIA's table of minor version compatibility.
_LOWEST_DRIVER = {12: 525, 13: 580}


@dataclasses.dataclass(frozen=True)
class Probe:
    """Result of starting JAX in a process of its own.

    Args:
        devices: local devices; empty if JAX did not start.
        errors: what the process wrote to stderr.
        seconds: limit that was exceeded; None if the process ended.
    """

    devices: Sequence[Mapping[str, Any]] = ()
    errors: str = ""
    seconds: float | None = None


def probe_devices(limit_s: float = _PROBE_LIMIT_S) -> Probe:
    """Starts JAX in a subprocess: a broken driver may end the process or block it."""
    try:
        finished = subprocess.run(  # noqa: S603 - our own program
            [sys.executable, "-c", _PROGRAM],
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            env=environment.snapshot(),
        )
    except subprocess.TimeoutExpired as late:
        text = late.stderr or ""  # bytes in most versions of Python, even with text=True
        errors = text.decode(errors="replace") if isinstance(text, bytes) else text
        return Probe(errors=errors, seconds=limit_s)
    for line in finished.stdout.splitlines():
        marker, _, text = line.partition(" ")
        if marker == "STRATAGEM_DEVICES":
            return Probe(json.loads(text), finished.stderr)
    return Probe(errors=finished.stderr)


def gpu_driver(file: Path = _DRIVER_FILE) -> str | None:
    """Returns the version of NVIDIA's kernel driver, or None without one."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)", text)
    return found[1] if found else "unknown"


def check_gpu_driver(driver: str | None, installed: Mapping[str, str]) -> Iterator[Finding]:
    """Checks that the driver is recent enough for the CUDA version of JAX's plugin."""
    if driver is None:
        return
    yield ok(f"NVIDIA driver {driver}.")
    major = driver.partition(".")[0]
    for cuda, lowest in _LOWEST_DRIVER.items():
        if f"jax-cuda{cuda}-plugin" in installed and major.isdecimal() and int(major) < lowest:
            yield error(
                f"The NVIDIA driver is {driver}; CUDA {cuda} needs {lowest} or later.",
                "update the driver, or install the plugin of an earlier CUDA version.",
            )


def check_devices(
    probe: Probe, installed: Mapping[str, str], driver: str | None
) -> Iterator[Finding]:
    """Reports the devices of JAX, and accelerators that it does not use."""
    if (found := _UNKNOWN_FLAGS.search(probe.errors)) is not None:
        yield error(
            f"XLA_FLAGS has flags that this jaxlib does not know: {found['flags'].strip()}",
            "remove them from XLA_FLAGS: XLA ends the process because of them.",
        )
    elif probe.seconds is not None:
        yield error(
            f"JAX did not start within {probe.seconds:.0f} s.",
            "look for another process that uses the accelerator (nvidia-smi; for a TPU, "
            "lsof /dev/accel0 /dev/vfio), or set JAX_PLATFORMS=cpu to leave it alone.",
        )
    elif not probe.devices:
        cause = _cause(probe.errors)
        fix = next((fix for sign, fix in _START_FIXES.items() if sign in cause), _UNKNOWN_FIX)
        yield error(f"JAX did not start: {cause}", fix)
    else:
        yield ok(f"JAX sees {', '.join(counted_devices(probe.devices))}.")
        if driver is not None and not _has_gpu(probe):
            yield _unused_gpu(probe, installed)


def check_nccl(
    probe: Probe, installed: Mapping[str, str], driver: str | None, *, finds_library: bool
) -> Iterator[Finding]:
    """Checks that NCCL exists where there are GPUs, as a package or as a system-wide library."""
    plugins = _plugins(installed)
    has_package = any(name.startswith("nvidia-nccl-cu") for name in installed)
    if not (_has_gpu(probe) or (driver and plugins)) or has_package or finds_library:
        return
    cuda = re.sub(r"\D", "", plugins[0]) if plugins else "12"
    yield error(
        "NCCL is not installed; GPUs cannot exchange gradients without it.",
        f"pip install nvidia-nccl-cu{cuda}, or install 'stratagem[cuda]' again.",
    )


def counted_devices(devices: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the number of devices of each kind, such as "8 x NVIDIA H100 (gpu)"."""
    kinds = [
        device["kind"]
        if device["kind"] == device["platform"]
        else f"{device['kind']} ({device['platform']})"
        for device in devices
    ]
    return [f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)]


def _has_gpu(probe: Probe) -> bool:
    return any(device["platform"] == "gpu" for device in probe.devices)


def _plugins(installed: Mapping[str, str]) -> list[str]:
    return [name for name in installed if re.fullmatch(r"jax-cuda\d+-plugin", name)]


def _cause(errors: str) -> str:
    """Returns the line that says why a process ended."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    # XLA prints all of its flags after the error, and Python the error after its traceback.
    fatal = [_LOG_PREFIX.sub("", line) for line in lines if _LOG_PREFIX.match(line)]
    return [*fatal[:1], *reversed(lines), "no output"][0][:300]


def _unused_gpu(probe: Probe, installed: Mapping[str, str]) -> Finding:
    if not _plugins(installed):
        text = "The machine has an NVIDIA GPU, but JAX's plugin for it is not installed."
        return warning(text, "pip install 'stratagem[cuda]'")
    if environment.visible_gpus() == () or environment.lookup("JAX_PLATFORMS") == "cpu":
        return note("The GPUs are hidden by CUDA_VISIBLE_DEVICES or JAX_PLATFORMS.")
    lines = [line for line in probe.errors.splitlines() if "CUDA" in line or "cuda" in line]
    return warning(
        f"JAX does not use the NVIDIA GPU: {(lines or ['it gives no reason'])[-1][:300]}",
        "compare the driver with the CUDA version of the plugin, and try nvidia-smi.",
    )
