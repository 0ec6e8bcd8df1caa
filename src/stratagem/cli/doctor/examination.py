"""The checks of a machine, in the order in which problems hide each other."""

from __future__ import annotations

import ctypes.util
import dataclasses
import json
import os
import resource
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from stratagem import environment
from stratagem.cli.doctor import accelerators, clusters, settings, versions
from stratagem.cli.doctor.findings import Finding, error, ok, under, warning
from stratagem.resources import available_cores, cache_dir

_INITIAL_VARIABLES = Path("/proc/self/environ")


def examine(
    script: Path | None = None,
    probe: accelerators.Probe | None = None,
    *,
    has_cluster: bool = True,
) -> Iterator[Finding]:
    """Examines this machine; yields findings as they are made.

    The imports of a training `script` are checked, too. `probe` has the devices that JAX found; by
    default JAX is started. `has_cluster` is False in a survey of all hosts of the cluster.
    """
    known = (*versions.PACKAGES, *accelerators.NCCL_PACKAGES)
    installed, variables = versions.installed_versions(known), variables_of_user()
    driver = accelerators.gpu_driver()

    def check_devices() -> Iterator[Finding]:
        yield from accelerators.check_gpu_driver(driver, installed)
        found = probe or accelerators.probe_devices()
        yield from accelerators.check_devices(found, installed, driver)
        finds_library = ctypes.util.find_library("nccl") is not None
        yield from accelerators.check_nccl(found, installed, driver, finds_library=finds_library)

    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "versions": lambda: versions.check_versions(versions.requirements(), installed),
        "settings": lambda: settings.check_settings(variables),
        "script": lambda: (
            ()
            if script is None
            else [settings.check_script(script, settings.keras_backend(variables))]
        ),
        "machine": lambda: check_machine(read_limits()),
        "devices": check_devices,
        "cluster": lambda: clusters.examine_clusters() if has_cluster else (),
        "ray": lambda: check_ray(variables, installed),
        "cache": lambda: check_caches(variables),
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


# Other things that a run relies on: a cluster of Ray, and caches.

_DASHBOARD_PORT = 8265
_ANSWER_LIMIT_S = 3.0


def check_ray(
    variables: Mapping[str, str], installed: Mapping[str, str], limit_s: float = _ANSWER_LIMIT_S
) -> Iterator[Finding]:
    """Compares Ray here with the cluster that the environment variables name."""
    url = _dashboard(variables)
    if url and "ray" not in installed:
        text = f"The environment names a Ray cluster at {url}, but Ray is not installed."
        yield error(text, "pip install 'stratagem[ray]'")
    elif url and not url.startswith(("http://", "https://")):
        text = f"RAY_API_SERVER_ADDRESS is {url!r}, which is not the URL of a Ray dashboard."
        yield error(text, "RAY_API_SERVER_ADDRESS=http://HOST:8265")
    elif url:
        yield _asked_ray(url, _token(variables), installed["ray"], limit_s)


def _asked_ray(url: str, token: str, own: str, limit_s: float) -> Finding:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"{url}/api/version", headers=headers)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=limit_s) as answer:  # noqa: S310
            version: Any = json.load(answer).get("ray_version")
    except urllib.error.HTTPError as refused:
        refused.close()
        text, fix = f"answers {refused.code} {refused.reason}", "see the log of the head."
        if refused.code in (401, 403):
            text = "wants a token, and this machine has none"
            text = "refuses the token of this machine" if token else text
            fix = "set RAY_AUTH_TOKEN to the cluster's token, or RAY_AUTH_TOKEN_PATH to its file."
        return error(f"Ray's dashboard at {url} {text}.", fix)
    except (OSError, ValueError, AttributeError) as reason:
        return warning(
            f"Ray's dashboard at {url} does not answer: {reason}",
            "start the head with ray start --head --dashboard-host=0.0.0.0, or correct "
            "RAY_API_SERVER_ADDRESS.",
        )
    if version != own:
        return error(
            f"Ray is {own} here and {version} on the cluster; they must be equal.",
            f'pip install "ray[default]=={version}"',
        )
    return ok(f"Ray {version} answers at {url}.")


def _dashboard(variables: Mapping[str, str]) -> str:
    """Returns the URL of the cluster's dashboard; "" if the environment names no cluster."""
    if api := variables.get("RAY_API_SERVER_ADDRESS"):
        return api.rstrip("/") if "://" in api else f"http://{api}"
    host = variables.get("RAY_ADDRESS", "").removeprefix("ray://").rpartition(":")[0]
    return f"http://{host}:{_DASHBOARD_PORT}" if host else ""


def _token(variables: Mapping[str, str]) -> str:
    """Returns the token of Ray on this machine, "" for none."""
    if token := variables.get("RAY_AUTH_TOKEN", "").strip():
        return token
    path = variables.get("RAY_AUTH_TOKEN_PATH") or str(Path.home() / ".ray" / "auth_token")
    try:
        return Path(path).expanduser().read_text().strip()
    except OSError:
        return ""


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
