"""Broken environments for one process: mounts, sockets, and files that it finds first."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[4] / "src"


@dataclasses.dataclass(frozen=True)
class Setup:
    """How a process gets into the environment: its arguments, variables and what starts it."""

    arguments: Sequence[str] = ()
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prefix: Sequence[str] = ()


def mounted(script: str) -> list[str]:
    """A command that runs another one after a script, with mounts of its own."""
    return ["unshare", "-m", "sh", "-ec", f'{script}; exec "$@"', "sh"]


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
def with_another_task(variables: Mapping[str, str]) -> Iterator[Setup]:
    """A second task with other variables."""
    addresses = [f"127.0.0.1:{closed_port()}" for _ in range(2)]
    other = subprocess.Popen(
        [sys.executable, "-m", "stratagem", "doctor", "--cluster"],
        env={
            **os.environ,
            "TF_CONFIG": cluster(addresses, 1),
            "PYTHONPATH": str(SOURCE),
            **variables,
        },
        stdout=subprocess.DEVNULL,
    )
    try:
        yield Setup(["--cluster", "--wait", "60"], {"TF_CONFIG": cluster(addresses, 0)})
    finally:
        other.kill()
        other.wait()


@contextlib.contextmanager
def full_of_files(folder: Path) -> Iterator[Setup]:
    yield Setup(
        prefix=mounted(f"mount -t tmpfs -o nr_inodes=9 none '{folder}'; cd '{folder}'; touch a")
    )


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
