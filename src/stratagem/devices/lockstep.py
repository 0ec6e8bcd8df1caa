"""Programs that several processes run together, started in the same order and waited for safely.

A process waits for the results here, where it can learn that another process was lost; nothing can
interrupt a wait inside JAX.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Generator
from typing import Any, NoReturn, cast

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from stratagem.group.current import current_group
from stratagem.group.elastic.group import ElasticGroup
from stratagem.group.member import Group
from stratagem.group.verdict import Activity
from stratagem.observe.wait_clock import wait_clock

# A small program runs within the call that starts it on CPU, and raises ValueErrors.
_MAY_BE_LOSSES = (jax.errors.JaxRuntimeError, ValueError)
_CODES_OF_LOSSES = ("UNKNOWN", "INTERNAL", "UNAVAILABLE", "ABORTED", "CANCELLED", "DEADLINE")
_TRANSPORTS = ("Gloo", "NCCL", "MPI")


@dataclasses.dataclass
class InFlightProgram:
    """A program in flight: its step number, its name, and outputs that no later program donates."""

    number: int = 0
    name: str = ""
    token: Any = None


_last = InFlightProgram()


def last_program() -> InFlightProgram:
    """Returns the program started last, by this process alone or by all together."""
    return dataclasses.replace(_last)


def record_program(token: object) -> None:
    """Records a program of a process without a group by outputs that are never donated."""
    if current_group() is None and not _is_traced(token):
        _last.token = token


def wait_for_program(flight: InFlightProgram) -> None:
    """Waits until a program is done; raises as `run_together`."""
    if current_group() is None:
        begin_s = time.monotonic()
        jax.block_until_ready(flight.token)
        _count_idle(time.monotonic() - begin_s)
    else:
        _wait_for(flight)


def run_together(name: str, start: Callable[[], tuple[Any, Any]], *, platform: str) -> Any:
    """Starts a program on all processes once the previous one is done.

    So one program runs while the next is prepared. On accelerators one more may be queued; on CPU
    starting it would block inside JAX. `start` returns the outputs, and some of them that no later
    program donates. Raises UnavailableError, naming a lost process; DeadlineExceededError if a
    process is stuck; RuntimeError if the processes diverged.
    """
    group = current_group()
    assert group is not None
    before = last_program()
    if platform == "cpu":
        _wait_for(before)
    begun = group.num_steps
    try:
        number = group.begin_step()
        begin_s = time.monotonic()
        with group.in_step(number, name):  # a small program may finish within this call
            results, token = start()
        if platform == "cpu":  # it then waits for the other processes there
            wait_clock.programs_s += time.monotonic() - begin_s
    except BaseException as error:
        # The others wait for a step that this process did not start, and may leave it now.
        group.return_to_step(begun)
        if isinstance(error, Exception):
            _raise_loss(group, error)
        raise
    if _is_traced(token):
        return results  # traced into the caller's program
    _last.number, _last.name, _last.token = number, name, token
    if platform != "cpu":
        _wait_for(before)
    return results


def wait_until_ready(values: object) -> None:
    """Waits for outputs of programs that all processes run; raises as `run_together`."""
    if current_group() is not None:
        _wait_for(InFlightProgram(_last.number, _last.name, values))


def _is_traced(token: object) -> bool:
    is_empty = isinstance(token, tuple) and not token  # as in most steps
    return not is_empty and any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(token))


def _wait_for(flight: InFlightProgram) -> None:
    group = current_group()
    if group is None:
        return
    # Arrays of random keys have no `is_ready`; they come with other arrays.
    arrays = [leaf for leaf in jax.tree.leaves(flight.token) if hasattr(leaf, "is_ready")]
    begin_s = time.monotonic()
    try:
        for array in arrays:
            # A donated array is ready, or the program that took it fails itself.
            if not isinstance(array, Tracer) and not array.is_deleted():
                group.wait_for_step(flight.number, flight.name, array.is_ready)
                array.block_until_ready()  # raises the program's error
    except _MAY_BE_LOSSES as error:
        _raise_loss(group, error)
    _count_idle(time.monotonic() - begin_s)


def _count_idle(time_s: float) -> None:
    wait_clock.programs_s += time_s
    wait_clock.idle_s += time_s


def _raise_loss(group: Group, error: Exception) -> NoReturn:
    """Raises the loss of a process if that caused a JAX error, otherwise the error itself."""
    if (
        not runs_separately()
        and isinstance(error, _MAY_BE_LOSSES)
        and str(error).startswith(_CODES_OF_LOSSES)
    ):
        explained = group.explain_loss(error)
        if group.verdict is not None or any(name in str(error) for name in _TRANSPORTS):
            raise explained from error
    raise error


def is_multi_process(value: object) -> bool:
    """Returns True for an array with shards or copies in other processes."""
    return (
        isinstance(value, jax.Array)
        and not isinstance(value, Tracer)
        and not value.is_fully_addressable
    )


def _read_all(values: object) -> Any:
    # Arrays in pinned host memory are copied to the device.
    return jax.device_put(values, jax.memory.Space.Device)


def compute_on_every_process(arrays: object, function: Callable[[Any], Any] | None = None) -> Any:
    """Returns `function` of multi-process arrays, on a local device; call it on every process.

    `function` is at module level, since programs are cached by it; None returns the arrays.
    Raises as `run_together`.
    """
    if runs_separately():
        return _jitted(function or _read_all, None)(_gathered(arrays))
    result = _compute_together(arrays, function or _read_all)
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), result)


def replicate_to_all(arrays: object) -> Any:
    """Returns multi-process arrays replicated to every device; call it on every process."""
    return _compute_together(arrays, _read_all)


def runs_separately() -> bool:
    """Returns True if no program runs on several processes, as in an elastic group."""
    return isinstance(cast("Any", current_group()), ElasticGroup)


def _gathered(arrays: object) -> Any:
    """Returns multi-process arrays of an elastic group on the host, without lost members' parts."""
    group = current_group()
    assert group is not None
    leaves, structure = jax.tree.flatten(arrays)
    own = [np.asarray(leaf.addressable_data(0)) for leaf in leaves]
    parts = [number for number, leaf in enumerate(leaves) if not leaf.is_fully_replicated]
    received = group.exchange("parts of arrays", [own[number] for number in parts])
    for place, number in enumerate(parts):
        own[number] = np.concatenate([one[place] for one in received])
    return jax.tree.unflatten(structure, own)


