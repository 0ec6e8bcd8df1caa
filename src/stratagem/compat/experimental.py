"""The names of `tf.distribute.experimental`: `sg.experimental.X` is `sg.X`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from stratagem.communication import CommunicationImplementation, CommunicationOptions

if TYPE_CHECKING:
    from stratagem.cluster import ClusterResolver
    from stratagem.topology.device_assignment import DeviceAssignment

__all__ = ["MultiWorkerMirroredStrategy", "TPUStrategy"]

_SAME = (
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "PreemptionWatcher",
    "TerminationConfig",
    "ValueContext",
    "coordinator",
    "partitioners",
)


def MultiWorkerMirroredStrategy(  # noqa: N802 - stands for a class
    communication: CommunicationImplementation | str = CommunicationImplementation.AUTO,
    cluster_resolver: ClusterResolver | None = None,
    communication_options: CommunicationOptions | None = None,
) -> Any:
    """Makes an `sg.MultiWorkerMirroredStrategy`, with the arguments that it had in TensorFlow 2.2.

    Args:
        communication: the algorithm.
        cluster_resolver: as of `sg.MultiWorkerMirroredStrategy`.
        communication_options: likewise; takes the place of `communication`.

    Returns:
        The strategy.

    Raises:
        ValueError: and what else `sg.MultiWorkerMirroredStrategy` raises.

    Example:
        >>> sg.experimental.MultiWorkerMirroredStrategy(
        ...     sg.experimental.CollectiveCommunication.RING
        ... ).communication_options.implementation.name
        'RING'

    Source: TF 2.21 collective_all_reduce_strategy.py, _CollectiveAllReduceStrategyExperimental.
    """
    options = communication_options or CommunicationOptions(implementation=communication)
    strategies: Any = importlib.import_module("stratagem").MultiWorkerMirroredStrategy
    return strategies(cluster_resolver, options)


def TPUStrategy(  # noqa: N802 - stands for a class
    tpu_cluster_resolver: ClusterResolver | None = None,
    device_assignment: DeviceAssignment | None = None,
    *,
    steps_per_run: int | None = None,
) -> Any:
    """Makes an `sg.TPUStrategy`, with the arguments that it had in TensorFlow 2.2.

    Args:
        tpu_cluster_resolver: as of `sg.TPUStrategy`.
        device_assignment: its `experimental_device_assignment`.
        steps_per_run: likewise.

    Returns:
        The strategy.

    Raises:
        NotFoundError: and what else `sg.TPUStrategy` raises.

    Example:
        >>> sg.experimental.TPUStrategy().steps_per_run  # with STRATAGEM_TPU_PLATFORM=cpu

    Source: TF 2.21 tpu_strategy.py, TPUStrategy; TF 1.15 tpu_strategy.py, TPUStrategyV1.
    """
    strategies: Any = importlib.import_module("stratagem").TPUStrategy
    return strategies(tpu_cluster_resolver, device_assignment, steps_per_run=steps_per_run)


def __getattr__(name: str) -> Any:
    if name not in _SAME:
        raise AttributeError(f"module 'stratagem.experimental' has no attribute {name!r}")
    return getattr(importlib.import_module("stratagem"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_SAME])
