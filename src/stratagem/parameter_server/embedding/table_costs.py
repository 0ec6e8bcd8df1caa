"""Cost of one table in each place: bytes, and seconds of a step.

A step looks up L ids in a table of rows of R bytes, D of them distinct, on n devices.

- "mirrored": each device has the table. The rows' gradients of all devices are gathered: L R bytes.
- "sharded": each device has 1/n of the rows. Rows and gradients are gathered: 2 L R bytes.
- "central": the host has the table. Gradients are gathered, rows go to the devices, and sums of
  gradients to the host: L R bytes between devices, and 2 L R between them and the host.
- "server": D rows are pulled from the servers, and D sums of gradients are pushed. The server with
  the most of these rows limits the step, and all workers share it.

The bytes of the first three were measured (docs/design/measurements.md, "Placement"), as were the
constants of servers (docs/design/parameter_servers.md, "Lookups").
"""

from __future__ import annotations

import dataclasses

import numpy as np

from stratagem.execution.embeddings.lookups import is_worth_rows
from stratagem.messages import explain
from stratagem.parameter_server.embedding.id_frequencies import IdFrequencies
from stratagem.planning.accelerators import Accelerator
from stratagem.planning.schedule import Reduction
from stratagem.planning.step_time import Assumptions, message_s
from stratagem.planning.targets import Target


