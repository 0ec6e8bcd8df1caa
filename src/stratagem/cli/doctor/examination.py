"""The whole examination, in the order in which problems hide each other."""

from __future__ import annotations

import contextlib
import ctypes.util
import dataclasses
import json
import os
import resource
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stratagem import environment
from stratagem.cli.doctor import accelerators, clusters, settings, versions
from stratagem.cli.doctor.findings import Finding, Level
from stratagem.resources import available_cores, cache_dir, programs_folder

# Limits of the machine: cores, memory, shared memory, open files, disks, and the clock.

_TOPIC = "machine"
_BYTES_PER_GIB = 2**30
_LOW_SHM_BYTES = 2**30
_LOW_FILES = 4096
_FEW_FREE_FILES = 1000
_LOW_DISK_BYTES, _FULL_DISK_BYTES = 10 * _BYTES_PER_GIB, _BYTES_PER_GIB
# Certificates and schedulers fail before this release existed.
_EARLIEST_TIME_S = 1_767_225_600  # 2026-01-01


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of this process.

    Args:
        num_cores: cores that this process may use.
        num_machine_cores: cores of the machine.
        memory_bytes: memory that this process may use.
        shm_bytes: size of `/dev/shm`; None without one.
        max_open_files: soft limit of file descriptors.
        most_open_files: hard limit, up to which `ulimit` can raise it; -1 without one.
        free_bytes: free space by folder, one folder of each file system.
        free_files: how many files can be created there; folders without a limit are left out.
        time_s: Unix time.
    """

    num_cores: float
    num_machine_cores: int
    memory_bytes: int
    shm_bytes: int | None
    max_open_files: int
    free_bytes: Mapping[str, int]
    time_s: float
    most_open_files: int = -1
    free_files: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])


def read_limits(cgroup: Path = Path("/sys/fs/cgroup")) -> Limits:
    """Reads the limits, with those of the container."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read(cgroup / "memory.max")
    if limit.isdecimal():
        memory_bytes = min(memory_bytes, int(limit))
    shm = Path("/dev/shm")  # noqa: S108 - only measured
    statuses = {folder: os.statvfs(folder) for folder in _folders()}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Limits(
        num_cores=available_cores(cgroup),
        num_machine_cores=os.cpu_count() or 1,
        memory_bytes=memory_bytes,
        shm_bytes=shutil.disk_usage(shm).total if shm.exists() else None,
        max_open_files=soft,
        most_open_files=hard,
        free_bytes={name: one.f_bavail * one.f_frsize for name, one in statuses.items()},
        free_files={name: one.f_favail for name, one in statuses.items() if one.f_files},
        time_s=time.time(),
    )


def check_machine(limits: Limits) -> list[Finding]:
    """Reports the limits, and those that are too low."""
    findings = [
        Finding(
            _TOPIC,
            Level.OK,
            f"{limits.num_cores:g} of {limits.num_machine_cores} cores, "
            f"{_size(limits.memory_bytes)} of memory{_shown_limits(limits)}.",
        )
    ]
    if limits.shm_bytes is not None and limits.shm_bytes < _LOW_SHM_BYTES:
        findings.append(
            Finding(
                _TOPIC,
                Level.WARNING,
                f"/dev/shm has {_size(limits.shm_bytes)}; NCCL, Ray and input workers "  # noqa: S108
                "exchange data through it.",
                "docker run --shm-size=4g, or in Kubernetes an emptyDir with medium: Memory "
                "mounted at /dev/shm.",
            )
        )
    if 0 <= limits.max_open_files < _LOW_FILES:
        findings.append(
            Finding(
                _TOPIC,
                Level.WARNING,
                f"This process may open {limits.max_open_files} files; each connection is one.",
                _files_fix(limits.most_open_files),
            )
        )
    for folder, free_bytes in limits.free_bytes.items():
        findings += _check_disk(folder, free_bytes, limits.free_files.get(folder))
    if limits.time_s < _EARLIEST_TIME_S:
        findings.append(
            Finding(
                _TOPIC,
                Level.ERROR,
                f"The clock says {time.strftime('%Y-%m-%d', time.gmtime(limits.time_s))}.",
                "synchronize it, for example with chrony or systemd-timesyncd.",
            )
        )
    return findings


def _files_fix(most: int) -> str:
    if 0 <= most < _LOW_FILES:
        return (
            f"raise the hard limit, {most}: docker run --ulimit nofile=65536, LimitNOFILE=65536 in "
            "the systemd unit, or /etc/security/limits.conf."
        )
    count = 65536 if most < 0 else min(most, 65536)
    return f"ulimit -n {count}, or LimitNOFILE=65536 in the systemd unit."


def _shown_limits(limits: Limits) -> str:
    shared = "" if limits.shm_bytes is None else f", {_size(limits.shm_bytes)} of shared memory"
    files = "" if limits.max_open_files < 0 else f", {limits.max_open_files} open files"
    return shared + files


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


