"""Synchronous training with mirrored variables, and large ones kept elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from stratagem.strategies.cross_device_ops import CrossDeviceOps
from stratagem.strategies.local_topology import local_topology, parameter_device_of
from stratagem.strategies.placement_rules import CENTRAL, MIRRORED, SHARDED, PlacementRules
from stratagem.strategies.strategy import Strategy
from stratagem.topology.devices import DeviceLike
from stratagem.variables import OnOneDevice, OverReplicas

__all__ = ["HybridStrategy"]


@final
class HybridStrategy(Strategy):
    """Trains one model on several devices in lockstep, large variables of it kept by rules.

    What no rule matches is mirrored: a copy on each device. A "central" variable is kept once, on
    the parameter device, which updates it; a "sharded" one in parts on the replicas' devices. Of a
    large table that layers look rows up in (`keras.layers.Embedding`,
    `sg.nn.embedding_lookup`) only these rows travel, and their gradients. What an optimizer keeps
    for a variable is where that is. The numbers are those of one device.

    Args:
        devices: as of `MirroredStrategy`.
        cross_device_ops: how gradients are combined; None lets the compiler choose.
        placement: "mirrored", "central" or "sharded" by rule. A rule is a regular expression,
            searched in the variable's path, or a function of the variable that returns whether it
            matches, such as `sg.placement.at_least_bytes(2**30)`. The first match wins.
        parameter_device: where central variables are; None for the host.

    Raises:
        ValueError: devices as of `MirroredStrategy`; an unknown place; when training starts, a rule
            that is the first match of no variable.
        TypeError: an argument of another type.

    Example:
        >>> strategy = sg.HybridStrategy(["cpu:0", "cpu:1"], placement={"embedding": "sharded"})
        >>> with strategy.scope():
        ...     table = keras.layers.Embedding(100_000, 16)

    Source: tensorflow/tensorflow issues 27726 and 20651, which ask for it.
    """

    def __init__(
        self,
        devices: Sequence[DeviceLike] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        placement: Mapping[str | Callable[[Any], bool], str],
        parameter_device: DeviceLike | None = None,
    ) -> None:
        super().__init__(local_topology(devices, name="devices"), cross_device_ops)
        places = {
            MIRRORED: None,
            CENTRAL: OnOneDevice(parameter_device_of(parameter_device)),
            SHARDED: OverReplicas(self.topology),
        }
        self.keeping = PlacementRules(placement, places)
