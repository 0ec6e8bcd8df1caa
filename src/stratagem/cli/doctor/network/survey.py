"""`Survey`: all measurements between the hosts of a cluster, and the limits of making them."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from stratagem.cluster.addresses import split_address
from stratagem.cluster.resolvers.resolver import ClusterResolver

# Hosts of a survey, from a cluster's description.


@dataclasses.dataclass(frozen=True)
class SurveyedHost:
    """One host, or one task of a cluster.

    Args:
        name: name in findings, such as "worker 1".
        address: host name or address that the others connect to.
        port: port of its task; None if no cluster is described.
    """

    name: str
    address: str
    port: int | None = None


def hosts_of(resolver: ClusterResolver) -> list[SurveyedHost]:
    """Returns the tasks of a cluster, in one order on all hosts. The first one leads."""
    spec = resolver.cluster_spec()
    return [
        SurveyedHost(f"{job} {index}", *split_address(spec.task_address(job, index)))
        for job in spec.jobs
        for index in spec.task_indices(job)
    ]


def own_index(resolver: ClusterResolver, hosts: Sequence[SurveyedHost]) -> int | None:
    """Returns the index of this process's task; None if it has none."""
    name = f"{resolver.task_type} {resolver.task_id}"
    return next((i for i, host in enumerate(hosts) if host.name == name), None)


# A connection this much slower than the median counts as slow.
_SLOW_FRACTION = 0.25
# Row: from. Column: to. None where nothing was measured.
Matrix = list[list[float | None]]
# Outcome and numeric address.
Attempts = list[list[tuple[str, str] | None]]


