"""The strategies that keep the contract. Whoever adds a strategy adds its row here, and no test."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from unittest import mock

import stratagem as sg


@dataclasses.dataclass(frozen=True)
class Row:
    """One strategy under contract.

    `make` returns a new one, except that of the default strategy there is only one. `is_slow` tells
    that another row is so like it that only the slow tests run it.
    """

    make: Callable[[], sg.Strategy]
    num_replicas: int
    is_cluster: bool = False
    is_slow: bool = False


def _mirrored(num_replicas: int) -> Row:
    names = [f"cpu:{index}" for index in range(num_replicas)]
    return Row(lambda: sg.MirroredStrategy(names), num_replicas)


def _tpu(num_replicas: int) -> sg.Strategy:
    """Chips that CPU devices stand for, of which the first are taken."""
    with mock.patch.dict(os.environ, STRATAGEM_TPU_PLATFORM="cpu"):
        topology = sg.tpu.initialize_tpu_system()
        build = sg.tpu.experimental.DeviceAssignment.build
        return sg.TPUStrategy(None, build(topology, num_replicas=num_replicas))


# In a process of a cluster (tests/multiprocess) the suite runs on that cluster: each of its
# processes runs the same tests in the same order.
_CLUSTER = {
    "workers": Row(
        lambda: sg.MultiWorkerMirroredStrategy(
            devices_per_replica=int(os.environ.get("STRATAGEM_TEST_GROUP_SIZE", "1"))
        ),
        int(os.environ.get("STRATAGEM_TEST_REPLICAS", "0")),
        is_cluster=True,
    ),
}


def _central(num_replicas: int, *, is_slow: bool = False) -> Row:
    names = [f"cpu:{index}" for index in range(num_replicas)]
    return Row(lambda: sg.CentralStorageStrategy(names, "cpu:0"), num_replicas, is_slow=is_slow)


def _hybrid(num_replicas: int, place: str) -> Row:
    """All variables in one place, those too that are too small for it to be of use."""
    names = [f"cpu:{index}" for index in range(num_replicas)]
    return Row(lambda: sg.HybridStrategy(names, placement={"": place}), num_replicas, is_slow=True)


def _logical(num_replicas: int, num_logical: int) -> Row:
    names = [
        [f"cpu:{num_logical * replica + index}" for index in range(num_logical)]
        for replica in range(num_replicas)
    ]
    return Row(lambda: sg.MirroredStrategy(names), num_replicas)


_LOCAL = {
    "default": Row(sg.get_strategy, 1),
    "one_device": Row(lambda: sg.OneDeviceStrategy("cpu:0"), 1),
    "mirrored_1": _mirrored(1),
    "mirrored_2": _mirrored(2),
    "mirrored_8": _mirrored(8),
    "central_1": _central(1, is_slow=True),
    "central_2": _central(2),
    "central_4": _central(4, is_slow=True),
    "hybrid_2": _hybrid(2, "sharded"),
    "hybrid_4": _hybrid(4, "sharded"),
    "hybrid_central_2": _hybrid(2, "central"),
    "logical_1x2": _logical(1, 2),
    "logical_2x2": _logical(2, 2),
    "logical_2x4": _logical(2, 4),
    "tpu_2": Row(lambda: _tpu(2), 2),
}
ROWS = _CLUSTER if "STRATAGEM_TEST_REPLICAS" in os.environ else _LOCAL
