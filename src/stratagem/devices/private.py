"""Private names of JAX and Python used here, with the reason for each.

`jaxlib._jax.make_gloo_tcp_collectives`: by default Gloo resolves the host name to find the address
that other processes connect to. If it resolves to 127.0.1.1, as Debian puts into /etc/hosts, or to
another network than the processes share, no other host can connect. JAX has no setting for the
address (0.10 to 0.12). The thread that Gloo starts there runs under SCHED_BATCH, in which a waking
thread preempts no other. Otherwise it wakes for each message, preempts the thread that computes,
finds the connection's lock held by that thread, and spins until its time slice ends 4 ms later.
Median of 200 sums of 64 KiB between two processes on one core each: 4.0 ms, and 0.30 ms with
SCHED_BATCH.

`jax._src.compiler._cache_write`, `jax._src.compilation_cache.put_executable_and_time`: JAX writes
its compilation cache from process 0 alone, to spare a bucket thousands of writers. But each process
has its own programs, and would find none there (0.10 to 0.12). On one machine each may write.

`jax._src.lru_cache.LRUCache.put`: it writes an entry in place. A process that is killed leaves part
of it, and every later start then warns that it cannot read the entry, and never replaces it (0.10
to 0.12). The replacement writes a file of another name, and renames it.

`jaxlib._jax.get_distributed_runtime_service`, `get_distributed_runtime_client`, `jaxlib.xla_client.
make_cpu_client` and `jax._src.distributed.global_state`: JAX learns the devices of all processes by
its coordination service, and ends all processes if that is lost. Each process of an elastic group
has a service of its own, where it takes the part of the others as well, so that it knows their
devices and depends on none of them (0.10 to 0.12). A plan for 64 replicas compiles for as many CPU
devices, and JAX cannot get more of them once it has started: another client has them.

`jax._src.array.ArrayImpl`: JAX refuses to add arrays that are committed to different devices, as
the parts of a sharded array are. One that is not committed is moved where it is needed, when it is
needed; there is no public function that returns such an array without a copy (0.10 to 0.12).

`jax._src.config.trace_context`: all settings that change what JAX traces, such as
`jax.default_matmul_precision` and `jax.enable_x64`, in a tuple; there is no public name (0.10 to
0.12). Without it, a step that is traced already would ignore them.

`sys._current_frames`, `os._exit`: documented by Python, for specialists.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Generator
from typing import Any, NoReturn

import jax
from jax.core import Tracer

# Those of the paragraphs above. `python -m validation latest` names the ones that a new JAX lacks.
NAMES = (
    "jax._src.compilation_cache.put_executable_and_time",
    "jax._src.compiler._cache_write",
    "jax._src.config.trace_context",
    "jax._src.distributed.global_state",
    "jax._src.lru_cache.LRUCache.put",
    "jaxlib._jax.get_distributed_runtime_client",
    "jaxlib._jax.get_distributed_runtime_service",
    "jaxlib._jax.make_gloo_tcp_collectives",
    "jaxlib.xla_client.make_cpu_client",
)

_MAKER = "make_gloo_tcp_collectives"
_WRITER, _PUT = "_cache_write", "put_executable_and_time"


@contextlib.contextmanager
def gloo_bound_to(address: str) -> Generator[None]:
    """Makes Gloo listen at an address while JAX's CPU backend starts; other processes use it."""
    try:
        library: Any = importlib.import_module("jaxlib._jax")
        original = getattr(library, _MAKER)
    except (ImportError, AttributeError):
        yield
        return

    def make(*args: object, **kwargs: object) -> Any:
        with _starting_batch_threads():
            return original(*args, hostname=address, **kwargs)

    setattr(library, _MAKER, make)
    try:
        yield
    finally:
        setattr(library, _MAKER, original)


@contextlib.contextmanager
def _starting_batch_threads() -> Generator[None]:
    """Threads started within the block preempt no other thread when they wake (Linux only)."""
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def enable_compilation_cache() -> None:
    """Lets a process other than process 0 write to JAX's compilation cache on disk."""
    try:
        compiler: Any = importlib.import_module("jax._src.compiler")
        put: Any = getattr(importlib.import_module("jax._src.compilation_cache"), _PUT)
        original = getattr(compiler, _WRITER)
    except (ImportError, AttributeError):
        return

    def write(
        cache_key: str,
        compile_time_s: float,
        module_name: str,
        backend: object,
        executable: object,
        *host_callbacks: object,
    ) -> None:
        original(cache_key, compile_time_s, module_name, backend, executable, *host_callbacks)
        # A program that calls back into Python holds addresses of this process.
        if not any(host_callbacks):
            with contextlib.suppress(Exception):  # without the cache everything still works
                put(cache_key, module_name, executable, backend, int(compile_time_s))

    setattr(compiler, _WRITER, write)


