"""Survey of the hosts of a cluster, and the findings that follow from it."""

from __future__ import annotations

import dataclasses
import enum
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from stratagem.cli.doctor.findings import Finding, Level
from stratagem.cluster.addresses import is_loopback, join_address

_TOPIC = "cluster"
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
    FOREIGN_ADDRESS = "foreign address"
    WRONG_HOST = "another host answers"
    SILENT = "another program answers"
    ERROR = "error"


# Cause of a failed connection, and its remedy.
_CAUSES = {
    Reason.REFUSED: (
        "the connection is refused",
        "let the firewall on that host accept it, or end what rejects it.",
    ),
    Reason.TIMEOUT: (
        "no answer in time",
        "let the firewall (security group, NetworkPolicy) pass connections between these hosts; a "
        "slow network needs a higher --limit.",
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
    Reason.FOREIGN_ADDRESS: (
        "wrong interface, the address is not one of that host's",
        "correct DNS, /etc/hosts, or the cluster's description; ip address shows a host's own.",
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
    """A failed connection between two hosts.

    Args:
        source: process id of the host that tried it.
        to: process id of the other one.
        is_free: True for a free port, False for the port of its task.
        reason: outcome, a `Reason`.
        address: numeric address that was tried; "" if the name is unknown.
    """

    source: int
    to: int
    is_free: bool
    reason: str
    address: str


@dataclasses.dataclass(frozen=True)
class SurveyedHost:
    """One host, or one process of a cluster.

    Args:
        name: name in findings, such as "worker 1".
        address: host name or address in the cluster's description; "" if that has none.
        port: port of its task; None without an address.
        versions: versions of Python and packages.
        settings: environment variables that must be equal.
        devices: its devices, as text.
        findings: fields of the warnings and errors of `stratagem doctor` there.
        own_name: numeric address that it has for its own name; "" for none.
        run_address: address at which its collectives listen.
    """

    name: str
    address: str = ""
    port: int | None = None
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    devices: str = ""
    findings: Sequence[Mapping[str, Any]] = ()
    own_name: str = ""
    run_address: str = ""


@dataclasses.dataclass(frozen=True)
class Survey:
    """Facts about all hosts and the connections between them.

    Args:
        hosts: the hosts, by process id.
        failures: connections that failed, of all that were tried. The port of the first task is not
            tried: the others have joined through it.
        owned: by host, True for those numeric addresses of its failures that it has.
        offset_s: how far each clock is ahead of the first host's.
        uncertainty_s: error limits of `offset_s`.
    """

    hosts: Sequence[SurveyedHost]
    failures: Sequence[Failure]
    owned: Sequence[Mapping[str, bool]]
    offset_s: Sequence[float]
    uncertainty_s: Sequence[float]


def clock_offsets(
    readings: Sequence[Sequence[tuple[float, float]]],
) -> tuple[list[float], list[float]]:
    """Returns how far each clock is ahead of the first one, and the error limits.

    Args:
        readings: of each host, its clock before and after each of several exchanges.

    No process leaves an exchange before all have begun it, so each host's time before is earlier
    than any other's time after. That bounds the offset from both sides; the bounds of all exchanges
    hold together.
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
    return [
        *_check_connections(survey),
        *_check_names(survey),
        *_check_clocks(survey),
        *_check_equality(survey),
        *_merge_findings(survey),
    ]


def _check_connections(survey: Survey) -> Iterator[Finding]:
    sources: dict[tuple[bool, int, Reason, str], list[int]] = defaultdict(list)
    for one in survey.failures:
        sources[one.is_free, one.to, _reason(survey, one), one.address].append(one.source)
    for (is_free, to, reason, address), indices in sorted(sources.items()):
        host = survey.hosts[to]
        place = host.run_address if is_free else join_address(host.address, host.port or 0)
        on = " on free ports, which collectives use" if is_free else ""
        resolved = "" if address in ("", host.address, place) else f" ({address})"
        cause, fix = _CAUSES[reason]
        yield Finding(
            _TOPIC,
            Level.ERROR,
            f"{_listed(survey, indices)} cannot reach {host.name} at {place}{resolved}{on}: "
            f"{cause}.",
            fix,
        )
    if not sources:
        has_ports = any(host.port is not None for host in survey.hosts)
        yield Finding(
            _TOPIC,
            Level.OK,
            f"All {len(survey.hosts)} hosts reach each other, on free ports"
            f"{' and on the ports of the cluster' if has_ports else ''}.",
        )


def _reason(survey: Survey, one: Failure) -> Reason:
    reason = Reason(one.reason)
    is_foreign = survey.owned[one.to].get(one.address) is False
    if is_foreign and reason in (Reason.REFUSED, Reason.TIMEOUT, Reason.SILENT, Reason.NO_ROUTE):
        return Reason.FOREIGN_ADDRESS
    return reason


def _check_names(survey: Survey) -> Iterator[Finding]:
    """Names that a host itself resolves to its loopback interface, as Debian does."""
    for host in survey.hosts:
        if is_loopback(host.own_name) and not is_loopback(host.run_address):
            yield Finding(
                _TOPIC,
                Level.WARNING,
                f"{host.name} has the wrong interface for its own name: {host.address} is "
                f"{host.own_name} there, and others reach it at {host.run_address}. Servers that "
                "listen at their name are out of reach.",
                f"remove the line of {host.own_name} from /etc/hosts there, or use addresses in "
                "place of names.",
            )


def _check_clocks(survey: Survey) -> Iterator[Finding]:
    first = survey.hosts[0].name
    clocks = list(zip(survey.hosts, survey.offset_s, survey.uncertainty_s, strict=True))[1:]
    skewed = [one for one in clocks if abs(one[1]) - one[2] >= _SKEW_S]
    for host, offset_s, uncertainty_s in skewed:
        yield Finding(
            _TOPIC,
            Level.ERROR if abs(offset_s) >= _FATAL_SKEW_S else Level.WARNING,
            f"The clock of {host.name} is {abs(offset_s):.3f} s "
            f"{'ahead of' if offset_s > 0 else 'behind'} {first}'s (±{1e3 * uncertainty_s:.2g} "
            "ms).",
            "synchronize both with chrony or systemd-timesyncd (chronyc tracking, timedatectl). "
            "Certificates, signed requests to storage and the order of a run's events need it.",
        )
    if clocks and not skewed:
        most_s = max(abs(offset_s) + uncertainty_s for _, offset_s, uncertainty_s in clocks)
        yield Finding(
            _TOPIC, Level.OK, f"Clocks differ from {first}'s by at most {1e3 * most_s:.2g} ms."
        )


def _check_equality(survey: Survey) -> Iterator[Finding]:
    differing = False
    for name, groups in _compared(survey, [host.versions for host in survey.hosts], "missing"):
        differing = True
        yield _different_versions(survey, name, groups)
    for name, groups in _compared(survey, [host.settings for host in survey.hosts], "not set"):
        yield Finding(
            _TOPIC,
            Level.WARNING,
            _difference(survey, name, groups),
            f"set {name} alike on all hosts: all processes compile the same program.",
        )
    devices = [{"The set of devices": host.devices} for host in survey.hosts]
    for name, groups in _compared(survey, devices, ""):
        differing = True
        yield Finding(
            _TOPIC,
            Level.ERROR,
            _difference(survey, name, groups),
            "start each worker with the same devices (CUDA_VISIBLE_DEVICES, the pod's resources).",
        )
    if not differing:
        first = survey.hosts[0]
        shown = ", ".join(f"{name} {version}" for name, version in first.versions.items())
        yield Finding(_TOPIC, Level.OK, f"All have {shown}; and {first.devices}.")


def _compared(
    survey: Survey, values: Sequence[Mapping[str, str]], absent: str
) -> Iterator[tuple[str, dict[str, list[int]]]]:
    """Yields each name whose values differ, with the hosts of each value."""
    for name in dict.fromkeys(name for one in values for name in one):
        groups: dict[str, list[int]] = defaultdict(list)
        for index in range(len(survey.hosts)):
            groups[values[index].get(name, absent)].append(index)
        if len(groups) > 1:
            yield name, groups


def _different_versions(survey: Survey, name: str, groups: Mapping[str, list[int]]) -> Finding:
    common = max(groups, key=lambda version: len(groups[version]))
    level = Level.ERROR
    if name == "Python":
        if len({version.rpartition(".")[0] for version in groups}) == 1:
            level = Level.WARNING  # bytecode is that of the minor version
        fix = f"use Python {common} on all hosts: functions are sent between them as bytecode."
    else:
        fix = (
            f'pip install "{name}=={common}" on the others; all processes compile the same program.'
        )
    return Finding(_TOPIC, level, _difference(survey, name, groups), fix)


def _difference(survey: Survey, what: str, groups: Mapping[str, Sequence[int]]) -> str:
    shown = "; ".join(f"{value} on {_listed(survey, at)}" for value, at in groups.items())
    return f"{what} differs: {shown}."


def _merge_findings(survey: Survey) -> Iterator[Finding]:
    """Yields the findings of all hosts, equal ones once."""
    merged: dict[Finding, list[int]] = defaultdict(list)
    for index, host in enumerate(survey.hosts):
        found = (Finding(**{**one, "level": Level(one["level"])}) for one in host.findings)
        for finding in dict.fromkeys(found):
            merged[finding].append(index)
    for finding, indices in merged.items():
        text = f"{_listed(survey, indices)}: {finding.text}"
        yield dataclasses.replace(finding, text=text)


def _listed(survey: Survey, indices: Iterable[int]) -> str:
    names = [survey.hosts[index].name for index in indices]
    if len(names) == len(survey.hosts) > 2:
        return "all hosts"
    if len(names) > _MOST_NAMED:
        more = len(names) - _MOST_NAMED
        return f"{', '.join(names[:_MOST_NAMED])} and {more} others"
    return ", ".join(names)
