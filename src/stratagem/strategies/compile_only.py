"""Strategy on abstract devices: its programs are compiled but never run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, final

import jax

from stratagem.devices.mesh import Topology
from stratagem.errors import explain
from stratagem.execution.programs.lockstep import Lockstep
from stratagem.strategies.base.cross_device_ops import CrossDeviceOps
from stratagem.strategies.base.strategy import Strategy


@final
class CompileOnlyStrategy(Strategy):
    """One replica per abstract device, such as the 256 chips of a TPU slice.

    Variables created in its scope have a shape and no value, so that a model of any size takes no
    memory. `stratagem.keras.lower_training_step` lowers the step of `fit`.

    Args:
        devices: devices in replica order, for example from
            `jax.experimental.topologies.get_topology_desc`.
        cross_device_ops: how gradients are combined; None chooses as on real devices.

    Raises:
        ValueError: no device.
        TypeError: an argument of another type.

    Source: JAX, ahead-of-time lowering and compilation (jax.experimental.topologies).
    """

    def __init__(
        self, devices: Sequence[jax.Device], cross_device_ops: CrossDeviceOps | None = None
    ) -> None:
        super().__init__(Topology(tuple(devices)), cross_device_ops, executor=CompileOnly)


class CompileOnly(Lockstep):
    """Executor that lowers and compiles programs for abstract devices."""

    has_values = False

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> NoReturn:
        """Raises a RuntimeError: programs cannot run."""
        raise RuntimeError(
            explain(
                f"run was called on the {self._strategy.num_replicas_in_sync} devices of a "
                "CompileOnlyStrategy.",
                expected="programs that are only lowered and compiled: the devices are not here.",
                fix="lower the step, or use a strategy of devices that are here.",
            )
        )