def write_cache_entries_whole() -> bool:
    """Makes JAX write each entry of its compilation cache whole or not at all.

    Returns False if this version of JAX cannot be made to.
    """
    try:
        cache: Any = importlib.import_module("jax._src.lru_cache").LRUCache
        original = cache.put
    except (ImportError, AttributeError):
        return False
    if hasattr(original, "__wrapped__"):
        return True

    @functools.wraps(original)
    def put(self: Any, key: str, value: bytes) -> None:
        folder = str(self.path)
        if self.eviction_enabled or "://" in folder:  # under a lock, or not in a file system
            original(self, key, value)
            return
        path = os.path.join(folder, f"{key}-cache")
        if os.path.exists(path):
            return
        descriptor, name = tempfile.mkstemp(dir=folder)
        try:
            with open(descriptor, "wb") as file:
                file.write(value)
            os.replace(name, path)
        except OSError:  # such as a full disk; JAX warns
            os.unlink(name)
            raise

    cache.put = put
    return True


class SeparateNodes:
    """A coordination service of JAX in this process, with this process as all of its nodes."""

    def __init__(self, port: int, num_nodes: int, own: int) -> None:
        library: Any = importlib.import_module("jaxlib._jax")
        state: Any = importlib.import_module("jax._src.distributed").global_state
        self.others = [node for node in range(num_nodes) if node != own]
        self._num_nodes = num_nodes
        address = f"127.0.0.1:{port}"
        self._service = library.get_distributed_runtime_service(address, num_nodes)
        self._clients = [
            library.get_distributed_runtime_client(
                address, node, init_timeout=60, shutdown_on_destruction=False
            )
            for node in range(num_nodes)
        ]
        _in_threads([client.connect for client in self._clients])
        state.client, state.process_id, state.num_processes = self._clients[own], own, num_nodes

    def start_other(self, node: int) -> None:
        """Takes the part of another node while JAX starts on this one."""
        library: Any = importlib.import_module("jaxlib.xla_client")
        library.make_cpu_client(
            asynchronous=True,
            distributed_client=self._clients[node],
            node_id=node,
            num_nodes=self._num_nodes,
            num_devices=1,
        )

    def close(self) -> None:
        """Ends the service."""
        _in_threads([client.shutdown for client in self._clients])
        self._service.shutdown()


@functools.cache  # a client has threads of its own
def more_cpu_devices(count: int) -> tuple[Any, ...]:
    """Returns CPU devices to compile for, besides those that JAX has started with."""
    library: Any = importlib.import_module("jaxlib.xla_client")
    return tuple(library.make_cpu_client(num_devices=count).devices())


def _in_threads(functions: list[Any]) -> None:
    """Calls functions that wait for each other."""
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def uncommitted(value: Any) -> Any:
    """Returns an array of one device that JAX may move to where it is used; others unchanged."""
    if not isinstance(value, jax.Array) or isinstance(value, Tracer):
        return value
    is_key = jax.numpy.issubdtype(value.dtype, jax.dtypes.extended)
    if is_key or not value.committed or len(value.sharding.device_set) != 1:
        return value
    try:
        make: Any = importlib.import_module("jax._src.array").ArrayImpl
        part = value.addressable_data(0)  # of a mesh of one device, the part is on no mesh
        return make(part.aval, part.sharding, [part], committed=False)
    except (ImportError, AttributeError, TypeError):
        return jax.device_put(value, jax.local_devices()[0])


def _settings_of_traces() -> Any:
    try:
        return importlib.import_module("jax._src.config").trace_context
    except (ImportError, AttributeError):
        return tuple


settings_of_traces: Callable[[], tuple[Any, ...]] = _settings_of_traces()


def main_thread_file() -> str:
    """Returns the file of the code that the main thread is in, or "" if it has ended."""
    frames: Any = vars(sys)["_current_frames"]()
    frame = frames.get(threading.main_thread().ident)
    return "" if frame is None else str(frame.f_code.co_filename)


def exit_now(exit_code: int) -> NoReturn:
    """Exits the process immediately, without flushing or cleaning up."""
    os._exit(exit_code)
