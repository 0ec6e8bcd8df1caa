"""Survey of the hosts of a cluster, and the findings that follow from it."""

from __future__ import annotations

import dataclasses
import enum
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from stratagem.cli.doctor.findings import Finding, Level, error, ok, under, warning
from stratagem.cluster.addresses import join_address

# Logs, events and files of one run are ordered by their hosts' clocks.
_SKEW_S = 0.5
# Signed requests to cloud storage are refused from here on.
_FATAL_SKEW_S = 300.0
_MOST_NAMED = 8


class Reason(enum.StrEnum):
    """Outcome of a connection attempt."""

    REACHED = "reached"
    REFUSED = "refused"
    TIMEOUT = "timeout"
    UNKNOWN_NAME = "unknown name"
    NO_ROUTE = "no route"
    WRONG_HOST = "another host answers"
    SILENT = "another program answers"
    ERROR = "error"


# Cause of a failed connection, and its remedy.
_CAUSES = {
    Reason.REFUSED: (
        "the connection is refused",
        "let the firewall on that host accept it, or correct the address: ip address shows a "
        "host's own.",
    ),
    Reason.TIMEOUT: (
        "no answer in time",
        "let the firewall (security group, NetworkPolicy) pass connections between these hosts, or "
        "correct the address: ip address shows a host's own. A slow network needs a higher "
        "--limit.",
    ),
    Reason.UNKNOWN_NAME: (
        "the name is unknown there",
        "add it to DNS or to /etc/hosts there; in Kubernetes, create the headless Service of the "
        "job.",
    ),
    Reason.NO_ROUTE: (
        "there is no route to it",
        "check that the host is up, and the route: ip route get ADDRESS.",
    ),
    Reason.WRONG_HOST: (
        "another host of the cluster answers there",
        "correct DNS, /etc/hosts, or the cluster's description.",
    ),
    Reason.SILENT: (
        "another program answers there",
        "end that program, or choose another port; a proxy (service mesh) must pass it on.",
    ),
    Reason.ERROR: ("the connection fails", "try it by hand: nc -vz ADDRESS PORT."),
}


@dataclasses.dataclass(frozen=True)
class Failure:
    """A failed connection from the process `source` to the process `to`.

    `is_free` says whether it was to a free port, or to the port of its task. `address` is the
    numeric address that was tried; "" if the name is unknown.
    """

    source: int
    to: int
    is_free: bool
    reason: str
    address: str


@dataclasses.dataclass(frozen=True)
class SurveyedHost:
    """One process of a cluster: its place, and what must be equal everywhere.

    `address` and `port` are those of the cluster's description; "" and None if it has none.
    `findings` are the fields of the warnings and errors there, and `run_address` is the address at
    which its collectives listen.
    """

    name: str
    address: str = ""
    port: int | None = None
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    devices: str = ""
    findings: Sequence[Mapping[str, Any]] = ()
    run_address: str = ""


@dataclasses.dataclass(frozen=True)
class Survey:
    """Facts about all hosts, by process id, and the connections between them that failed.

    The port of the first task is not tried: the others have joined through it. Each clock is
    `offset_s` ahead of the first host's, within `uncertainty_s`.
    """

    hosts: Sequence[SurveyedHost]
    failures: Sequence[Failure]
    offset_s: Sequence[float]
    uncertainty_s: Sequence[float]


def clock_offsets(
    readings: Sequence[Sequence[tuple[float, float]]],
) -> tuple[list[float], list[float]]:
    """Returns how far each clock is ahead of the first one, and the error limits.

    `readings` has, of each host, its clock before and after each of several exchanges. No process
    leaves an exchange before all have begun it, so each host's time before is earlier than any
    other's time after. That bounds the offset from both sides; the bounds of all exchanges hold
    together.
    """
    offsets_s, uncertainties_s = [0.0], [0.0]
    for own in readings[1:]:
        pairs = list(zip(own, readings[0], strict=True))
        low_s = max(before - first_after for (before, _), (_, first_after) in pairs)
        high_s = min(after - first_before for (_, after), (first_before, _) in pairs)
        offsets_s.append((low_s + high_s) / 2)
        # Negative if a clock was set between two exchanges.
        uncertainties_s.append(max(0.0, (high_s - low_s) / 2))
    return offsets_s, uncertainties_s


def check_survey(survey: Survey) -> list[Finding]:
    """Returns all findings of a survey, those that hide others first."""
    checks = (_check_connections, _check_clocks, _check_equality, _merged_findings)
    return [one for check in checks for one in under("cluster", check(survey))]


