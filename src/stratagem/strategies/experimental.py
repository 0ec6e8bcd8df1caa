"""`sg.experimental`: the names of `tf.distribute.experimental`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stratagem.devices.communication import CommunicationImplementation, CommunicationOptions

if TYPE_CHECKING:
    from stratagem.cluster.resolvers.resolver import ClusterResolver
    from stratagem.devices.device_assignment import DeviceAssignment
    from stratagem.strategies import tpu
from stratagem.strategies import mirrored

__all__ = ["MultiWorkerMirroredStrategy", "TPUStrategy"]

_ALIASES = (
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
) -> mirrored.MultiWorkerMirroredStrategy:
    """Creates an `sg.MultiWorkerMirroredStrategy` with the signature of TensorFlow 2.2.

    Args:
        communication: the all-reduce algorithm.
        cluster_resolver: as for `sg.MultiWorkerMirroredStrategy`.
        communication_options: as for `sg.MultiWorkerMirroredStrategy`; overrides `communication`.

    Returns:
        The strategy.

    Raises:
        ValueError: invalid options. Other errors are as for `sg.MultiWorkerMirroredStrategy`.

    Example:
        >>> sg.experimental.MultiWorkerMirroredStrategy(
        ...     sg.experimental.CollectiveCommunication.RING
        ... ).communication_options.implementation.name
        'RING'

    Source: TF 2.21 collective_all_reduce_strategy.py, _CollectiveAllReduceStrategyExperimental.
    """
    import stratagem

    options = communication_options or CommunicationOptions(implementation=communication)
    return stratagem.MultiWorkerMirroredStrategy(cluster_resolver, options)


def TPUStrategy(  # noqa: N802 - stands for a class
    tpu_cluster_resolver: ClusterResolver | None = None,
    device_assignment: DeviceAssignment | None = None,
    *,
    steps_per_run: int | None = None,
) -> tpu.TPUStrategy:
    """Creates an `sg.TPUStrategy` with the signature of TensorFlow 2.2.

    Args:
        tpu_cluster_resolver: as for `sg.TPUStrategy`.
        device_assignment: its `experimental_device_assignment`.
        steps_per_run: as for `sg.TPUStrategy`.

    Returns:
        The strategy.

    Raises:
        NotFoundError: there is no TPU. Other errors are as for `sg.TPUStrategy`.

    Example:
        >>> sg.experimental.TPUStrategy().steps_per_run  # with STRATAGEM_TPU_PLATFORM=cpu

    Source: TF 2.21 tpu_strategy.py, TPUStrategy; TF 1.15 tpu_strategy.py, TPUStrategyV1.
    """
    import stratagem

    return stratagem.TPUStrategy(
        tpu_cluster_resolver, device_assignment, steps_per_run=steps_per_run
    )


def __getattr__(name: str) -> Any:
    if name not in _ALIASES:
        raise AttributeError(f"module 'stratagem.experimental' has no attribute {name!r}")
    import stratagem

    return getattr(stratagem, name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_ALIASES])
