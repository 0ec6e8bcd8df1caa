"""Broken environments: `stratagem doctor` names each problem and its fix, and only where it is.

Each environment is made for a process of its own: by limits, mounts, network namespaces, sockets,
or files that the process finds first. A row says what is not real.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.namespaces import can_make_hosts, hosts

pytestmark = pytest.mark.slow

_SOURCE = Path(__file__).parents[2] / "src"
_LIMIT_S = 120
_CANNOT_MOUNT = "needs root, to mount in a namespace"
_CANNOT_MAKE_HOSTS = "needs root and iproute2, to make network namespaces"
_SKEW_S = 90


@dataclasses.dataclass(frozen=True)
class Setup:
    """How a process gets into the environment: its arguments, variables and what starts it."""

    arguments: Sequence[str] = ()
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prefix: Sequence[str] = ()
    folder: Path | None = None


@dataclasses.dataclass(frozen=True)
class Broken:
    """A row: an environment, and the words of its finding and of the fix.

    `level` "error" means exit code 1, "warning" 0. `needs` names what cannot be made everywhere.
    """

    make: Callable[[Path], contextlib.AbstractContextManager[Setup]]
    text: tuple[str, ...]
    fix: tuple[str, ...]
    level: str = "error"
    needs: str = ""


def _run(setup: Setup, home: Path) -> tuple[int, list[dict[str, Any]]]:
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KERAS_", "JAX_", "XLA_", "RAY_", "STRATAGEM_"))
    }
    extra = setup.variables.get("PYTHONPATH")
    own = {
        "JAX_PLATFORMS": "cpu",
        "HOME": str(home),
        **setup.variables,
        "PYTHONPATH": os.pathsep.join(filter(None, (extra, str(_SOURCE)))),
    }
    finished = subprocess.run(
        [*setup.prefix, sys.executable, "-m", "stratagem", "doctor", "--json", *setup.arguments],
        env={**variables, **own},
        cwd=setup.folder or home,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    assert finished.returncode in (0, 1), finished.stderr
    printed = json.loads(finished.stdout)
    return finished.returncode, printed if isinstance(printed, list) else printed["findings"]


def _matching(findings: Sequence[Mapping[str, str]], row: Broken) -> list[Mapping[str, str]]:
    return [one for one in findings if all(words in one["text"] for words in row.text)]


def _mounted(script: str) -> list[str]:
    """A command that runs another one after a script, with mounts of its own."""
    return ["unshare", "-m", "sh", "-ec", f'{script}; exec "$@"', "sh"]


def _limited(script: str) -> list[str]:
    return ["sh", "-ec", f'{script}; exec "$@"', "sh"]


def _install(folder: Path, package: str, version: str) -> Path:
    """Writes the metadata of a package, and nothing else, into a folder."""
    metadata = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    )
    return folder


def _of(**fields: Any) -> Callable[[Path], contextlib.AbstractContextManager[Setup]]:
    """An environment that needs no preparation."""
    return lambda folder: contextlib.nullcontext(Setup(**fields))


def _tf_config(text: str) -> Callable[[Path], contextlib.AbstractContextManager[Setup]]:
    return _of(variables={"TF_CONFIG": text})


def _cluster(addresses: Sequence[str], index: object = 0, kind: str = "worker") -> str:
    task = {"type": kind, "index": index}
    return json.dumps({"cluster": {"worker": list(addresses)}, "task": task})


@contextlib.contextmanager
def _old_jaxlib(folder: Path) -> Iterator[Setup]:
    """An older jaxlib before the installed one: its metadata and its version, no code."""
    _install(folder, "jaxlib", "0.4.30")
    (folder / "jaxlib").mkdir()
    (folder / "jaxlib" / "__init__.py").write_text("")
    (folder / "jaxlib" / "version.py").write_text("__version__ = '0.4.30'\n")
    yield Setup(variables={"PYTHONPATH": str(folder)})


@contextlib.contextmanager
def _other_plugin(folder: Path) -> Iterator[Setup]:
    """Metadata of a plugin for another jaxlib."""
    yield Setup(variables={"PYTHONPATH": str(_install(folder, "jax-cuda12-plugin", "0.9.0"))})


@contextlib.contextmanager
def _without_nccl(folder: Path) -> Iterator[Setup]:
    """A machine without NCCL; the driver's file and the plugin's metadata are made up."""
    version = _version_of("jaxlib")
    _install(folder, "jax-cuda12-plugin", version)
    driver = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Release Build"
    script = (
        "mount -t tmpfs none /proc/driver; mkdir /proc/driver/nvidia; "
        f"echo '{driver}' > /proc/driver/nvidia/version"
    )
    yield Setup(variables={"PYTHONPATH": str(folder)}, prefix=_mounted(script))


@contextlib.contextmanager
def _taken_port(folder: Path) -> Iterator[Setup]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        own = f"127.0.0.1:{listener.getsockname()[1]}"
        yield Setup(variables={"TF_CONFIG": _cluster([own, "127.0.0.1:9"])})


@contextlib.contextmanager
def _lost_host(folder: Path) -> Iterator[Setup]:
    """A network of two addresses, one of which no machine has."""
    with hosts(1, "10.94.0") as ((command, own),):
        yield Setup(variables={"TF_CONFIG": _cluster([own, "10.94.0.9:2222"])}, prefix=command)


@contextlib.contextmanager
def _host_without_route(folder: Path) -> Iterator[Setup]:
    with hosts(1, "10.95.0") as ((command, own),):
        yield Setup(variables={"TF_CONFIG": _cluster([own, "10.96.0.1:2222"])}, prefix=command)


@contextlib.contextmanager
def _skewed(folder: Path, offset_s: float = _SKEW_S) -> Iterator[Setup]:
    """A second task whose Python has another clock: the machine's own cannot be set."""
    (folder / "sitecustomize.py").write_text(
        f"import time\n_true = time.time\ntime.time = lambda: _true() + {offset_s}\n"
    )
    addresses = [f"127.0.0.1:{_closed_port()}" for _ in range(2)]
    other = subprocess.Popen(
        [sys.executable, "-m", "stratagem", "doctor", "--cluster"],
        env={
            **os.environ,
            "TF_CONFIG": _cluster(addresses, 1),
            "PYTHONPATH": f"{folder}{os.pathsep}{_SOURCE}",
        },
        stdout=subprocess.DEVNULL,
    )
    try:
        yield Setup(
            ["--cluster", "--wait", "60", "--transfer", "0.05"],
            {"TF_CONFIG": _cluster(addresses, 0)},
        )
    finally:
        other.kill()
        other.wait()


