"""The environment of a process: variables, optional libraries, memory."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import mmap
import os
import re
import sys
from collections.abc import Generator, Iterable, Mapping
from typing import Any

from stratagem.errors import explain

# XLA:CPU needs this many threads per virtual device: with fewer, JAX up to 0.11.2 can deadlock in a
# collective, because every thread of the pool waits for a peer that has no thread to run on.
_POOL_THREADS_PER_DEVICE = 4

# The value last set by show_gpus, and the original one: a second assignment must start from all
# GPUs again, not from this process's share.
_assigned_gpus: dict[str, str | None] = {}

# Prefixes of settings that JAX and Keras read when they are loaded.
_LIBRARY_PREFIXES = ("JAX_", "KERAS_")
_recorded_settings: list[dict[str, str]] = []


def get(name: str) -> str | None:
    """Returns the text of a variable, or None if it is unset."""
    return os.environ.get(name)


def select_keras_backend() -> None:
    """Selects Keras's JAX backend, unless the user chose a backend.

    Raises ImportError if Keras is already loaded with another one, which cannot be changed.
    """
    keras = sys.modules.get("keras")
    if keras is not None and hasattr(keras, "config"):
        require_jax_backend(keras.config.backend())
    if not os.environ.get("KERAS_BACKEND"):  # Keras treats an empty value as unset
        os.environ["KERAS_BACKEND"] = "jax"


def require_jax_backend(backend: str) -> None:
    """Raises ImportError unless Keras was loaded with the JAX backend."""
    if backend != "jax":
        raise ImportError(
            explain(
                f"Keras runs on the {backend!r} backend.",
                expected="the 'jax' backend, which cannot be changed once Keras is loaded.",
                fix="put `import stratagem` before `import keras`, or set KERAS_BACKEND=jax.",
                code="SG101",
            )
        )


def require_jax_choice() -> None:
    """Raises ImportError if Keras is not loaded yet and would load another backend than JAX."""
    chosen = os.environ.get("KERAS_BACKEND")
    if chosen and chosen != "jax" and "keras" not in sys.modules:
        raise ImportError(
            explain(
                f"KERAS_BACKEND is {chosen!r}.",
                expected="'jax', or no value; stratagem then selects it.",
                fix="unset KERAS_BACKEND, or set KERAS_BACKEND=jax.",
                code="SG101",
            )
        )


def num_forced_cpu_devices() -> int:
    """Returns the number of CPU devices requested in `XLA_FLAGS`, 1 by default."""
    flags = os.environ.get("XLA_FLAGS", "")
    counts = re.findall(r"--xla_force_host_platform_device_count=(\d+)", flags)
    return int(counts[-1]) if counts else 1


def disabled_xla_passes() -> list[str]:
    """Returns the names of the compiler's passes that `XLA_FLAGS` disables."""
    found = re.findall(r"--xla_disable_hlo_passes=(\S+)", os.environ.get("XLA_FLAGS", ""))
    return found[-1].split(",") if found else []


def size_cpu_thread_pool(num_devices: int) -> None:
    """Sizes XLA:CPU's thread pool for virtual devices; call before the backend starts."""
    os.environ.setdefault("NPROC", str(_POOL_THREADS_PER_DEVICE * num_devices))


def lookup(name: str) -> str | None:
    """Returns a variable without surrounding white space, or None if it is unset or empty."""
    return os.environ.get(name, "").strip() or None


def take(name: str) -> str | None:
    """Returns a variable like `lookup`, and unsets it, so that child processes do not have it."""
    text = lookup(name)
    os.environ.pop(name, None)
    return text


def snapshot() -> dict[str, str]:
    """Returns a copy of all variables, for child processes."""
    return dict(os.environ)


def path_with_this_python() -> str:
    """Returns `PATH` with this interpreter's folder first, for processes that look it up."""
    folder = os.path.dirname(sys.executable)
    return os.pathsep.join(filter(None, (folder, os.environ.get("PATH"))))


def replace(variables: Mapping[str, str]) -> None:
    """Replaces all variables of this process, such as a fork that becomes another task."""
    os.environ.clear()
    os.environ.update(variables)


def set_defaults(variables: Mapping[str, str]) -> None:
    """Sets variables that are not set, for libraries that can only be configured this way."""
    for name, text in variables.items():
        os.environ.setdefault(name, text)


