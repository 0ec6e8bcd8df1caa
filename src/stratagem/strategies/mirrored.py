"""Synchronous training on the devices of this process, a replica on each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import jax

from stratagem.messages import explain
from stratagem.strategies.cross_device_ops import CrossDeviceOps
from stratagem.strategies.strategy import Strategy
from stratagem.topology import Topology, find_devices, local_devices
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

    Raises:
        ValueError: an empty list; an unknown, repeated or remote device; `NcclAllReduce` on CPUs.
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
    ) -> None:
        if isinstance(devices, str | jax.Device):
            devices = [devices]
        if devices is not None and not isinstance(devices, Sequence):
            raise TypeError(
                explain(
                    f"devices={devices!r} is of type {type(devices).__name__}.",
                    expected="a list of devices, one a replica, or None for all local ones.",
                    fix='write devices=["gpu:0", "gpu:1"].',
                )
            )
        found = local_devices() if devices is None else find_devices(list(devices))
        super().__init__(Topology(found), cross_device_ops)
