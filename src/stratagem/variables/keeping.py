"""Where the one value that all replicas share is kept between steps."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax

from stratagem.topology import Topology
from stratagem.variables.on_one_device import OnOneDevice

__all__ = ["KeepAll", "Keeping", "KeepingPolicy", "keeping_of", "sole_device"]


class Keeping(Protocol):
    """Keeps the value of a variable elsewhere than as a copy on each replica's device."""

    @property
    def gives_rows(self) -> bool:
        """Whether replicas that look rows up get these, and not the whole value."""
        ...

    @property
    def is_with_replicas(self) -> bool:
        """Whether values are kept on the replicas' devices, or where these reach them alone."""
        ...

    @property
    def is_pinned(self) -> bool:
        """Whether that is pinned memory of the host, from where devices bring them over."""
        ...

    def sharding(self, shape: tuple[int, ...]) -> jax.sharding.Sharding:
        """Returns where a value is kept.

        Args:
            shape: of the value.
        """
        ...

    def step_sharding(self, shape: tuple[int, ...], topology: Topology) -> jax.sharding.Sharding:
        """Returns where what `for_step` returns is.

        Args:
            shape: of the value.
            topology: the devices of the replicas.
        """
        ...

    def brought(self, value: jax.Array) -> jax.Array:
        """Returns what is kept in the memory in which its devices compute, also within a program.

        Args:
            value: what `kept` returned.
        """
        ...

    def put_back(self, value: jax.Array) -> jax.Array:
        """Returns a new value, made by a program on these devices, as it is kept.

        Args:
            value: the value.
        """
        ...

    def kept(self, value: Any) -> jax.Array:
        """Returns a value as it is kept.

        Args:
            value: an array on any devices, or what JAX makes one of.
        """
        ...

    def spread(self, kept: jax.Array, topology: Topology) -> jax.Array:
        """Returns a copy for each replica.

        Args:
            kept: what `kept` returned.
            topology: the devices of the replicas.
        """
        ...

    def whole(self, kept: jax.Array) -> jax.Array:
        """Returns the value on one device.

        Args:
            kept: what `kept` returned.
        """
        ...

    def for_step(self, kept: jax.Array, topology: Topology) -> jax.Array:
        """Returns what a compiled step of the replicas makes copies of.

        Args:
            kept: what `kept` returned.
            topology: the devices of the replicas.
        """
        ...

    def for_update(self, value: Any) -> jax.Array:
        """Returns a value for the computation of new values that are kept.

        Args:
            value: an array that is the same on every device that it is on.
        """
        ...

    def update_sharding(self) -> jax.sharding.Sharding:
        """Returns where what `for_update` returns is."""
        ...

    def rows(self, kept: jax.Array, ids: Any, topology: Topology) -> jax.Array:
        """Returns rows for each replica.

        Args:
            kept: what `brought` returned, of shape (n, ...).
            ids: integers, with the replica axis first where there are several.
            topology: the devices of the replicas.

        Returns:
            Array of shape (*ids.shape, ...); of ids that are no row's, what `jax.numpy.take` fills.
        """
        ...


class KeepingPolicy(Protocol):
    """Decides for each variable of a strategy where it is kept."""

    def choose(self, variable: Any, slot_of: Any) -> Keeping | None:
        """Returns where a new variable is kept.

        Args:
            variable: with its path, shape and dtype, and no value yet.
            slot_of: the variable that an optimizer makes it for; None for any other.

        Returns:
            None for a copy on each replica's device.
        """
        ...

    def check(self) -> None:
        """Raises where what was asked for makes no sense, now that training starts.

        Raises:
            ValueError: it does not.
        """
        ...


@dataclasses.dataclass(frozen=True)
class KeepAll:
    """Keeps every variable at one place.

    Args:
        keeping: the place.
    """

    keeping: Keeping

    def choose(self, variable: Any, slot_of: Any) -> Keeping | None:
        """Returns the place."""
        return self.keeping

    def check(self) -> None:
        """Does nothing."""


def sole_device(policy: KeepingPolicy | None) -> jax.Device | None:
    """Returns the device of a policy that keeps all variables on one.

    Args:
        policy: of a strategy.
    """
    if isinstance(policy, KeepAll) and isinstance(policy.keeping, OnOneDevice):
        return policy.keeping.device
    return None


def keeping_of(variable: Any) -> Keeping | None:
    """Returns where a variable is kept.

    Args:
        variable: any Keras variable.

    Returns:
        None where each replica's device has it.
    """
    return getattr(variable, "keeping", None)