def _check_disk(folder: str, free_bytes: int, free_files: int | None) -> list[Finding]:
    if free_files is not None and free_files < _FEW_FREE_FILES:
        return [
            Finding(
                _TOPIC,
                Level.ERROR,
                f"{folder} has room for {free_files} more files (inodes), whatever their size.",
                "remove small files; df -i shows the limit, du --inodes where they are.",
            )
        ]
    if free_bytes >= _LOW_DISK_BYTES:
        return []
    level = Level.ERROR if free_bytes < _FULL_DISK_BYTES else Level.WARNING
    return [
        Finding(
            _TOPIC,
            level,
            f"The disk of {folder} has {_size(free_bytes)} free; checkpoints and caches need "
            "space.",
            f"remove files (du -xh {folder} | sort -h | tail), or write checkpoints and TMPDIR "
            "elsewhere.",
        )
    ]


def _size(num_bytes: int) -> str:
    for unit, unit_bytes in (("GiB", _BYTES_PER_GIB), ("MiB", 2**20)):
        if num_bytes >= unit_bytes:
            return f"{num_bytes / unit_bytes:.1f} {unit}"
    return f"{num_bytes / 2**10:.0f} KiB"


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


# Ray and caches: other things that a run relies on.

_DASHBOARD_PORT = 8265
_ANSWER_LIMIT_S = 3.0
_LARGE_CACHE_BYTES = 20 * 2**30


def check_ray(
    variables: Mapping[str, str],
    installed: Mapping[str, str],
    limit_s: float = _ANSWER_LIMIT_S,
) -> list[Finding]:
    """Compares Ray here with the cluster that the environment names.

    Args:
        variables: environment variables; `RAY_ADDRESS` and `RAY_API_SERVER_ADDRESS` are read.
        installed: versions by package.
        limit_s: seconds to wait for an answer.
    """
    address = _dashboard(variables)
    if address is None:
        return []
    if unusable := _unusable(address, installed):
        return [unusable]
    token = _token(variables)
    request = _version_request(address, token)
    try:
        with urllib.request.urlopen(request, timeout=limit_s) as answer:  # noqa: S310
            version: Any = json.load(answer).get("ray_version")
    except urllib.error.HTTPError as error:
        with error:
            return [_refused(address, error, has_token=bool(token))]
    except (OSError, ValueError, AttributeError) as error:
        return [
            Finding(
                "ray",
                Level.WARNING,
                f"Ray's dashboard at {address} does not answer: {error}",
                "start the head with ray start --head --dashboard-host=0.0.0.0, or correct "
                "RAY_API_SERVER_ADDRESS.",
            )
        ]
    if version != installed["ray"]:
        return [
            Finding(
                "ray",
                Level.ERROR,
                f"Ray is {installed['ray']} here and {version} on the cluster; they must be equal.",
                f'pip install "ray[default]=={version}"',
            )
        ]
    return [Finding("ray", Level.OK, f"Ray {version} answers at {address}.")]


def check_cache(folder: Path) -> list[Finding]:
    """Reports a folder of `STRATAGEM_CACHE_DIR` that is very large or read-only."""
    if (problem := _unwritable(folder, "STRATAGEM_CACHE_DIR")) is not None:
        return [problem]
    size_bytes = sum(stat.st_size for stat in _files(folder))
    if size_bytes <= _LARGE_CACHE_BYTES:
        return []
    return [
        Finding(
            "cache",
            Level.WARNING,
            f"{folder} holds {size_bytes / 2**30:.0f} GiB.",
            f"remove what no run uses: du -h {folder}; journals/ restores parameter servers.",
        )
    ]


def check_compilation_cache(
    folder: Path, jaxlib: str | None, installed_at_s: float | None, variable: str | None
) -> list[Finding]:
    """Reports a cache of compiled programs that is of no use: stale, or read-only.

    JAX looks programs up by a digest that includes the version of jaxlib. It cannot be read back,
    so the times are compared: no program is older than the jaxlib that can read it.

    Args:
        folder: where the programs are.
        jaxlib: installed version.
        installed_at_s: when that was installed, as Unix time.
        variable: environment variable that names the folder; None for the folder of programs in
            `STRATAGEM_CACHE_DIR`, which `check_cache` has tested.
    """
    if variable is not None and (problem := _unwritable(folder, variable)) is not None:
        return [problem]
    times_s = [stat.st_mtime for stat in _files(folder, "*-cache")]
    if not times_s:
        return []
    if installed_at_s is None or max(times_s) >= installed_at_s:
        return [Finding("cache", Level.OK, f"Compiled programs in {folder}: {len(times_s)}.")]
    return [
        Finding(
            "cache",
            Level.WARNING,
            f"The compiled programs in {folder} ({len(times_s)}) are older than jaxlib {jaxlib}, "
            f"installed {time.strftime('%Y-%m-%d %H:%M', time.localtime(installed_at_s))}; "
            "programs of another jaxlib are never read.",
            f"rm -r {folder}; the next run fills it again.",
        )
    ]


