"""Broken environments for one process: limits, mounts, networks, sockets, and files found first."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from tests.multiprocess.namespaces import hosts
from tests.unit.launch.remote.living import descendants

SOURCE = Path(__file__).parents[4] / "src"
_LIMIT_S = 120
_SKEW_S = 90


@dataclasses.dataclass(frozen=True)
class Setup:
    """How a process gets into the environment: its arguments, variables and what starts it."""

    arguments: Sequence[str] = ()
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prefix: Sequence[str] = ()


def mounted(script: str) -> list[str]:
    """A command that runs another one after a script, with mounts of its own."""
    return ["unshare", "-m", "sh", "-ec", f'{script}; exec "$@"', "sh"]


def limited(script: str) -> list[str]:
    return ["sh", "-ec", f'{script}; exec "$@"', "sh"]


def install(folder: Path, package: str, version: str) -> Path:
    """Writes the metadata of a package, and nothing else, into a folder."""
    metadata = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    )
    return folder


def of(**fields: Any) -> Callable[[Path], contextlib.AbstractContextManager[Setup]]:
    """An environment that needs no preparation."""
    return lambda folder: contextlib.nullcontext(Setup(**fields))


def cluster(addresses: Sequence[str], index: int = 0, kind: str = "worker") -> str:
    task = {"type": kind, "index": index}
    return json.dumps({"cluster": {"worker": list(addresses)}, "task": task})


@contextlib.contextmanager
def old_jaxlib(folder: Path) -> Iterator[Setup]:
    """An older jaxlib before the installed one: its metadata and its version, no code."""
    install(folder, "jaxlib", "0.4.30")
    (folder / "jaxlib").mkdir()
    (folder / "jaxlib" / "__init__.py").write_text("")
    (folder / "jaxlib" / "version.py").write_text("__version__ = '0.4.30'\n")
    yield Setup(variables={"PYTHONPATH": str(folder)})


@contextlib.contextmanager
def other_plugin(folder: Path) -> Iterator[Setup]:
    """Metadata of a plugin for another jaxlib."""
    yield Setup(variables={"PYTHONPATH": str(install(folder, "jax-cuda12-plugin", "0.9.0"))})


@contextlib.contextmanager
def without_nccl(folder: Path) -> Iterator[Setup]:
    """A machine without NCCL; the driver's file and the plugin's metadata are made up."""
    version = version_of("jaxlib")
    install(folder, "jax-cuda12-plugin", version)
    driver = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Release Build"
    script = (
        "mount -t tmpfs none /proc/driver; mkdir /proc/driver/nvidia; "
        f"echo '{driver}' > /proc/driver/nvidia/version"
    )
    yield Setup(variables={"PYTHONPATH": str(folder)}, prefix=mounted(script))


@contextlib.contextmanager
def lost_host(folder: Path) -> Iterator[Setup]:
    """A network of two addresses, one of which no machine has."""
    with hosts(1, "10.94.0") as ((command, own),):
        yield Setup(variables={"TF_CONFIG": cluster([own, "10.94.0.9:2222"])}, prefix=command)


@contextlib.contextmanager
def host_without_route(folder: Path) -> Iterator[Setup]:
    with hosts(1, "10.95.0") as ((command, own),):
        yield Setup(variables={"TF_CONFIG": cluster([own, "10.96.0.1:2222"])}, prefix=command)


@contextlib.contextmanager
def skewed(folder: Path, offset_s: float = _SKEW_S) -> Iterator[Setup]:
    """A second task whose Python has another clock: the machine's own cannot be set."""
    (folder / "sitecustomize.py").write_text(
        f"import time\n_true = time.time\ntime.time = lambda: _true() + {offset_s}\n"
    )
    addresses = [f"127.0.0.1:{closed_port()}" for _ in range(2)]
    other = subprocess.Popen(
        [sys.executable, "-m", "stratagem", "doctor", "--cluster"],
        env={
            **os.environ,
            "TF_CONFIG": cluster(addresses, 1),
            "PYTHONPATH": f"{folder}{os.pathsep}{SOURCE}",
        },
        stdout=subprocess.DEVNULL,
    )
    try:
        yield Setup(["--cluster", "--wait", "60"], {"TF_CONFIG": cluster(addresses, 0)})
    finally:
        other.kill()
        other.wait()


