"""Programs that several processes run together: started in one order, and never waited for blindly.

A process that waits for the result of such a program waits for all others. It does so here, where
it hears of a process that was lost: inside JAX nothing could wake it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator
from typing import Any, NoReturn

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from stratagem.group import Activity, Group, current_group

__all__ = [
    "Flight",
    "compiling",
    "copied_to_all",
    "is_of_several",
    "last_flight",
    "note_flight",
    "on_every_process",
    "run_together",
    "wait_for_flight",
    "wait_until_ready",
    "waiting_for_input",
]


# A small program runs within the call that starts it on CPU; then its errors are ValueErrors.
_MAY_BE_LOSSES = (jax.errors.JaxRuntimeError, ValueError)
_CODES_OF_LOSSES = ("UNKNOWN", "INTERNAL", "UNAVAILABLE", "ABORTED", "CANCELLED", "DEADLINE")
_TRANSPORTS = ("Gloo", "NCCL", "MPI")


@dataclasses.dataclass
class Flight:
    """A program that was started.

    Args:
        number: of its step.
        name: of the program.
        token: arrays among its results that no later program takes over.
    """

    number: int = 0
    name: str = ""
    token: Any = None


_last = Flight()


def last_flight() -> Flight:
    """Returns the program that was started last, by this process alone or by all together."""
    return dataclasses.replace(_last)


def note_flight(token: Any) -> None:
    """Notes that a process in no group has started a program.

    Args:
        token: arrays among its results that no later program takes over.
    """
    if current_group() is None and not _is_traced(token):
        _last.token = token


def wait_for_flight(flight: Flight) -> None:
    """Waits until a program is done.

    Args:
        flight: the program.

    Raises:
        UnavailableError: a process was lost; and what else `run_together` raises.
    """
    if current_group() is None:
        jax.block_until_ready(flight.token)
    else:
        _wait(flight)


def run_together(name: str, start: Callable[[], tuple[Any, Any]], *, platform: str) -> Any:
    """Starts a program that all processes run, when the one before it is done.

    So one program runs while the next is prepared. On accelerators one more is on its way; on CPU
    starting it would wait inside JAX.

    Args:
        name: of the program.
        start: starts it; returns its results, and those of them that no later program takes over.
        platform: of the devices, as JAX calls it.

    Returns:
        The results.

    Raises:
        UnavailableError: a process was lost; the message names it.
        DeadlineExceededError: one is stuck. RuntimeError: they came apart.
    """
    group = current_group()
    assert group is not None
    before = last_flight()
    if platform == "cpu":
        _wait(before)
    begun = group.num_steps
    try:
        number = group.begin_step()
        with group.in_step(number, name):  # starting a small program may be all of it
            results, token = start()
    except BaseException as error:
        # The others wait in this step for a process that has not started it, and may leave now.
        group.return_to_step(begun)
        if isinstance(error, Exception):
            _raise_loss(group, error)
        raise
    if _is_traced(token):
        return results  # traced into a program of the caller's own
    _last.number, _last.name, _last.token = number, name, token
    if platform != "cpu":
        _wait(before)
    return results


def wait_until_ready(values: Any) -> None:
    """Waits for results of programs that all processes run; others may be read as they are.

    Args:
        values: pytree of arrays.

    Raises:
        UnavailableError: a process was lost; and what else `run_together` raises.
    """
    if current_group() is not None:
        _wait(Flight(_last.number, _last.name, values))


def _is_traced(token: Any) -> bool:
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(token))


def _wait(flight: Flight) -> None:
    group = current_group()
    if group is None:
        return
    # Arrays of random keys cannot be asked; they come with others.
    arrays = [leaf for leaf in jax.tree.leaves(flight.token) if hasattr(leaf, "is_ready")]
    try:
        for array in arrays:
            # One that a later program has taken over is ready, or that program fails in its turn.
            if not isinstance(array, Tracer) and not array.is_deleted():
                group.wait_for_step(flight.number, flight.name, array.is_ready)
                array.block_until_ready()  # raises what went wrong in it
    except _MAY_BE_LOSSES as error:
        _raise_loss(group, error)


def _raise_loss(group: Group, error: Exception) -> NoReturn:
    """Raises who was lost, where that is what an error of JAX comes from; else the error itself."""
    if isinstance(error, _MAY_BE_LOSSES) and str(error).startswith(_CODES_OF_LOSSES):
        explained = group.explain_loss(error)
        if group.verdict is not None or any(name in str(error) for name in _TRANSPORTS):
            raise explained from error
    raise error


def is_of_several(value: Any) -> bool:
    """Tells whether a value is an array of which other processes hold parts or copies."""
    return (
        isinstance(value, jax.Array)
        and not isinstance(value, Tracer)
        and not value.is_fully_addressable
    )


def _read_all(values: Any) -> Any:
    # What is in pinned memory of the host is read to compute with it.
    return jax.device_put(values, jax.memory.Space.Device)


def on_every_process(arrays: Any, function: Callable[[Any], Any] | None = None) -> Any:
    """Returns what a function makes of arrays of several processes; each has to call it.

    Args:
        arrays: pytree of arrays of several processes, on the same devices.
        function: of the whole arrays, defined in a module: programs are kept by it; None for the
            arrays themselves.

    Returns:
        The result, on a device of this process.

    Raises:
        UnavailableError: a process was lost; and what else `run_together` raises.
    """
    result = _computed_together(arrays, function or _read_all)
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), result)


def copied_to_all(arrays: Any) -> Any:
    """Returns arrays of several processes with a copy on each device; each has to call it.

    Args:
        arrays: pytree of such arrays, on the same devices.

    Returns:
        The same values.

    Raises:
        UnavailableError: a process was lost; and what else `run_together` raises.
    """
    return _computed_together(arrays, _read_all)


def _computed_together(arrays: Any, function: Callable[[Any], Any]) -> Any:
    first = jax.tree.leaves(arrays)[0]
    sharding: Any = first.sharding  # one with a mesh, as all of several processes have
    copied = NamedSharding(sharding.mesh, PartitionSpec())
    program = _program(function, copied)

    def start() -> tuple[Any, Any]:
        with jax.disable_jit(False):  # noqa: FBT003 - replicas that run op by op ask, too
            result = program(arrays)
        return result, result

    platform = next(iter(first.devices())).platform
    result = run_together(function.__name__.strip("_"), start, platform=platform)
    wait_until_ready(result)
    _last.token = None  # it is ready, and may be given away
    return result


@functools.lru_cache(maxsize=64)
def _program(function: Callable[[Any], Any], sharding: Any) -> Any:
    return jax.jit(function, out_shardings=sharding)


@contextlib.contextmanager
def waiting_for_input(name: str) -> Generator[None]:
    """Says that the program waits for data, whose sizes processes may tell each other.

    Args:
        name: of the data.
    """
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
    """Says that a program is being made, which may take long without being stuck.

    Args:
        name: of the program.

    Returns:
        A context manager.
    """
    group = current_group()
    assert group is not None
    return group.at(Activity.COMPILE, name)
