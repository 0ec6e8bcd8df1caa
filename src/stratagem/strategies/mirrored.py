"""Synchronous training on the devices of this process, a replica on each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from stratagem.strategies.cross_device_ops import CrossDeviceOps
from stratagem.strategies.local_topology import local_topology
from stratagem.strategies.state_sharding import keeping_of_state
from stratagem.strategies.strategy import Strategy
from stratagem.topology.devices import DeviceLike

__all__ = ["MirroredStrategy"]


@final
class MirroredStrategy(Strategy):
    """Trains one model on several devices in lockstep, each with its own copy of the variables.

    Each replica computes on its part of a batch; gradients are summed over replicas, so that all
    copies take the same update.

    Args:
        devices: names such as `"gpu:0"`, indices or `jax.Device`s, one a replica; None takes every
            local accelerator or, where there is none, every local CPU device. CPU devices that do
            not exist are made, if JAX has not started.
        cross_device_ops: how gradients are combined; None lets the compiler choose.
        shard_state: what the replicas' devices have a part of each, and no copies: "optimizer" for
            what the optimizer keeps, "all" for the weights, too, which a step then gathers; None
            for nothing. The numbers are the same.

    Raises:
        ValueError: an empty list; an unknown, repeated or remote device; `NcclAllReduce` on CPUs;
            another `shard_state`.
        TypeError: `cross_device_ops` that are none, or devices of another type.

    Example:
        >>> sg.MirroredStrategy(["cpu:0", "cpu:1"]).num_replicas_in_sync
        2

    Source: TF 2.21 mirrored_strategy.py, MirroredStrategy.
    """

    def __init__(
        self,
        devices: Sequence[DeviceLike] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        shard_state: str | None = None,
    ) -> None:
        super().__init__(local_topology(devices, name="devices"), cross_device_ops)
        self.keeping = keeping_of_state(shard_state, self.topology)
