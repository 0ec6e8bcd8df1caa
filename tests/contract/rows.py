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
from stratagem.strategies.placement_rules import pinned_host_store
from stratagem.variables.placement import UniformPlacement
from stratagem.variables.sharded_store import ShardedStore
from tests.on_gpu.devices import selected_platform
from tests.parameter_server.clusters import ThreadCluster


@dataclasses.dataclass(frozen=True)
class Row:
    """One strategy under contract.

    `make` returns a new one, except that of the default strategy there is only one. `is_cluster`
    tells that it cannot be copied. `told_by` are the files of this suite, compiled, that tell how
    it differs from the other rows; all others are for the slow tests. None for every file, both
    ways, unless `runs_eagerly` is False: another row tells what happens op by op.
    """

    make: Callable[[], sg.Strategy]
    num_replicas: int
    is_cluster: bool = False
    told_by: tuple[str, ...] | None = None
    runs_eagerly: bool = True

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


def _mirrored(num_replicas: int, told_by: tuple[str, ...] | None = None) -> Row:
    make = functools.partial(sg.MirroredStrategy, _names(num_replicas))
    return Row(make, num_replicas, told_by=told_by)


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
    "workers": Row(_workers, int(os.environ.get("STRATAGEM_TEST_REPLICAS", "0")), is_cluster=True),
}


def _central(num_replicas: int, *told_by: str) -> Row:
    make = functools.partial(sg.CentralStorageStrategy, _names(num_replicas), "cpu:0")
    return Row(make, num_replicas, told_by=told_by)


def _hybrid(num_replicas: int, place: str, *told_by: str) -> Row:
    """All variables in one place, those too that are too small for it to be of use."""
    make = functools.partial(sg.HybridStrategy, _names(num_replicas), placement={"": place})
    return Row(make, num_replicas, told_by=told_by)


def _pinned(num_replicas: int, *told_by: str) -> Row:
    """All variables in pinned memory, those too that are too small for it to be of use."""

    def make() -> sg.Strategy:
        topology = Topology(find_devices(_names(num_replicas)))
        return sg.Strategy(topology, placement=UniformPlacement(pinned_host_store(topology)))

    return Row(make, num_replicas, told_by=told_by)


def _served(num_replicas: int, *told_by: str) -> Row:
    """All variables on a parameter server, but what each process has for itself."""

    def make() -> sg.Strategy:
        maker = "stratagem.parameter_server.strategy.hybrid.start_cluster"
        with mock.patch(maker, lambda plan: ThreadCluster(plan.num_servers, [])):
            return sg.HybridStrategy(_names(num_replicas), placement={"": "server"}, num_servers=1)

    return Row(make, num_replicas, is_cluster=True, told_by=told_by)


def _logical(num_replicas: int, num_logical: int, *told_by: str) -> Row:
    names = [
        [f"cpu:{num_logical * replica + index}" for index in range(num_logical)]
        for replica in range(num_replicas)
    ]
    return Row(functools.partial(sg.MirroredStrategy, names), num_replicas, told_by=told_by)


_LOCAL = {
    "default": Row(sg.get_strategy, 1, runs_eagerly=False),
    "one_device": Row(lambda: sg.OneDeviceStrategy("cpu:0"), 1),
    "mirrored_1": _mirrored(1, ("test_members", "test_run")),
    "mirrored_2": _mirrored(2),
    "mirrored_8": _mirrored(8, ("test_members", "test_run", "test_collectives")),
    "central_1": _central(1),
    "central_2": _central(
        2,
        "test_members",
        "test_run",
        "test_variables",
        "test_aggregation",
        "test_returned_variables",
        "test_builds_in_steps",
        "test_apply_outside",
    ),
    "central_4": _central(4),
    "hybrid_2": _hybrid(
        2,
        "sharded",
        "test_members",
        "test_aggregation",
        "test_returned_variables",
        "test_apply_outside",
    ),
    "hybrid_4": _hybrid(4, "sharded"),
    "hybrid_central_2": _hybrid(2, "central"),
    "hybrid_central_4": _hybrid(4, "central"),
    "hybrid_pinned_2": _pinned(2, "test_members"),
    "hybrid_pinned_4": _pinned(4),
    "hybrid_server_1": _served(1),
    "hybrid_server_2": _served(
        2, "test_aggregation", "test_returned_variables", "test_apply_outside"
    ),
    "logical_1x2": _logical(1, 2),
    "logical_2x2": _logical(2, 2, "test_members"),
    "logical_2x4": _logical(2, 4),
    "tpu_2": Row(lambda: _tpu(2), 2, told_by=("test_members", "test_apply_outside")),
    "tpu_4": Row(lambda: _tpu(4), 4, told_by=()),
}


def _beside_a_gpu(rows: dict[str, Row]) -> dict[str, Row]:
    """Rows of one replica compute on the GPU: each runs every file. Of the others, two do.

    A row of several replicas says nothing where a test gets the GPU alone.
    """
    others = () if selected_platform().endswith("_alone") else ("mirrored_2", "central_2")
    widened = {
        name: dataclasses.replace(rows[name], told_by=None, runs_eagerly=False)
        for name in ("mirrored_1", "hybrid_pinned_1")
    }
    on_cpu = {
        name: dataclasses.replace(row, told_by=())
        for name, row in rows.items()
        if row.num_replicas > 1 and name not in others
    }
    return rows | on_cpu | widened


if selected_platform() != "cpu":
    _LOCAL = _beside_a_gpu({**_LOCAL, "hybrid_pinned_1": _pinned(1)})
ROWS = _CLUSTER if "STRATAGEM_TEST_REPLICAS" in os.environ else _LOCAL