@contextlib.contextmanager
def configured_tensorflow(folder: Path) -> Iterator[Setup]:
    (folder / ".keras").mkdir()
    (folder / ".keras" / "keras.json").write_text('{"backend": "tensorflow"}')
    (folder / "train.py").write_text("import keras\nimport stratagem as sg\n")
    yield Setup([str(folder / "train.py")], {"HOME": str(folder)})


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[Setup]:
    """The folder of the run is a file system of 1 MiB that another program has filled."""
    script = (
        f"mount -t tmpfs -o size=1m none '{folder}'; cd '{folder}'; head -c 1048576 /dev/zero > x"
    )
    yield Setup(prefix=mounted(script))


@contextlib.contextmanager
def full_of_files(folder: Path) -> Iterator[Setup]:
    yield Setup(
        prefix=mounted(f"mount -t tmpfs -o nr_inodes=9 none '{folder}'; cd '{folder}'; touch a")
    )


@contextlib.contextmanager
def other_ray(folder: Path) -> Iterator[Setup]:
    """A real Ray cluster; the version here is that of metadata."""
    ports = [closed_port() for _ in range(3)]
    names = ("port", "dashboard-port", "ray-client-server-port")
    words = [f"--{name}={port}" for name, port in zip(names, ports, strict=True)]
    words += ["--min-worker-port=0", "--max-worker-port=0", "--num-cpus=1", "--disable-usage-stats"]
    install(folder, "ray", "2.59.1")
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
    dashboard = f"http://127.0.0.1:{ports[1]}"
    # Paths of its sockets are limited to 107 characters: no folder of pytest.
    with tempfile.TemporaryDirectory(prefix="sg-", ignore_cleanup_errors=True) as ray_folder:
        words += ["--object-store-memory=80000000", f"--temp-dir={ray_folder}"]
        head = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **token, "HOME": ray_folder},
        )
        try:
            deadline_s = time.monotonic() + _LIMIT_S
            while not _answers(f"{dashboard}/api/version"):
                assert head.poll() is None
                assert time.monotonic() < deadline_s
                time.sleep(0.5)
            variables = {"RAY_API_SERVER_ADDRESS": dashboard, "PYTHONPATH": str(folder)}
            yield Setup(variables={**token, **variables})
        finally:
            started = descendants(head.pid)
            head.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                head.wait(120)
            for pid in (*started, head.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            head.wait()


@contextlib.contextmanager
def old_ray(folder: Path) -> Iterator[Setup]:
    """Metadata of a Ray that is too old for the extra."""
    yield Setup(variables={"PYTHONPATH": str(install(folder, "ray", "2.9.0"))})


_COMPILE = """
import jax
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.jit(lambda x: x + 1)(1.0).block_until_ready()
"""


def write_cache(cache: Path) -> None:
    """Lets JAX write its cache."""
    variables = {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(cache)}
    subprocess.run([sys.executable, "-c", _COMPILE], check=True, env={**os.environ, **variables})
    assert list(cache.glob("*-cache"))


@contextlib.contextmanager
def stale_cache(folder: Path) -> Iterator[Setup]:
    """A cache that JAX wrote, and a jaxlib that is installed afterwards: only its metadata."""
    write_cache(folder / "cache")
    time.sleep(0.05)  # file systems record times of this resolution
    install(folder / "packages", "jaxlib", version_of("jaxlib"))
    yield Setup(
        variables={
            "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
            "PYTHONPATH": str(folder / "packages"),
        }
    )


@contextlib.contextmanager
def read_only_cache(folder: Path) -> Iterator[Setup]:
    write_cache(folder / "cache")
    path = f"'{folder / 'cache'}'"
    yield Setup(
        variables={"JAX_COMPILATION_CACHE_DIR": str(folder / "cache")},
        prefix=mounted(f"mount --bind {path} {path}; mount -o remount,bind,ro {path}"),
    )


def can_mount() -> bool:
    try:
        return subprocess.run([*mounted("mount -t tmpfs none /mnt"), "true"]).returncode == 0
    except FileNotFoundError:
        return False


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=1).close()
    except urllib.error.HTTPError as error:  # without a token
        error.close()
        return True
    except OSError:
        return False
    return True