def _script(text: str) -> Callable[[Path], contextlib.AbstractContextManager[Setup]]:
    @contextlib.contextmanager
    def make(folder: Path) -> Iterator[Setup]:
        (folder / "train.py").write_text(text)
        yield Setup([str(folder / "train.py")])

    return make


@contextlib.contextmanager
def _configured_tensorflow(folder: Path) -> Iterator[Setup]:
    (folder / ".keras").mkdir()
    (folder / ".keras" / "keras.json").write_text('{"backend": "tensorflow"}')
    (folder / "train.py").write_text("import keras\nimport stratagem as sg\n")
    yield Setup([str(folder / "train.py")], {"HOME": str(folder)})


@contextlib.contextmanager
def _full_disk(folder: Path) -> Iterator[Setup]:
    """The folder of the run is a file system of 1 MiB that another program has filled."""
    script = (
        f"mount -t tmpfs -o size=1m none '{folder}'; cd '{folder}'; head -c 1048576 /dev/zero > x"
    )
    yield Setup(prefix=_mounted(script))


@contextlib.contextmanager
def _full_of_files(folder: Path) -> Iterator[Setup]:
    yield Setup(
        prefix=_mounted(f"mount -t tmpfs -o nr_inodes=9 none '{folder}'; cd '{folder}'; touch a")
    )


@contextlib.contextmanager
def _other_ray(folder: Path) -> Iterator[Setup]:
    """A real Ray cluster; the version here is that of metadata."""
    port, dashboard = _closed_port(), _closed_port()
    sizes = ["--num-cpus=1", "--object-store-memory=80000000", f"--temp-dir={folder}/ray"]
    ports = [f"--port={port}", f"--dashboard-port={dashboard}", "--min-worker-port=0"]
    head = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *sizes, *ports,
         "--max-worker-port=0", "--ray-client-server-port=0", "--disable-usage-stats"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={name: text for name, text in os.environ.items() if not name.startswith("RAY_")},
    )  # fmt: skip
    try:
        deadline_s = time.monotonic() + _LIMIT_S
        while not _answers(dashboard):
            assert head.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.2)
        _install(folder / "packages", "ray", "2.59.1")
        yield Setup(
            variables={
                "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}",
                "PYTHONPATH": str(folder / "packages"),
            }
        )
    finally:
        head.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(head.pid, signal.SIGKILL)
        head.wait()


@contextlib.contextmanager
def _old_ray(folder: Path) -> Iterator[Setup]:
    """Metadata of a Ray that is too old for the extra."""
    yield Setup(variables={"PYTHONPATH": str(_install(folder, "ray", "2.9.0"))})


_COMPILE = """
import jax
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.jit(lambda x: x + 1)(1.0).block_until_ready()
"""


