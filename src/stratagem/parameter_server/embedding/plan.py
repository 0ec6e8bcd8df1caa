"""`plan`: a place for each embedding table, from sizes, frequencies and links, with reasons."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from stratagem.errors import explain
from stratagem.execution.embeddings.lookups import is_worth_rows
from stratagem.logs import size_text
from stratagem.parameter_server.client.row_cache import RowCache
from stratagem.parameter_server.embedding.id_frequencies import IdFrequencies
from stratagem.planning.accelerators import Accelerator
from stratagem.planning.report import time_text
from stratagem.planning.schedule import Reduction
from stratagem.planning.step_time import Assumptions, message_s
from stratagem.planning.targets import Target

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

# Cost of one table in each place: bytes, and seconds of a step.
#
# A step looks up L ids in a table of rows of R bytes, D of them distinct, on n devices.
#
# - "mirrored": each device has the table. The rows' gradients of all devices are gathered: L R
# bytes.
# - "sharded": each device has 1/n of the rows. Rows and gradients are gathered: 2 L R bytes.
# - "central": the host has the table. Gradients are gathered, rows go to the devices, and sums of
#   gradients to the host: L R bytes between devices, and 2 L R between them and the host.
# - "server": D rows are pulled from the servers, and D sums of gradients are pushed. The server
# with
#   the most of these rows limits the step, and all workers share it.
#
# The bytes of the first three were measured (docs/design/measurements.md, "Placement"), as were the
# constants of servers (docs/design/parameter_servers.md, "Lookups").


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


# A cached row takes its own bytes and up to so many (see `RowCache`).
_CACHE_ROW_BYTES = 56


@dataclasses.dataclass(frozen=True)
class PlannedPartitioner:
    """Splits variables of some shapes into shards; see `TablePlan.partitioner`."""

    shards: tuple[tuple[tuple[int, ...], int], ...]

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        """Returns the number of shards along each axis."""
        counts = [1] * len(shape)
        if shape:
            counts[axis] = dict(self.shards).get(tuple(shape), 1)
        return counts


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """One way to place a table: its cost, and the memory that it needs of each holder."""

    label: str
    place: str
    step_s: float
    num_bytes: float
    num_shards: int = 1
    cache_rows: int = 0


@dataclasses.dataclass(frozen=True)
class TableChoice:
    """The place of a table, and the reasons.

    Args:
        table: the table.
        label: the place in words, such as "by rows on 4 servers".
        place: the place of `HybridStrategy`: "mirrored", "sharded", "central" or "server".
        num_shards: number of servers that have rows of it.
        cache_rows: rows of it in the `RowCache` of a worker; 0 without.
        step_s: predicted seconds of a step.
        reasons: why each other way was not chosen, by its label.

    Example:
        >>> choice = sg.embedding.plan(
        ...     [sg.embedding.TableSize("days", 7, 16)], {"days": 32}, sg.embedding.TableCluster(
        ...         num_devices=2, device_bytes=1e9)).choices[0]
        >>> choice.label, choice.place
        ('replicated on 2 devices', 'mirrored')

    Source: specific to Stratagem.
    """

    table: TableSize
    label: str
    place: str
    num_shards: int
    cache_rows: int
    step_s: float
    reasons: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class TablePlan:
    """A place for each table.

    Args:
        choices: one for each table, in their order.
        cluster: the machines.
        max_age_steps: as for `plan`.

    Example:
        >>> plan = sg.embedding.plan(
        ...     [sg.embedding.TableSize("days", 7, 16)], {"days": 32}, sg.embedding.TableCluster(
        ...         num_devices=2, device_bytes=1e9))
        >>> plan.placement  # for HybridStrategy(placement=), which mirrors other variables
        {}

    Source: specific to Stratagem.
    """

    choices: tuple[TableChoice, ...]
    cluster: TableCluster
    max_age_steps: int = 0

    @property
    def placement(self) -> dict[str, str]:
        """Rules for `HybridStrategy(placement=)`; replicated tables need none."""
        return {
            rf"(^|/){re.escape(choice.table.name)}(/|$)": choice.place
            for choice in self.choices
            if choice.place != "mirrored"
        }

    @property
    def partitioner(self) -> PlannedPartitioner:
        """A partitioner for `variable_partitioner=`.

        It knows tables by their shapes. Tables with equal shapes are all split as finely as the one
        with the most shards.
        """
        shards: dict[tuple[int, ...], int] = {}
        for choice in self.choices:
            shape = (choice.table.num_rows, choice.table.row_size)
            shards[shape] = max(shards.get(shape, 1), choice.num_shards)
        return PlannedPartitioner(tuple(shards.items()))

    @property
    def row_cache(self) -> RowCache | None:
        """A cache for `ParameterServerStrategy(row_cache=)`, or None if no table gains by it."""
        max_rows = max((choice.cache_rows for choice in self.choices), default=0)
        if not max_rows:
            return None
        return RowCache(
            max_rows=max_rows, max_age_steps=self.max_age_steps, reads_own_updates=False
        )

    def explain(self) -> str:
        """Returns the place of each table, its predicted cost, and why others were not chosen."""
        lines: list[str] = []
        for choice in self.choices:
            table = choice.table
            size = f"{table.num_rows:,} rows of {table.row_bytes} bytes"
            lines.append(
                f"{table.name}: {choice.label}. {size}, {size_text(table.num_bytes)} with slots; "
                f"{time_text(choice.step_s)} a step."
            )
            lines += [f"  not {label}: {reason}" for label, reason in choice.reasons.items()]
        return "\n".join(lines)


def plan(
    tables: Sequence[TableSize],
    frequencies: Mapping[str, IdFrequencies | int],
    cluster: TableCluster,
    *,
    max_age_steps: int = 0,
    worker_cache_bytes: float = 1e9,
    costs: TableCosts | None = None,
    assumptions: Assumptions | None = None,
) -> TablePlan:
    """Chooses a place for each embedding table: the one that costs a step least and has memory.

    Where memory is short, tables that gain most for each byte come first. With one worker, places
    are those of `HybridStrategy`. With several, which train without waiting for each other, tables
    are on servers: whole on one, or split by rows. They are not split by columns.

    Args:
        tables: sizes of the tables.
        frequencies: ids of a step by table name, or their number for ids that are equally likely.
        cluster: the machines.
        max_age_steps: age up to which workers may use cached rows. 0 proposes no cache.
        worker_cache_bytes: memory of a worker for cached rows of each table.
        costs: assumed costs of servers; None for those measured on CPUs.
        assumptions: assumptions about links of devices; None for those of `sg.plan`.

    Returns:
        The plan.

    Raises:
        ValueError: no table, equal names, a table without frequencies, or one that fits nowhere.

    Example:
        >>> users = sg.embedding.TableSize("users", 100_000_000, 64)
        >>> cluster = sg.embedding.TableCluster(num_servers=4, server_bytes=16e9)
        >>> sg.embedding.plan([users], {"users": 4096}, cluster).choices[0].label
        'by rows on 4 servers'

    Source: specific to Stratagem; TorchRec's planner has the same purpose.
    """
    _check(tables, frequencies)
    costs, assumed = costs or TableCosts(), assumptions or Assumptions()
    found: dict[str, list[_Candidate]] = {}
    for table in tables:
        given = frequencies[table.name]
        ids = IdFrequencies(given) if isinstance(given, int) else given
        ways = _on_devices(table, ids, cluster, assumed)
        ways += _on_servers(table, ids, cluster, costs, max_age_steps, worker_cache_bytes)
        found[table.name] = sorted(ways, key=lambda one: one.step_s)
    return TablePlan(_chosen(tables, found, cluster), cluster, max_age_steps)


def _chosen(
    tables: Sequence[TableSize],
    found: Mapping[str, Sequence[_Candidate]],
    cluster: TableCluster,
) -> tuple[TableChoice, ...]:
    memory = _Memory(cluster)
    by_urgency = sorted(tables, key=lambda one: -_urgency(found[one.name]))
    chosen = {table.name: memory.choose(table, found[table.name]) for table in by_urgency}
    return tuple(chosen[table.name] for table in tables)


class _Memory:
    """Free memory of the devices, the host and each server, while tables are placed."""

    def __init__(self, cluster: TableCluster) -> None:
        self._device_bytes = cluster.free_device_bytes
        self._host_bytes = cluster.host_bytes
        self._server_bytes = [cluster.server_bytes] * cluster.num_servers

    def choose(self, table: TableSize, candidates: Sequence[_Candidate]) -> TableChoice:
        """Takes memory for the cheapest way that fits."""
        reasons: dict[str, str] = {}
        best: _Candidate | None = None
        for one in candidates:
            free = self._free(one)
            if one.num_bytes > free:
                reasons[one.label] = (
                    f"it needs {size_text(one.num_bytes)} of each, of which "
                    f"{size_text(max(0.0, free))} are free."
                )
            elif best is None:
                best = one
            else:
                reasons[one.label] = f"{time_text(one.step_s)} a step."
        if best is None:
            raise ValueError(
                explain(
                    f"Table {table.name!r} of {size_text(table.num_bytes)} fits nowhere: "
                    + "; ".join(f"{label}: {reason[:-1]}" for label, reason in reasons.items())
                    + ".",
                    expected="enough memory on devices, host or servers.",
                    fix="add servers, or tables with fewer slots, rows or columns.",
                )
            )
        self._take(best)
        if best.place == "server":
            reasons["by columns"] = "not supported; each lookup would need all servers."
        return TableChoice(
            table, best.label, best.place, best.num_shards, best.cache_rows, best.step_s, reasons
        )

    def _free(self, one: _Candidate) -> float:
        if one.place == "server":
            # The servers that take the shards are those with the most memory.
            return sorted(self._server_bytes, reverse=True)[one.num_shards - 1]
        return self._host_bytes if one.place == "central" else self._device_bytes

    def _take(self, one: _Candidate) -> None:
        if one.place == "server":
            by_free = sorted(range(len(self._server_bytes)), key=lambda at: -self._server_bytes[at])
            for server in by_free[: one.num_shards]:
                self._server_bytes[server] -= one.num_bytes
        elif one.place == "central":
            self._host_bytes -= one.num_bytes
        else:
            self._device_bytes -= one.num_bytes


def _on_devices(
    table: TableSize, ids: IdFrequencies, cluster: TableCluster, assumed: Assumptions
) -> list[_Candidate]:
    if cluster.num_workers > 1:
        return []
    number = cluster.devices.num_devices
    seconds = device_s(table, ids, cluster, assumed)
    devices = "1 device" if number == 1 else f"{number} devices"
    label = f"replicated on {devices}"
    found = [_Candidate(label, "mirrored", seconds["mirrored"], table.num_bytes)]
    if number > 1 and table.num_rows % number == 0:
        by_rows = f"by rows on {devices}"
        share = table.num_bytes / number
        found.append(_Candidate(by_rows, "sharded", seconds["sharded"], share))
    if cluster.host_bytes:
        found.append(_Candidate("on the host", "central", seconds["central"], table.num_bytes))
    return found


def _on_servers(
    table: TableSize,
    ids: IdFrequencies,
    cluster: TableCluster,
    costs: TableCosts,
    max_age_steps: int,
    worker_cache_bytes: float,
) -> list[_Candidate]:
    found: list[_Candidate] = []
    if not cluster.num_servers:
        return found
    may_cache = cluster.num_workers > 1 and max_age_steps > 0
    cache_rows = int(worker_cache_bytes / (table.row_bytes + _CACHE_ROW_BYTES)) if may_cache else 0
    for number in sorted({1, min(cluster.num_servers, table.num_rows)}):
        label = "whole on a server" if number == 1 else f"by rows on {number} servers"
        share = table.num_bytes * math.ceil(table.num_rows / number) / table.num_rows
        seconds = server_s(table, ids, cluster, costs, number)
        found.append(_Candidate(label, "server", seconds, share, number))
        if cache_rows:
            pulled = ids.pulled(table.num_rows, max_rows=cache_rows, max_age_steps=max_age_steps)
            seconds = server_s(table, ids, cluster, costs, number, pulled)
            cached = f"{label}, cached by workers"
            rows = min(cache_rows, table.num_rows)
            found.append(_Candidate(cached, "server", seconds, share, number, rows))
    return found


def _urgency(candidates: Sequence[_Candidate]) -> float:
    """Returns the seconds of a step that a table loses for each byte without its best place."""
    if not candidates:
        return 0.0
    best = candidates[0]
    others = [one.step_s for one in candidates if one.place != best.place]
    return (min(others, default=math.inf) - best.step_s) / best.num_bytes


def _check(tables: Sequence[TableSize], frequencies: Mapping[str, IdFrequencies | int]) -> None:
    names = [table.name for table in tables]
    missing = sorted({*names} - {*frequencies})
    if names and len({*names}) == len(names) and not missing:
        return
    raise ValueError(
        explain(
            f"plan received tables {names} and frequencies of {sorted(frequencies)}.",
            expected="at least one table, different names, and frequencies for each.",
            fix=f"add frequencies of {missing}." if missing else "give each table its own name.",
        )
    )