def _compute_together(arrays: object, function: Callable[[Any], Any]) -> Any:
    first = jax.tree.leaves(arrays)[0]
    sharding: Any = first.sharding  # has a mesh, as in all multi-process arrays
    copied = NamedSharding(sharding.mesh, PartitionSpec())
    program = _jitted(function, copied)

    def start() -> tuple[Any, Any]:
        with jax.disable_jit(False):  # noqa: FBT003 - eager replicas call this, too
            result = program(arrays)
        return result, result

    platform = next(iter(first.devices())).platform
    result = run_together(function.__name__.strip("_"), start, platform=platform)
    wait_until_ready(result)
    _last.token = None  # it is ready, and may be donated
    return result


@functools.lru_cache(maxsize=64)
def _jitted(function: Callable[[Any], Any], sharding: object) -> Any:
    return jax.jit(function, out_shardings=sharding)


@contextlib.contextmanager
def waiting_for_input(name: str) -> Generator[None]:
    """Marks that the program waits for data."""
    group = current_group()
    if group is None:
        yield
        return
    with group.at(Activity.INPUT, name):
        try:
            yield
        except Exception:
            group.mark_reported()
            raise


def compiling(name: str) -> Any:
    """Returns a context that marks a compilation, which may take long without being stuck."""
    group = current_group()
    assert group is not None
    return group.at(Activity.COMPILE, name)