def _write_cache(cache: Path) -> None:
    """Lets JAX write its cache."""
    variables = {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(cache)}
    subprocess.run([sys.executable, "-c", _COMPILE], check=True, env={**os.environ, **variables})
    assert list(cache.glob("*-cache"))


@contextlib.contextmanager
def _stale_cache(folder: Path) -> Iterator[Setup]:
    """A cache that JAX wrote, and a jaxlib that is installed afterwards: only its metadata."""
    _write_cache(folder / "cache")
    time.sleep(0.05)  # file systems record times of this resolution
    _install(folder / "packages", "jaxlib", _version_of("jaxlib"))
    yield Setup(
        variables={
            "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
            "PYTHONPATH": str(folder / "packages"),
        }
    )


@contextlib.contextmanager
def _read_only_cache(folder: Path) -> Iterator[Setup]:
    _write_cache(folder / "cache")
    path = f"'{folder / 'cache'}'"
    yield Setup(
        variables={"JAX_COMPILATION_CACHE_DIR": str(folder / "cache")},
        prefix=_mounted(f"mount --bind {path} {path}; mount -o remount,bind,ro {path}"),
    )


_MOUNT, _HOSTS = "mount", "hosts"
_ADDRESSES = ["127.0.0.1:9", "127.0.0.1:10"]
_ROWS = {
    "wrong jaxlib": Broken(
        _old_jaxlib,
        ("jaxlib 0.4.30 is installed", "jax requires jaxlib"),
        ("pip install", "jaxlib"),
    ),
    "wrong jaxlib stops jax": Broken(
        _old_jaxlib, ("JAX did not start", "jaxlib"), ("pip install --upgrade jax jaxlib",)
    ),
    "plugin for another jaxlib": Broken(
        _other_plugin, ("jax-cuda12-plugin 0.9.0", "another jaxlib"), ("jax-cuda12-plugin==",)
    ),
    "missing NCCL": Broken(
        _without_nccl, ("NCCL is not installed",), ("pip install nvidia-nccl-cu12",), needs=_MOUNT
    ),
    "port taken": Broken(
        _taken_port, ("Another program uses 127.0.0.1:",), ("ss -ltnp", "another port")
    ),
    "small shared memory": Broken(
        _of(prefix=_mounted("mount -t tmpfs -o size=64k none /dev/shm")),
        ("/dev/shm has 64 KiB",),
        ("--shm-size", "medium: Memory"),
        "warning",
        _MOUNT,
    ),
    "host that is away": Broken(
        _lost_host,
        ("worker 1 at 10.94.0.9:2222 cannot be reached",),
        ("firewall", "route"),
        needs=_HOSTS,
    ),
    "host without a route": Broken(
        _host_without_route,
        ("worker 1 at 10.96.0.1:2222 cannot be reached", "unreachable"),
        ("route",),
        needs=_HOSTS,
    ),
    "host without a name": Broken(
        _tf_config(_cluster(["127.0.0.1:9", "no-such-host.invalid:9"])),
        # A cluster with one loopback address is refused before any name is looked up.
        ("worker 0 has the loopback address",),
        ("host's name or IP address",),
    ),
    "clock skew": Broken(
        _skewed, ("clock of worker 1 is 90.0", "ahead of worker 0"), ("chrony",), "warning"
    ),
    "clock skew beyond signed requests": Broken(
        lambda folder: _skewed(folder, -1000), ("clock of worker 1", "behind"), ("chrony",)
    ),
    "TF_CONFIG that is no JSON": Broken(
        _tf_config("{'cluster': {}}"), ("TF_CONFIG is not JSON",), ("json.dumps",)
    ),
    "TF_CONFIG without its cluster": Broken(
        _tf_config('{"worker": ["a:1"]}'), ("has no key 'cluster'",), ('{"cluster"',), "warning"
    ),
    "TF_CONFIG without the port": Broken(
        _tf_config(_cluster(["a", "b"])), ("TF_CONFIG", "'a' is not of the form"), ("host0:2222",)
    ),
    "TF_CONFIG with an index too high": Broken(
        _tf_config(_cluster(_ADDRESSES, 2)), ("index 2 is outside",), ("from 0",)
    ),
    "TF_CONFIG with an unknown type": Broken(
        _tf_config(_cluster(_ADDRESSES, kind="wroker")), ("'wroker' is unknown",), ("type",)
    ),
    "TF_CONFIG with one address twice": Broken(
        _tf_config(_cluster(["10.0.0.1:9", "10.0.0.1:9"])),
        ("same address '10.0.0.1:9'",),
        ("different ports",),
    ),
    "Keras first": Broken(
        _script("import keras\nimport stratagem as sg\n"),
        ("train.py:1 imports keras before stratagem (line 2)", "tensorflow backend"),
        ("move `import stratagem` above", "KERAS_BACKEND=jax"),
    ),
    "Keras first, configured for TensorFlow": Broken(
        _configured_tensorflow, ("train.py:1", "tensorflow backend"), ("KERAS_BACKEND=jax",)
    ),
    "Keras on TensorFlow": Broken(
        _of(variables={"KERAS_BACKEND": "tensorflow"}),
        ("KERAS_BACKEND=tensorflow", "jax backend only"),
        ("unset KERAS_BACKEND",),
    ),
    "Keras of TensorFlow": Broken(
        _script("import stratagem as sg\nimport tensorflow as tf\ntf.keras.Model()\n"),
        ("train.py:3 uses tf.keras",),
        ("stratagem migrate",),
    ),
    "disk full": Broken(
        _full_disk, ("disk-full0 has 0 KiB free",), ("remove files", "TMPDIR"), needs=_MOUNT
    ),
    "disk full of files": Broken(
        _full_of_files, ("disk-full-of-files0 has room for", "inodes"), ("df -i",), needs=_MOUNT
    ),
    "low file limit": Broken(
        _of(prefix=_limited("ulimit -Sn 256")), ("may open 256 files",), ("ulimit -n",), "warning"
    ),
    "low hard file limit": Broken(
        _of(prefix=_limited("ulimit -n 256")),
        ("may open 256 files",),
        ("hard limit, 256", "--ulimit nofile"),
        "warning",
    ),
    "Ray of another version": Broken(
        _other_ray, ("Ray is 2.59.1 here and",), ('pip install "ray[default]==',)
    ),
    "Ray that is too old": Broken(
        _old_ray, ("ray 2.9.0 is installed", "requires ray"), ("pip install",), "warning"
    ),
    "stale compilation cache": Broken(
        _stale_cache, ("compiled programs in", "older than jaxlib"), ("rm -r",), "warning"
    ),
    "read-only compilation cache": Broken(
        _read_only_cache,
        ("JAX_COMPILATION_CACHE_DIR cannot be written", "read-only"),
        ("mount it writable",),
        "warning",
        _MOUNT,
    ),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Findings of this machine, without anything broken: alone, with a script, in a cluster."""
    home = tmp_path_factory.mktemp("sound")
    (home / "train.py").write_text("import stratagem as sg\nimport keras\n")
    cache = home / "cache"
    _write_cache(cache)
    variables = {"JAX_COMPILATION_CACHE_DIR": str(cache)}
    _, findings = _run(Setup([str(home / "train.py")], variables), home)
    own = {"TF_CONFIG": _cluster([f"127.0.0.1:{_closed_port()}" for _ in range(2)])}
    _, in_cluster = _run(Setup(variables=own), home)
    (home / "true").mkdir()
    with _skewed(home / "true", 0.0) as setup:
        _, together = _run(setup, home)
    assert any("reach each other" in one["text"] for one in together)
    assert any("can be reached" in one["text"] for one in in_cluster)
    return [*findings, *in_cluster, *together]


@pytest.mark.parametrize("name", _ROWS)
def test_problem_is_named_with_its_fix(
    name: str, sound: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    row = _ROWS[name]
    if row.needs == _MOUNT and not _can_mount():
        pytest.skip(_CANNOT_MOUNT)
    if row.needs == _HOSTS and not can_make_hosts():
        pytest.skip(_CANNOT_MAKE_HOSTS)
    home = tmp_path_factory.mktemp("home")
    with row.make(tmp_path_factory.mktemp(name.replace(" ", "-"))) as setup:
        code, findings = _run(setup, home)
    found = _matching(findings, row)
    assert len(found) == 1, findings
    assert found[0]["level"] == row.level
    assert all(words in found[0]["fix"] for words in row.fix), found
    is_fatal = any(one["level"] == "error" for one in findings)
    assert code == int(is_fatal)
    assert is_fatal or row.level == "warning"
    assert _matching(sound, row) == []


def test_sound_machine_can_train(sound: list[dict[str, Any]]) -> None:
    assert [one for one in sound if one["level"] == "error"] == []


def test_nccl_package_is_found(tmp_path: Path) -> None:
    if not _can_mount():
        pytest.skip(_CANNOT_MOUNT)
    with _without_nccl(tmp_path / "packages") as setup:
        _install(tmp_path / "packages", "nvidia-nccl-cu12", "2.28.9")
        _, findings = _run(setup, tmp_path)
    assert any("NVIDIA driver 570.86.15" in one["text"] for one in findings)
    assert not any("NCCL is not installed" in one["text"] for one in findings)


def _can_mount() -> bool:
    try:
        return subprocess.run([*_mounted("mount -t tmpfs none /mnt"), "true"]).returncode == 0
    except FileNotFoundError:
        return False


def _version_of(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def _closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
