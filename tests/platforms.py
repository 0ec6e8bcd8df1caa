"""Devices of a test run: 8 virtual CPU devices, or a GPU beside them.

`STRATAGEM_TEST_PLATFORM` selects. With `gpu`, JAX's default device is the GPU. A test that names
one device, `"cpu:0"`, gets the GPU; a test that names several gets virtual CPU devices, in a
process whose default device is another. `jax.devices()` in a test returns the CPU devices, and the
GPU for `jax.devices()[0]`. With `gpu_alone`, a test that names several CPU devices gets the GPU
alone: so computes what is written for two replicas and holds for one. `imitated` and
`imitated_alone` do the same with a ninth CPU device in the GPU's place: they check the choice of
devices on a machine without a GPU.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex, overload

VARIABLE = "STRATAGEM_TEST_PLATFORM"
PLATFORMS = ("cpu", "gpu", "gpu_alone", "imitated", "imitated_alone")
_FIRST_NAMES = ("cpu", "cpu:0")
_CPU_NAME = re.compile(r"cpu(:\d+)?")

# Functions whose devices compute: a name there stands for the device of a strategy. The other
# callers of `find_devices` look up where a variable is stored, which stays as it is named.
_COMPUTING_CALLERS = frozenset(
    {
        ("stratagem.strategies.mirrored", "__init__"),
        ("stratagem.strategies.membership", "local_topology"),
        ("stratagem.parameter_server.strategy", "worker_parts"),
    }
)


def selected_platform(environment: Mapping[str, str] = os.environ) -> str:
    """Returns what the environment asks for, one of `PLATFORMS`."""
    platform = environment.get(VARIABLE, "cpu")
    if platform not in PLATFORMS:
        raise ValueError(f"{VARIABLE}={platform!r}. Expected one of {', '.join(PLATFORMS)}.")
    return platform


def jax_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns variables that JAX reads once, to be set before it is imported."""
    if not selected_platform(environment).startswith("gpu"):
        return {"JAX_PLATFORMS": environment.get("JAX_PLATFORMS", "cpu")}
    # The processes of pytest-xdist, and what the tests start, share one card.
    preallocates = environment.get("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": preallocates}


def set_up_devices(platform: str, num_cpu_devices: int) -> None:
    """Makes the CPU devices and, except on "cpu", makes the GPU the device of single-device tests.

    Called once, before JAX's first computation.
    """
    import jax

    num_imitated = int(platform.startswith("imitated"))
    jax.config.update("jax_num_cpu_devices", num_cpu_devices + num_imitated)
    if platform == "cpu":
        return
    # A GPU multiplies float32 matrices in TF32, which keeps 10 bits of the 23: the tests would
    # compare roundings. Tests of TF32 and bfloat16 set their own precision.
    jax.config.update("jax_default_matmul_precision", "highest")
    cpus: Sequence[jax.Device] = jax.devices("cpu")[:num_cpu_devices]
    accelerator = jax.devices("cpu")[-1] if num_imitated else jax.devices("gpu")[0]
    if num_imitated:
        _imitate(cpus, accelerator)
    _read_no_batch_ahead()
    _replace_devices(cpus, accelerator)
    _replace_lookup(accelerator, is_alone=platform.endswith("_alone"))


def _read_no_batch_ahead() -> None:
    """Makes Keras without a strategy read its data as on CPU.

    On a GPU it reads a batch ahead. It loses that batch where an error of the source, or
    `steps_per_epoch`, ends the training, and could not serve as the reference there.
    """
    from keras.src.backend.jax.trainer import JAXEpochIterator

    setattr(JAXEpochIterator, "_one_batch_ahead_iterator", _as_it_is)  # noqa: B010 - not in 3.12


def _as_it_is(_self: object, batches: Any) -> Any:
    return batches


class MixedDevices(list[Any]):
    """CPU devices in which the accelerator takes the place of the first, if asked for alone."""

    def __init__(self, cpus: Sequence[Any], accelerator: Any) -> None:
        super().__init__(cpus)
        self._accelerator = accelerator

    @overload
    def __getitem__(self, index: SupportsIndex) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: Any) -> Any:
        if index in (0, slice(None, 1)):
            return self._accelerator if index == 0 else [self._accelerator]
        return super().__getitem__(index)


def is_first_cpu_device(specs: Sequence[object]) -> bool:
    """True for a list of just the first CPU device, by name."""
    (spec, *others) = specs or (None,)
    return not others and isinstance(spec, str) and _bare_name(spec) in _FIRST_NAMES


def are_cpu_devices(specs: Sequence[object]) -> bool:
    """True for a list of distinct CPU devices, by name."""
    names = [_bare_name(spec) for spec in specs if isinstance(spec, str)]
    are_all = bool(specs) and len(set(names)) == len(specs)
    return are_all and all(_CPU_NAME.fullmatch(name) for name in names)


def _bare_name(spec: str) -> str:
    return spec.lower().removeprefix("/").removeprefix("device:")


def _called_by_test(depth: int = 2) -> bool:
    """True if a module of the tests calls; the tests of the lookup itself see what it returns."""
    name = str(sys._getframe(depth).f_globals.get("__name__", ""))
    return name.startswith("tests.") and not name.startswith(
        ("tests.unit.devices.topology.", __name__)
    )


def _replace_devices(cpus: Sequence[Any], accelerator: Any) -> None:
    """Makes `jax.devices()` of a test return CPU devices; the library's own calls are untouched."""
    import jax

    original: Callable[..., list[Any]] = jax.devices

    def devices(*arguments: Any, **named: Any) -> list[Any]:
        if arguments or named or not _called_by_test():
            return original(*arguments, **named)
        return MixedDevices(cpus, accelerator)

    jax.devices = devices


# Lookups that got the accelerator: for one name, or "in place of several".
lookups: Counter[str] = Counter()


def _replace_lookup(accelerator: Any, *, is_alone: bool) -> None:
    """Makes the name of the first CPU device alone mean the accelerator, for what computes."""
    from stratagem.devices import finding as module

    original: Callable[..., tuple[Any, ...]] = module.find_devices

    def find_devices(specs: Sequence[Any]) -> tuple[Any, ...]:
        caller = sys._getframe(1)
        place = (str(caller.f_globals.get("__name__")), caller.f_code.co_name)
        if place in _COMPUTING_CALLERS or _called_by_test():
            if is_first_cpu_device(specs):
                lookups["one"] += 1
                return original([accelerator])
            if is_alone and are_cpu_devices(specs) and len(specs) > 1:
                lookups["in place of several"] += 1
                return original([accelerator])
        return original(specs)

    for loaded in list(sys.modules.values()):
        if getattr(loaded, "find_devices", None) is original:
            setattr(loaded, "find_devices", find_devices)  # noqa: B010 - of any module


def _imitate(cpus: Sequence[Any], accelerator: Any) -> None:
    """Makes one more CPU device look like the only device of the default platform."""
    import jax

    def restrict(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def devices(*arguments: Any, **named: Any) -> list[Any]:
            backend = named.pop("backend", None) or next(
                (one for one in arguments if isinstance(one, str)), None
            )
            if backend in ("gpu", "cuda") or (backend is None and not named):
                return [accelerator]
            return list(cpus) if backend == "cpu" else original(*arguments, **named)

        return devices

    jax.devices = restrict(jax.devices)
    jax.local_devices = restrict(jax.local_devices)
    jax.local_device_count = lambda backend=None: len(jax.local_devices(backend=backend))
    jax.config.update("jax_default_device", accelerator)
