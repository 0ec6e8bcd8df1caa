"""The mesh of `jax.set_mesh`, which does not apply to what a strategy runs on its own mesh.

JAX requires that a program's mesh is the one in context, moves arrays that are not committed to the
devices of that mesh, and gives new arrays a type that names it, if its axes are explicit. So each
call into a strategy leaves the mesh: it takes the user's arrays off it, and returns arrays that JAX
may move to it again. Code of the user between such calls sees the mesh as before.

Source: JAX 0.12 mesh_utils and sharding_impls.py, set_mesh.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    get_abstract_mesh,
    get_mesh,
    set_mesh,
)

from stratagem.devices.private import uncommitted

_P = ParamSpec("_P")
_R = TypeVar("_R")
_NO_MESH = Mesh(np.empty((), object), ())
_IN_JIT = (
    "jax.jit compiles this for the devices of the mesh that jax.set_mesh has set. Call it outside "
    "of jax.jit, use sg.function in place of jax.jit, or leave the mesh around jax.jit."
)


def outside_context_mesh(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorates a function that computes on the devices of a strategy, not on the context mesh."""

    @functools.wraps(fn)
    def outside(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        mesh = get_abstract_mesh()  # takes 50 ns
        if not mesh.axis_names or AxisType.Manual in mesh.axis_types:  # none, or our own in a step
            return fn(*args, **kwargs)
        try:
            left = _Left()
        except ValueError:  # JAX fixes the mesh of what it traces
            try:
                return fn(*args, **kwargs)
            except (ValueError, KeyError) as error:
                error.add_note(_IN_JIT)
                raise
        with left:
            taken: Any = left.taken
            called: Any = fn  # with the same arguments, of other arrays
            result = called(*map(taken, args), **{name: taken(kwargs[name]) for name in kwargs})
        return _mapped(uncommitted, result)

    return outside


class _Left:
    """A block without the context mesh; raises ValueError while JAX traces."""

    def __init__(self) -> None:
        self._mesh = get_mesh()
        self._block: Any = set_mesh(_NO_MESH)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self._block.__exit__(*error)

    def taken(self, value: Any) -> Any:
        """Returns arguments with their arrays on one device instead of the mesh that was left."""
        return _mapped(self._taken, value)

    def _taken(self, value: Any) -> Any:
        if not isinstance(value, jax.Array) or isinstance(value, Tracer):
            return value
        sharding = value.sharding
        is_on_mesh = isinstance(sharding, NamedSharding) and sharding.mesh == self._mesh
        return on_one_device(value) if is_on_mesh or is_explicit(value) else value


def is_explicit(array: object) -> bool:
    """Returns True for an array whose type names a mesh, so that it combines with no others."""
    if not isinstance(array, jax.Array):
        return False
    return AxisType.Explicit in array.aval.sharding.mesh.axis_types


def on_one_device(array: jax.Array) -> jax.Array:
    """Returns a whole array that is on no mesh; unchanged if other processes have parts of it."""
    if not array.is_fully_addressable:
        return array
    if not array.is_fully_replicated:
        # Put on a device alone, it would keep its type.
        mesh = Mesh(np.array([array.addressable_shards[0].device]), ("all",))
        array = jax.device_put(array, NamedSharding(mesh, PartitionSpec()))
    return uncommitted(array.addressable_data(0))


def _mapped(fn: Callable[[Any], Any], value: Any) -> Any:
    """Maps the leaves of nested lists, tuples and dicts; other containers keep what is theirs."""
    return jax.tree.map(fn, value, is_leaf=lambda one: not isinstance(one, list | tuple | dict))
