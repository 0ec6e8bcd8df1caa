"""The strategies that keep the contract. Whoever adds a strategy adds its row here, and no test."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from unittest import mock

import stratagem as sg
from stratagem.devices.finding import find_devices
from stratagem.devices.mesh import Topology
from stratagem.strategies.placement import pinned_host_store
from stratagem.variables.placement import ShardedStore, UniformPlacement
from tests.platforms import selected_platform
from tests.unit.parameter_server.clusters import ThreadCluster


@dataclasses.dataclass(frozen=True)
class Row:
    """One strategy under contract.

    `make` returns a new one, except that of the default strategy there is only one. `is_cluster`
    tells that it cannot be copied. `quick` are the executions that run in `make test`: all others
    are slow tests. A test without the `execution` fixture counts as compiled.
    """

    make: Callable[[], sg.Strategy]
    num_replicas: int
    is_cluster: bool = False
    quick: tuple[str, ...] = ()

    @contextlib.contextmanager
    def made(self) -> Iterator[sg.Strategy]:
        """A new one, which ends with the block."""
        strategy = self.make()
        try:
            yield strategy
        finally:
            if isinstance(strategy, sg.HybridStrategy):
                strategy.close()


def _names(num_replicas: int) -> list[str]:
    return [f"cpu:{index}" for index in range(num_replicas)]


def _mirrored(num_replicas: int, *quick: str) -> Row:
    make = functools.partial(sg.MirroredStrategy, _names(num_replicas))
    return Row(make, num_replicas, quick=quick)


def _tpu(num_replicas: int) -> sg.Strategy:
    """Chips that CPU devices stand for, of which the first are taken."""
    with mock.patch.dict(os.environ, STRATAGEM_TPU_PLATFORM="cpu"):
        topology = sg.tpu.initialize_tpu_system()
        build = sg.tpu.experimental.DeviceAssignment.build
        return sg.TPUStrategy(None, build(topology, num_replicas=num_replicas))


def _workers() -> sg.Strategy:
    group_size = int(os.environ.get("STRATAGEM_TEST_GROUP_SIZE", "1"))
    if "STRATAGEM_TEST_IN_PARTS" not in os.environ:
        return sg.MultiWorkerMirroredStrategy(devices_per_replica=group_size)
    strategy = sg.MultiWorkerMirroredStrategy(shard_state="all")
    # Those variables, too, that are too small for it to be of use.
    strategy.placement = UniformPlacement(ShardedStore(strategy.topology))
    return strategy


# In a process of a cluster (tests/multiprocess) the suite runs on that cluster: each of its
# processes runs the same tests in the same order.
_CLUSTER = {
    "workers": Row(
        _workers,
        int(os.environ.get("STRATAGEM_TEST_REPLICAS", "0")),
        is_cluster=True,
        quick=("compiled", "eager"),
    ),
}


def _central(num_replicas: int) -> Row:
    make = functools.partial(sg.CentralStorageStrategy, _names(num_replicas), "cpu:0")
    return Row(make, num_replicas)


def _hybrid(num_replicas: int, place: str, *quick: str) -> Row:
    """All variables in one place, those too that are too small for it to be of use."""
    make = functools.partial(sg.HybridStrategy, _names(num_replicas), placement={"": place})
    return Row(make, num_replicas, quick=quick)


def _pinned(num_replicas: int) -> Row:
    """All variables in pinned memory, those too that are too small for it to be of use."""

    def make() -> sg.Strategy:
        topology = Topology(find_devices(_names(num_replicas)))
        return sg.Strategy(topology, placement=UniformPlacement(pinned_host_store(topology)))

    return Row(make, num_replicas)


def _served(num_replicas: int, *quick: str) -> Row:
    """All variables on a parameter server, but what each process has for itself."""

    def make() -> sg.Strategy:
        maker = "stratagem.parameter_server.strategy.start_cluster"
        with mock.patch(maker, lambda plan: ThreadCluster(plan.num_servers, [])):
            return sg.HybridStrategy(_names(num_replicas), placement={"": "server"}, num_servers=1)

    return Row(make, num_replicas, is_cluster=True, quick=quick)


def _logical(num_replicas: int, num_logical: int) -> Row:
    names = [
        [f"cpu:{num_logical * replica + index}" for index in range(num_logical)]
        for replica in range(num_replicas)
    ]
    return Row(functools.partial(sg.MirroredStrategy, names), num_replicas)


_LOCAL = {
    "default": Row(sg.get_strategy, 1, quick=("compiled",)),
    "one_device": Row(lambda: sg.OneDeviceStrategy("cpu:0"), 1, quick=("eager",)),
    "mirrored_1": _mirrored(1),
    "mirrored_2": _mirrored(2, "compiled", "eager"),
    "mirrored_8": _mirrored(8),
    "central_1": _central(1),
    "central_2": _central(2),
    "central_4": _central(4),
    "hybrid_2": _hybrid(2, "sharded", "compiled"),
    "hybrid_4": _hybrid(4, "sharded"),
    "hybrid_central_2": _hybrid(2, "central"),
    "hybrid_central_4": _hybrid(4, "central"),
    "hybrid_pinned_2": _pinned(2),
    "hybrid_pinned_4": _pinned(4),
    "hybrid_server_1": _served(1),
    "hybrid_server_2": _served(2, "compiled"),
    "logical_1x2": _logical(1, 2),
    "logical_2x2": _logical(2, 2),
    "logical_2x4": _logical(2, 4),
    "tpu_2": Row(lambda: _tpu(2), 2),
    "tpu_4": Row(lambda: _tpu(4), 4),
}


def _beside_a_gpu(rows: dict[str, Row]) -> dict[str, Row]:
    """Rows of one replica compute on the GPU: each is quick. Of the others, `mirrored_2` stays so.

    A row of several replicas says nothing where a test gets the GPU alone.
    """
    other = "" if selected_platform().endswith("_alone") else "mirrored_2"
    widened = {
        name: dataclasses.replace(rows[name], quick=("compiled",))
        for name in ("mirrored_1", "hybrid_pinned_1")
    }
    on_cpu = {
        name: dataclasses.replace(row, quick=())
        for name, row in rows.items()
        if row.num_replicas > 1 and name != other
    }
    return rows | on_cpu | widened


if selected_platform() != "cpu":
    _LOCAL = _beside_a_gpu({**_LOCAL, "hybrid_pinned_1": _pinned(1)})
ROWS = _CLUSTER if "STRATAGEM_TEST_REPLICAS" in os.environ else _LOCAL