@dataclasses.dataclass
class Survey:
    """Measurements between hosts; rows are sources, columns destinations.

    Args:
        hosts: all hosts, answered or not.
        absent: reason by index, for hosts that gave no answer, or no longer do.
        rejected: tasks that describe another cluster, or have the index of another one.
        failures: measurements between two hosts that failed, with the reason.
        facts: versions, devices and findings by index.
        cluster: connection attempts to the ports of the cluster.
        free: connection attempts to a free port.
        round_trip_s: median round trips.
        bytes_per_s: speed of one connection.
        offset_s: how far each clock is ahead of the reference.
        uncertainty_s: error limits of `offset_s`.
        own_address: numeric address that each host has for its own name.
        reference: index of the host whose clock the others are compared with.
        owned: by index, True for those numeric addresses, used by others, that the host has.
    """

    hosts: list[SurveyedHost]
    absent: dict[int, str] = dataclasses.field(default_factory=dict[int, str])
    rejected: list[str] = dataclasses.field(default_factory=list[str])
    failures: list[str] = dataclasses.field(default_factory=list[str])
    facts: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict[int, dict[str, Any]])
    cluster: Attempts = dataclasses.field(default_factory=Attempts)
    free: Attempts = dataclasses.field(default_factory=Attempts)
    round_trip_s: Matrix = dataclasses.field(default_factory=Matrix)
    bytes_per_s: Matrix = dataclasses.field(default_factory=Matrix)
    offset_s: list[float | None] = dataclasses.field(default_factory=list[float | None])
    uncertainty_s: list[float | None] = dataclasses.field(default_factory=list[float | None])
    own_address: dict[int, str] = dataclasses.field(default_factory=dict[int, str])
    reference: int = 0
    owned: dict[int, dict[str, bool]] = dataclasses.field(
        default_factory=dict[int, dict[str, bool]]
    )

    def __post_init__(self) -> None:
        size = len(self.hosts)
        self.cluster = self.cluster or square(size)
        self.free = self.free or square(size)
        self.round_trip_s = self.round_trip_s or square(size)
        self.bytes_per_s = self.bytes_per_s or square(size)
        self.offset_s = self.offset_s or [None] * size
        self.uncertainty_s = self.uncertainty_s or [None] * size

    @property
    def names(self) -> list[str]:
        """Names of all hosts."""
        return [host.name for host in self.hosts]

    def slow_pairs(self) -> list[tuple[int, int]]:
        """Returns the pairs whose connection is much slower than the median, slowest first."""
        rates = {
            (one, other): rate
            for one, row in enumerate(self.bytes_per_s)
            for other, rate in enumerate(row)
            if rate is not None
        }
        limit = _SLOW_FRACTION * statistics.median(rates.values()) if rates else 0.0
        return sorted((pair for pair in rates if rates[pair] < limit), key=rates.__getitem__)

    def as_dict(self) -> dict[str, Any]:
        """Returns the survey as JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Survey:
        """Returns the survey of `as_dict`, also after JSON made its keys strings."""
        values: dict[str, Any] = {
            **fields,
            "hosts": [SurveyedHost(**host) for host in fields["hosts"]],
        }
        for name in ("absent", "facts", "owned", "own_address"):
            values[name] = {int(index): value for index, value in fields[name].items()}
        for name in ("cluster", "free"):
            values[name] = [[tried and tuple(tried) for tried in row] for row in fields[name]]
        return cls(**values)


def square(size: int) -> list[list[Any]]:
    """Returns an empty matrix."""
    return [[None] * size for _ in range(size)]


def _silent(text: str) -> None:
    del text


@dataclasses.dataclass(frozen=True)
class SurveySettings:
    """Limits of a survey, and its progress messages.

    Args:
        wait_s: seconds to wait for all hosts at the beginning.
        limit_s: seconds to wait for each connection between hosts.
        transfer_s: seconds of each transfer; 0 for none.
        note: called with a description of each step.
    """

    wait_s: float = 60.0
    limit_s: float = 3.0
    transfer_s: float = 0.3
    note: Callable[[str], None] = _silent


# Tables of a survey: connections, round trips, bandwidth and clocks of all pairs.

# Wider tables do not fit a terminal; JSON and the picture have all.
MAX_COLUMNS = 12


def survey_tables(survey: Survey) -> Iterator[Table]:
    """Yields the tables that show more than that every host reaches every other."""
    if len(survey.hosts) <= MAX_COLUMNS:
        for title, matrix, text in (
            ("Port of the cluster", survey.cluster, _attempt),
            ("Free port", survey.free, _attempt),
            ("Round trip, ms", survey.round_trip_s, lambda trip_s: f"{1e3 * trip_s:.2f}"),
            ("Bandwidth, MB/s", survey.bytes_per_s, lambda rate: f"{rate / 1e6:.0f}"),
        ):
            values = [value for row in matrix for value in row if value is not None]
            if any(value != "reached" for value in map(_outcome, values)):
                yield _matrix_table(title, survey.names, matrix, text)
    if sum(offset_s is not None for offset_s in survey.offset_s) > 1:
        yield _clock_table(survey)


def _matrix_table(
    title: str,
    names: Sequence[str],
    matrix: Sequence[Sequence[Any]],
    text: Callable[[Any], str],
) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("from \\ to")
    for name in names:
        table.add_column(name, justify="right")
    for one, row in enumerate(matrix):
        cells = [
            "" if one == other else "-" if value is None else text(value)
            for other, value in enumerate(row)
        ]
        table.add_row(names[one], *cells)
    return table


def _clock_table(survey: Survey) -> Table:
    table = Table("host", title="Clocks", title_justify="left")
    table.add_column(f"ahead of {survey.names[survey.reference]}, ms", justify="right")
    table.add_column("±, ms", justify="right")
    rows = zip(survey.names, survey.offset_s, survey.uncertainty_s, strict=True)
    for name, offset_s, uncertainty_s in rows:
        if name == survey.names[survey.reference]:
            continue
        cells = ("-" if s is None else f"{1e3 * s:.2f}" for s in (offset_s, uncertainty_s))
        table.add_row(name, *cells)
    return table


def _outcome(value: Any) -> object:
    return value[0] if isinstance(value, tuple) else value


def _attempt(tried: tuple[str, str]) -> str:
    color = "green" if tried[0] == "reached" else "red"
    return f"[{color}]{tried[0]}[/{color}]"