@contextlib.contextmanager
def changed(**variables: str) -> Generator[None]:
    """Sets variables during a block, for libraries that put them above their arguments."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                del os.environ[name]
            else:
                os.environ[name] = text


def record_library_settings() -> None:
    """Records the settings that JAX and Keras read when they were loaded, just now."""
    _recorded_settings.append(_library_settings())


def require_unchanged_settings() -> None:
    """Raises RuntimeError if a setting of JAX or Keras changed after it was recorded."""
    if not _recorded_settings:
        return
    before, now = _recorded_settings[-1], _library_settings()
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            raise RuntimeError(
                explain(
                    f"The program sets {name} to {now.get(name)!r}, but the launcher loaded JAX "
                    "before the program started.",
                    expected="settings of JAX and Keras that are set before the program starts.",
                    fix="set it before the program starts, or launch with --cold-restarts.",
                    code="SG105",
                )
            )


def _library_settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_LIBRARY_PREFIXES)}


def without_cluster() -> dict[str, str]:
    """Returns the variables for a CPU-only helper process that is not part of the cluster."""
    prefixes = ("TF_CONFIG", "JAX_", "XLA_", "PET_", "OMPI_", "SLURM_", "NPROC")
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(prefixes)}
    return {**inherited, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}


def snapshot_outside_cluster() -> dict[str, str]:
    """Returns a copy of all variables but those that describe a cluster."""
    prefixes = ("TF_CONFIG", "PET_", "OMPI_", "SLURM_", "SM_", "JAX_COORDINATOR")
    return {name: text for name, text in os.environ.items() if not name.startswith(prefixes)}


def visible_gpus() -> tuple[str, ...] | None:
    """Returns the GPU IDs in `CUDA_VISIBLE_DEVICES`, or None if it is not set.

    As in CUDA, the list ends at the first invalid ID. Ignores values set by `show_gpus`.
    """
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is not None and text == _assigned_gpus.get("after"):
        text = _assigned_gpus["before"]
    if text is None:
        return None
    ids = [part.strip() for part in text.split(",")]
    is_gpu = (bool(i) and not i.startswith("-") and i != "NoDevFiles" for i in ids)
    return tuple(i for i, _ in zip(ids, itertools.takewhile(bool, is_gpu), strict=False))


def show_gpus(ids: Iterable[str]) -> None:
    """Makes only some GPUs visible to this process; call before its backend starts."""
    text, before = ",".join(ids), os.environ.get("CUDA_VISIBLE_DEVICES")
    if before is None or before != _assigned_gpus.get("after"):
        _assigned_gpus["before"] = before
    _assigned_gpus["after"] = os.environ["CUDA_VISIBLE_DEVICES"] = text


# Loading of optional libraries, with an error that names the pip extra.


def load(module: str, *, needed_by: str, install: str) -> Any:
    """Imports a module; raises ImportError with `needed_by` and the command to `install` it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            explain(
                f"{needed_by} needs {module}, which cannot be imported: {error}",
                expected="the library to be installed on this machine.",
                fix=f"pip install {install}",
            )
        ) from error


# Memory of this process on CPU devices: what a step frees stays for the next one, in large pages.
#
# XLA:CPU allocates a program's buffers with malloc in each call and frees them after it. By default
# glibc gives large blocks back to the system, which then has to clear each page again: more than a
# third of the CPU time of a convolutional network. Pages of 2 MiB save another tenth.
#
# Source: mallopt(3), madvise(2).

# Constants of glibc's malloc.h, and their values.
_PARAMETERS = {
    -8: 1,  # M_ARENA_MAX: further arenas, for threads, cannot hold blocks of more than 64 MiB
    -4: 0,  # M_MMAP_MAX: larger blocks have no mapping of their own
    -1: -1,  # M_TRIM_THRESHOLD: never give memory back
    -2: 2**26,  # M_TOP_PAD: memory is requested in large steps
}
# Part of the machine's memory for which large pages are requested, and their size.
_LARGE_PART, _LARGE_BYTES = 4, 2**21
_ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd", "/dev/accel0", "/dev/vfio/0")
_CHOSEN_BY_USER = ("GLIBC_TUNABLES", "MALLOC_")

_is_kept = False


def keep_freed_memory() -> bool:
    """Makes malloc keep freed memory if this process trains on CPU; returns True if it does.

    Call before JAX starts its backend, whose threads would get arenas of their own. Does nothing
    without glibc, on a host with accelerators, or if the user configured malloc.
    """
    if not _is_for_cpu() or any(name.startswith(_CHOSEN_BY_USER) for name in snapshot()):
        return False
    if sys.platform != "linux":
        return False
    library: Any = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    global _is_kept
    are_set = [library.mallopt(*one) for one in _PARAMETERS.items()]
    _is_kept = all(are_set)
    if _is_kept:
        _request_large_pages(library)
    return _is_kept


def release_freed_memory() -> None:
    """Returns freed memory to the system, where glibc can: the next steps get it page by page.

    Call after work that is not repeated and frees much, such as a restore.
    """
    library: Any = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(ctypes.c_size_t(0))
        if _is_kept:  # the end of the heap is gone, and its large pages with it
            _request_large_pages(library)


def _request_large_pages(library: Any) -> None:
    """Extends the heap, which uses no memory yet, and requests large pages for it."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    size = page_bytes * os.sysconf("SC_PHYS_PAGES") // _LARGE_PART
    library.malloc.restype = ctypes.c_void_p
    begin = library.malloc(ctypes.c_size_t(size))
    if begin is None:  # a limit of the address space
        return
    library.free(ctypes.c_void_p(begin))
    first = -(-begin // _LARGE_BYTES) * _LARGE_BYTES
    length = (begin + size - first) // page_bytes * page_bytes
    library.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)


def _is_for_cpu() -> bool:
    platforms = lookup("JAX_PLATFORMS")
    if platforms is not None:
        return platforms.split(",")[0] == "cpu"
    return not any(map(os.path.exists, _ACCELERATORS))
