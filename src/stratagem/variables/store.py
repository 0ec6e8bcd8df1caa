"""Store: the place of a variable's value between steps, such as shards or host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp

from stratagem.devices.compression import Compression
from stratagem.devices.mesh import Topology

if TYPE_CHECKING:
    import keras
    import numpy as np


class Store(Protocol):
    """Stores values of variables between steps, other than as a copy on each replica's device.

    A step loads its inputs, computes, and stores new values. `stored` below is an array that `put`
    or `unload` returned; shapes are global, without a replica axis.
    """

    @property
    def serves_rows(self) -> bool:
        """True if replicas receive only the table rows that they look up."""
        ...

    @property
    def is_on_replicas(self) -> bool:
        """True if the replicas' devices store the value, or reach it without another device."""
        ...

    @property
    def is_pinned(self) -> bool:
        """True if the value is in pinned host memory, which devices copy from within a step."""
        ...

    def sharding(self, shape: tuple[int, ...]) -> jax.sharding.Sharding:
        """Returns the sharding of a stored value of this shape."""
        ...

    def step_sharding(self, shape: tuple[int, ...], topology: Topology) -> jax.sharding.Sharding:
        """Returns the sharding of the result of `for_step`."""
        ...

    def put(self, value: object) -> jax.Array:
        """Stores an array, on any devices, or anything that JAX can convert to one."""
        ...

    def gather(self, stored: jax.Array) -> jax.Array:
        """Returns the whole value on one device."""
        ...

    def replicate(self, stored: jax.Array, topology: Topology) -> jax.Array:
        """Returns a copy on each replica's device."""
        ...

    def load(self, stored: jax.Array) -> jax.Array:
        """Moves a stored value to the memory its devices compute in. Works inside programs."""
        ...

    def unload(self, value: jax.Array) -> jax.Array:
        """Moves a new value, computed on these devices, to its memory. Inverts `load`."""
        ...

    def for_step(self, stored: jax.Array, topology: Topology) -> jax.Array:
        """Returns the array that a compiled step takes as its input."""
        ...

    def for_update(self, value: jax.Array) -> jax.Array:
        """Moves a replicated value, such as a summed gradient, to the devices of the update."""
        ...

    def update_sharding(self) -> jax.sharding.Sharding:
        """Returns the sharding of the result of `for_update`."""
        ...

    def rows(self, loaded: jax.Array, ids: jax.Array | np.ndarray, topology: Topology) -> jax.Array:
        """Looks up rows of `loaded`, a table of shape (n, ...), for each replica.

        `ids` are integers, with the replica axis first if there are several replicas. Returns shape
        (*ids.shape, ...); ids out of range get the fill value of `jax.numpy.take`.
        """
        ...


def store_of(variable: object) -> Store | None:
    """Returns the store of a Keras variable; None if each replica's device has a copy."""
    return getattr(variable, "store", None)


def is_remote(variable: keras.Variable) -> bool:
    """Returns True if a variable is stored outside this process, such as on parameter servers."""
    return getattr(variable, "is_remote", False)


def is_keyed(variable: object) -> bool:
    """Returns True for a table on parameter servers whose rows are found by 64-bit keys."""
    return getattr(variable, "is_keyed", False)


# Choice of the variables whose gradients are sent compressed.


def is_compressed(variable: Any, compression: Compression | None) -> bool:
    """Returns True if gradients of a variable are sent compressed: the only place that decides.

    Args:
        variable: a trained variable.
        compression: of the strategy; None compresses nothing.
    """
    is_summed_whole = store_of(variable) is None and not getattr(variable, "is_large_table", False)
    if compression is None or not is_summed_whole:
        return False
    is_float = jnp.issubdtype(jnp.dtype(variable.dtype), jnp.floating)
    return is_float and compression.compresses(tuple(variable.shape))