@dataclasses.dataclass(frozen=True)
class TableSize:
    """Size of an embedding table.

    Args:
        name: name of its layer or variable, as part of the variable's path.
        num_rows: number of rows.
        row_size: numbers in a row.
        dtype: their dtype.
        num_slots: optimizer slots of the table's shape: 0 for SGD, 1 for Adagrad, 2 for Adam.

    Raises:
        ValueError: a number out of range.

    Example:
        >>> sg.embedding.TableSize("users", 1_000_000, 64).num_bytes
        512000000

    Source: specific to Stratagem.
    """

    name: str
    num_rows: int
    row_size: int
    dtype: str = "float32"
    num_slots: int = 1

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.row_size < 1 or self.num_slots < 0:
            raise ValueError(
                explain(
                    f"TableSize {self.name!r} received num_rows={self.num_rows!r}, "
                    f"row_size={self.row_size!r} and num_slots={self.num_slots!r}.",
                    expected="at least one row and number, and 0 or more slots.",
                    fix="pass the shape of the table.",
                )
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, without slots."""
        return self.row_size * np.dtype(self.dtype).itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the table and its slots."""
        return self.num_rows * self.row_bytes * (1 + self.num_slots)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableCosts:
    """Assumed costs of rows on parameter servers, as measured on two cores.

    Args:
        message_s: seconds of a server for a message.
        table_s: seconds of a server, and of a worker, for each shard of a table in a step.
        client_s: seconds of a worker for its requests in a step.
        pulled_row_s: seconds of a server for a pulled row, in addition to its bytes.
        pulled_byte_s: seconds of a server for a byte of a pulled row.
        pushed_row_s: seconds of a server for an updated row, in addition to its bytes.
        pushed_byte_s: seconds of a server for a byte of an updated row.
        id_s: seconds of a worker for an id, in addition to its row's bytes.
        byte_s: seconds of a worker for a byte of an id's row or gradient.
        cached_id_s: seconds of a worker for an id that is looked for in a `RowCache`.

    Example:
        >>> costs = sg.embedding.TableCosts(pulled_byte_s=1e-10)  # for sg.embedding.plan(costs=...)

    Source: specific to Stratagem.
    """

    message_s: float = 1.6e-4
    table_s: float = 3e-5
    client_s: float = 2e-4
    pulled_row_s: float = 3e-8
    pulled_byte_s: float = 2e-10
    pushed_row_s: float = 4e-8
    pushed_byte_s: float = 1e-9
    id_s: float = 2e-8
    byte_s: float = 1.5e-10
    cached_id_s: float = 9e-8


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableCluster:
    """Machines that can hold tables.

    Args:
        target: devices of the replicas, from `sg.planning.parse_target`; None for `num_devices`
            devices of this description.
        num_devices: devices of one host, without a target.
        device_bytes: memory for tables on each device; None for half of what JAX has on a device of
            the target, and none without a target.
        link_bytes_per_s: bandwidth of a device to others, without a target.
        host_bytes: memory for tables on the host of the devices.
        host_bytes_per_s: bandwidth of a device to its host.
        num_servers: parameter servers.
        server_bytes: memory for tables on each.
        server_bytes_per_s: bandwidth of a server, and of a worker, to the other side.
        num_workers: 1 for devices in lockstep (`HybridStrategy`); more for workers that train
            without waiting for each other (`ParameterServerStrategy`), which keep no table.

    Raises:
        ValueError: no device, worker or bandwidth.

    Example:
        >>> cluster = sg.embedding.TableCluster(
        ...     target=sg.planning.parse_target("8xH100"), num_servers=4, server_bytes=200e9)
        >>> cluster.devices.num_devices
        8

    Source: specific to Stratagem.
    """

    target: Target | None = None
    num_devices: int = 1
    device_bytes: float | None = None
    link_bytes_per_s: float = 1e10
    host_bytes: float = 0
    host_bytes_per_s: float = 1e10
    num_servers: int = 0
    server_bytes: float = 0
    server_bytes_per_s: float = 1e9
    num_workers: int = 1

    def __post_init__(self) -> None:
        rates = (self.link_bytes_per_s, self.host_bytes_per_s, self.server_bytes_per_s)
        if min(self.num_devices, self.num_workers) < 1 or self.num_servers < 0 or min(rates) <= 0:
            raise ValueError(
                explain(
                    f"TableCluster received num_devices={self.num_devices!r}, "
                    f"num_workers={self.num_workers!r}, num_servers={self.num_servers!r} and "
                    f"bandwidths {rates}.",
                    expected="at least one device and worker, and bandwidths above 0.",
                    fix="describe the machines that train.",
                )
            )

    @property
    def devices(self) -> Target:
        """The devices of a worker."""
        if self.target is not None:
            return self.target
        kind = Accelerator(
            name="device",
            platform="gpu",
            device_kind="device",
            memory_bytes=int(self.device_bytes or 0),
            pool_share=1.0,
            flops_per_s={"float32": 1.0},
            memory_bytes_per_s=self.link_bytes_per_s,
            link_bytes_per_s=self.link_bytes_per_s,
            network_bytes_per_s=self.link_bytes_per_s,
            devices_per_host=self.num_devices,
        )
        return Target(kind, 1, self.num_devices)

    @property
    def free_device_bytes(self) -> float:
        """Memory for tables on each device."""
        if self.device_bytes is not None:
            return self.device_bytes
        return 0.0 if self.target is None else self.target.accelerator.pool_bytes / 2


def moved_bytes(
    table: TableSize, frequencies: IdFrequencies, num_devices: int
) -> dict[str, tuple[float, float]]:
    """Returns bytes of a step by place: gathered by all devices together, and to or from the host.

    Small tables have a gradient of the whole table, and are looked up where they are.
    """
    rows_bytes = frequencies.ids_per_step * table.row_bytes
    if not is_worth_rows((table.num_rows, table.row_size)):
        whole = table.num_rows * table.row_bytes
        gathered = 2 * (num_devices - 1) * whole
        return {
            "mirrored": (gathered, 0),
            "sharded": (gathered, 0),
            "central": (gathered, 2 * whole),
        }
    gathered = (num_devices - 1) * rows_bytes
    return {
        "mirrored": (gathered, 0),
        "sharded": (2 * gathered, 0),
        "central": (gathered, 2 * rows_bytes),
    }


def device_s(
    table: TableSize, frequencies: IdFrequencies, cluster: TableCluster, assumed: Assumptions
) -> dict[str, float]:
    """Returns the seconds of a step by place, for places that devices can access."""
    target = cluster.devices
    moved = moved_bytes(table, frequencies, target.num_devices)
    seconds: dict[str, float] = {}
    for place, (gathered, host) in moved.items():
        # An all-gather of an array of S bytes sends (n - 1) S over all devices.
        array = gathered / max(1, target.num_devices - 1)
        gather_s = message_s(Reduction(place, round(array), (), "all-gather"), target, assumed)
        seconds[place] = gather_s + host / target.num_devices / cluster.host_bytes_per_s
    return seconds


def server_s(
    table: TableSize,
    frequencies: IdFrequencies,
    cluster: TableCluster,
    costs: TableCosts,
    num_shards: int,
    pulled: float | None = None,
) -> float:
    """Returns the seconds of a step of a worker that has the table on servers.

    The messages of a step are shared by all tables, and are not included.

    Args:
        table: its size.
        frequencies: of its ids.
        cluster: the servers, the workers and the links between them.
        costs: of the servers' and the worker's work.
        num_shards: number of servers that have a part of the table.
        pulled: rows that the worker pulls; None for all distinct ones.
    """
    distinct = frequencies.distinct(table.num_rows)
    pulls = distinct if pulled is None else pulled
    if not is_worth_rows((table.num_rows, table.row_size)):
        pulls = distinct = float(table.num_rows)
    most = float(frequencies.shard_shares(table.num_rows, num_shards).max())
    size = table.row_bytes
    worker_s = 2 * frequencies.ids_per_step * (costs.id_s + size * costs.byte_s)
    worker_s += num_shards * costs.table_s
    if pulled is not None:
        worker_s += frequencies.ids_per_step * costs.cached_id_s
    row_s = pulls * (costs.pulled_row_s + size * costs.pulled_byte_s)
    row_s += distinct * (costs.pushed_row_s + size * costs.pushed_byte_s)
    sent_bytes = (pulls + distinct) * size
    server_one_s = costs.table_s + most * (row_s + sent_bytes / cluster.server_bytes_per_s)
    # Servers work for one worker after the other; its own link and shards are waited for anyway.
    link_s = sent_bytes / cluster.server_bytes_per_s
    return worker_s + max(link_s, server_one_s * cluster.num_workers)
