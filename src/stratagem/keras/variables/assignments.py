"""Assignments outside steps to variables of which several processes have copies.

Each process assigns to its own copy. So the group compares what they assign; see
`process_group/assignments.py`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.core import Tracer

from stratagem.devices.lockstep import is_multi_process, runs_separately, wait_until_ready
from stratagem.devices.shards import assemble_on_host
from stratagem.group.current import current_group
from stratagem.options import VariableAggregation
from stratagem.variables.initial_values import initial_digest
from stratagem.variables.registry import Home, VariableKind

_LIBRARIES = tuple(
    os.path.dirname(file) + os.sep
    for file in (str(Path(__file__).parents[1]), str(keras.__file__), str(jax.__file__))
)
_NAME_OF_SEEDS = "seed_generator_state"  # the state of a `keras.random.SeedGenerator`
_STANDARD_FILES = (contextlib.__file__, functools.__file__, threading.__file__)


def note_assignment(variable: Any, home: Home, value: object) -> None:
    """Notes the value that a variable gets now, before it is stored.

    An assignment before the processes agree on initial values is one of these: all take that of
    process 0.
    """
    group = current_group()
    if group is None or isinstance(value, Tracer):
        return
    value = _own_copy(value)
    if variable.agreed_number is None:
        if value is not None and variable.has_value:  # not the initial value itself
            variable.initial_digest = initial_digest(value, home.strategy.topology)
        return
    # A metric's sum has a part of each process, a seed may be drawn from by one alone, and members
    # of an elastic group that join have assigned nothing before.
    is_sum = home.aggregation in (VariableAggregation.SUM, VariableAggregation.NONE)
    is_part = home.kind is VariableKind.ON_READ and is_sum
    if is_part or variable.name == _NAME_OF_SEEDS or runs_separately():
        return
    number, notes = variable.agreed_number, group.assignments
    before = None if number in notes else _digest(_value_before(variable, home))
    digest = _digest(value) or 0
    notes.add(number, variable.path, before=before, digest=digest, place=_place())


def _own_copy(value: object) -> Any:
    """Returns a value in the memory of this process; None if other processes have parts of it."""
    if not is_multi_process(value):
        return value
    array: Any = value
    return array.addressable_data(0) if array.is_fully_replicated else None


def _value_before(variable: Any, home: Home) -> Any:
    stored = variable.stored
    if home.kind is VariableKind.ON_READ or not isinstance(stored, jax.Array):
        return None
    if is_multi_process(stored):
        wait_until_ready(stored)  # names a lost process, where JAX would wait forever
        own = _own_copy(stored)
        return None if stored.is_deleted() else own
    return None if stored.is_deleted() else assemble_on_host(stored)


def _digest(value: Any) -> int | None:
    """Returns a checksum of a value; None for None."""
    if value is None:
        return None
    if isinstance(value, jax.Array) and next(iter(value.devices())).platform != "cpu":
        return int(_digest_on_device(value))
    return zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)


@jax.jit
def _digest_on_device(value: jax.Array) -> jax.Array:
    # Not read by the host: a model's weights would take seconds.
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        value = jnp.stack([value.real, value.imag])
    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[value.dtype.itemsize]
    number = value.astype(jnp.uint8) if value.dtype == jnp.bool_ else value
    words = jax.lax.bitcast_convert_type(number, bits).ravel().astype(jnp.uint32)
    # Mixed with their places as in MurmurHash3, so that no sums of changes cancel out.
    words += jnp.arange(words.size, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        words = (words ^ (words >> shift)) * jnp.uint32(factor)
    return jnp.sum(words ^ (words >> 16), dtype=jnp.uint32)


def _place() -> str:
    """Returns the line of the user's program that assigns, and the callback that it called."""
    frame, callback = inspect.currentframe(), ""
    assert frame is not None
    while frame.f_back is not None:
        code = frame.f_code
        file = code.co_filename
        if not file.startswith(_LIBRARIES) and file not in _STANDARD_FILES:
            break
        if code.co_name.startswith("on_") and "CallbackList" not in code.co_qualname:
            callback = f" (in {code.co_qualname})"
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}{callback}"