def _unwritable(folder: Path, variable: str) -> Finding | None:
    """Returns a finding if a folder cannot be written, or made."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return None
    reason = "is read-only here" if existing.is_dir() else "is a file"
    return Finding(
        "cache",
        Level.WARNING,
        f"{variable} cannot be written: {existing} {reason}. Each start repeats the work.",
        f"mount it writable, or set {variable} to a folder that is.",
    )


def _files(folder: Path, pattern: str = "*") -> list[os.stat_result]:
    found: list[os.stat_result] = []
    for path in folder.rglob(pattern):
        with contextlib.suppress(OSError):  # removed just now
            if path.is_file():
                found.append(path.stat())
    return found


def _unusable(address: str, installed: Mapping[str, str]) -> Finding | None:
    """Returns a finding if no request can be sent to `address`."""
    if "ray" not in installed:
        text = f"The environment names a Ray cluster at {address}, but Ray is not installed."
        return Finding("ray", Level.ERROR, text, "pip install 'stratagem[ray]'")
    if not address.startswith(("http://", "https://")):
        text = f"RAY_API_SERVER_ADDRESS is {address!r}, which is not the URL of a Ray dashboard."
        return Finding("ray", Level.ERROR, text, "RAY_API_SERVER_ADDRESS=http://HOST:8265")
    return None


def _version_request(address: str, token: str) -> urllib.request.Request:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return urllib.request.Request(f"{address}/api/version", headers=headers)  # noqa: S310


def _refused(address: str, error: urllib.error.HTTPError, *, has_token: bool) -> Finding:
    error.close()
    if error.code not in (401, 403):
        text, fix = f"answers {error.code} {error.reason}", "see the log of the head."
    elif has_token:
        text, fix = (
            "refuses the token of this machine",
            "set RAY_AUTH_TOKEN to the cluster's token.",
        )
    else:
        text = "wants a token, and this machine has none"
        fix = "set RAY_AUTH_TOKEN to the cluster's token, or RAY_AUTH_TOKEN_PATH to its file."
    return Finding("ray", Level.ERROR, f"Ray's dashboard at {address} {text}.", fix)


def _token(variables: Mapping[str, str]) -> str:
    """Returns the token of Ray on this machine, "" for none."""
    if token := variables.get("RAY_AUTH_TOKEN", "").strip():
        return token
    path = variables.get("RAY_AUTH_TOKEN_PATH") or str(Path.home() / ".ray" / "auth_token")
    try:
        return Path(path).expanduser().read_text().strip()
    except OSError:
        return ""


def _dashboard(variables: Mapping[str, str]) -> str | None:
    api = variables.get("RAY_API_SERVER_ADDRESS")
    if api:
        return api.rstrip("/") if "://" in api else f"http://{api}"
    address = variables.get("RAY_ADDRESS", "")
    host = address.removeprefix("ray://").rpartition(":")[0]
    return f"http://{host}:{_DASHBOARD_PORT}" if host else None


_INITIAL_VARIABLES = Path("/proc/self/environ")


def examine(
    script: Path | None = None,
    probe: accelerators.Probe | None = None,
    *,
    has_cluster: bool = True,
) -> Iterator[Finding]:
    """Examines this machine; yields findings as they are made.

    Args:
        script: training script whose imports are checked, too.
        probe: devices that JAX found; by default JAX is started.
        has_cluster: False leaves out the cluster, for a survey of all of its hosts.
    """
    installed = versions.installed_versions()
    # The full set is needed to check requirements, such as ml_dtypes.
    required = versions.examined_requirements()
    yield from versions.check_requirements(required, versions.versions_for(required, installed))
    yield from versions.check_extras(required.get("stratagem", ()), installed)
    yield from versions.check_plugins(installed, required.get("jax", ()))
    variables = variables_of_user()
    yield from settings.check_settings(variables)
    if script is not None:
        yield from settings.check_script(script, settings.keras_backend(variables))
    yield from check_machine(read_limits())
    driver = accelerators.gpu_driver()
    yield from accelerators.check_gpu_driver(driver, installed)
    probe = probe or accelerators.probe_devices()
    yield from accelerators.check_devices(probe, installed, has_gpu=driver is not None)
    finds_nccl = ctypes.util.find_library("nccl") is not None
    nccl = versions.installed_versions(accelerators.NCCL_PACKAGES)
    yield from accelerators.check_nccl(
        probe.devices,
        {**installed, **nccl},
        has_driver=driver is not None,
        finds_library=finds_nccl,
    )
    if has_cluster:
        yield from clusters.examine_clusters()
    yield from check_ray(variables, installed)
    yield from _examine_caches(variables, installed)


def _examine_caches(
    variables: Mapping[str, str], installed: Mapping[str, str]
) -> Iterator[Finding]:
    cache = cache_dir()
    yield from check_cache(cache)
    variable = "JAX_COMPILATION_CACHE_DIR"
    chosen = variables.get(variable)
    if "://" not in str(chosen):
        yield from check_compilation_cache(
            Path(chosen) if chosen else programs_folder(cache),
            installed.get("jaxlib"),
            versions.installed_at_s("jaxlib"),
            variable if chosen else None,
        )


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