def _check_connections(survey: Survey) -> Iterator[Finding]:
    sources: dict[tuple[bool, int, str, str], list[int]] = defaultdict(list)
    for one in survey.failures:
        sources[one.is_free, one.to, one.reason, one.address].append(one.source)
    for (is_free, to, reason, address), indices in sorted(sources.items()):
        host = survey.hosts[to]
        place = host.run_address if is_free else join_address(host.address, host.port or 0)
        on = " on free ports, which collectives use" if is_free else ""
        resolved = "" if address in ("", host.address, place) else f" ({address})"
        cause, fix = _CAUSES[Reason(reason)]
        yield error(
            f"{_listed(survey, indices)} cannot reach {host.name} at {place}{resolved}{on}: "
            f"{cause}.",
            fix,
        )
    if not sources:
        has_ports = any(host.port is not None for host in survey.hosts)
        ports = " and on the ports of the cluster" if has_ports else ""
        yield ok(f"All {len(survey.hosts)} hosts reach each other, on free ports{ports}.")


def _check_clocks(survey: Survey) -> Iterator[Finding]:
    first = survey.hosts[0].name
    clocks = list(zip(survey.hosts, survey.offset_s, survey.uncertainty_s, strict=True))[1:]
    skewed = [one for one in clocks if abs(one[1]) - one[2] >= _SKEW_S]
    for host, offset_s, uncertainty_s in skewed:
        problem = error if abs(offset_s) >= _FATAL_SKEW_S else warning
        side = "ahead of" if offset_s > 0 else "behind"
        yield problem(
            f"The clock of {host.name} is {abs(offset_s):.3f} s {side} {first}'s "
            f"(±{1e3 * uncertainty_s:.2g} ms).",
            "synchronize both with chrony or systemd-timesyncd (chronyc tracking, timedatectl). "
            "Certificates, signed requests to storage and the order of a run's events need it.",
        )
    if clocks and not skewed:
        most_s = max(abs(offset_s) + uncertainty_s for _, offset_s, uncertainty_s in clocks)
        yield ok(f"Clocks differ from {first}'s by at most {1e3 * most_s:.2g} ms.")


def _check_equality(survey: Survey) -> Iterator[Finding]:
    hosts = survey.hosts
    versions = list(_differences(survey, [host.versions for host in hosts], "missing"))
    for name, common, text in versions:
        if name != "Python":
            others = "on the others; all processes compile the same program."
            yield error(text, f'pip install "{name}=={common}" {others}')
            continue
        # Bytecode is that of the minor version.
        minors = {host.versions[name].rpartition(".")[0] for host in hosts}
        problem = warning if len(minors) == 1 else error
        sent = "functions are sent between them as bytecode."
        yield problem(text, f"use Python {common} on all hosts: {sent}")
    for name, _, text in _differences(survey, [host.settings for host in hosts], "not set"):
        fix = f"set {name} alike on all hosts: all processes compile the same program."
        yield warning(text, fix)
    devices = [{"The set of devices": host.devices} for host in hosts]
    for _, _, text in (sets := list(_differences(survey, devices, ""))):
        fix = "start each worker with the same devices (CUDA_VISIBLE_DEVICES, the pod's resources)."
        yield error(text, fix)
    if not versions and not sets:
        shown = ", ".join(f"{name} {version}" for name, version in hosts[0].versions.items())
        yield ok(f"All have {shown}; and {hosts[0].devices}.")


def _differences(
    survey: Survey, values: Sequence[Mapping[str, str]], absent: str
) -> Iterator[tuple[str, str, str]]:
    """Yields each name whose values differ, its most frequent value, and who has which."""
    for name in dict.fromkeys(name for one in values for name in one):
        groups: dict[str, list[int]] = defaultdict(list)
        for index in range(len(survey.hosts)):
            groups[values[index].get(name, absent)].append(index)
        if len(groups) > 1:
            shown = "; ".join(f"{value} on {_listed(survey, at)}" for value, at in groups.items())
            yield name, max(groups, key=lambda one: len(groups[one])), f"{name} differs: {shown}."


def _merged_findings(survey: Survey) -> Iterator[Finding]:
    """Yields the findings of all hosts, equal ones once."""
    merged: dict[Finding, list[int]] = defaultdict(list)
    for index, host in enumerate(survey.hosts):
        found = (Finding(**{**one, "level": Level(one["level"])}) for one in host.findings)
        for finding in dict.fromkeys(found):
            merged[finding].append(index)
    for finding, indices in merged.items():
        yield dataclasses.replace(finding, text=f"{_listed(survey, indices)}: {finding.text}")


def _listed(survey: Survey, indices: Iterable[int]) -> str:
    names = [survey.hosts[index].name for index in indices]
    if len(names) == len(survey.hosts) > 2:
        return "all hosts"
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} others" if more > 0 else "")
