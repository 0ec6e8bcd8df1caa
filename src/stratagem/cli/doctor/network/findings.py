"""Findings of a survey: pure functions of its measurements."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from stratagem.cli.doctor.network.agent import Reason
from stratagem.cli.doctor.network.survey import Survey
from stratagem.cli.doctor.settings import Finding, Level
from stratagem.cluster.addresses import is_loopback

_TOPIC = "cluster"
# Logs, events and files of one run are ordered by their hosts' clocks.
_SKEW_S = 0.5
# Signed requests to cloud storage are refused from here on.
_FATAL_SKEW_S = 300.0
_MAX_SLOW = 8
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


def check_survey(survey: Survey) -> list[Finding]:
    """Returns all findings of a survey, those that hide others first."""
    return [
        *_check_presence(survey),
        *_check_connections(survey),
        *_check_names(survey),
        *_check_speed(survey),
        *_check_clocks(survey),
        *_check_equality(survey),
        *_merge_hosts(survey),
    ]


def _check_presence(survey: Survey) -> Iterator[Finding]:
    for text in survey.rejected:
        yield Finding(
            _TOPIC,
            Level.ERROR,
            f"{text}.",
            "give all tasks the same cluster, and each its own task type and index.",
        )
    for text in survey.failures:
        yield Finding(
            _TOPIC,
            Level.WARNING,
            f"{text}.",
            "repeat it; slow networks need a higher --limit.",
        )
    for index, reason in survey.absent.items():
        yield Finding(
            _TOPIC,
            Level.ERROR,
            f"{_place(survey, index)} {reason}.",
            "start stratagem doctor --cluster there at the same time; --wait changes the limit.",
        )


def _check_connections(survey: Survey) -> Iterator[Finding]:
    num_tried = num_failed = 0
    kinds = (("the cluster's port", survey.cluster), ("free ports", survey.free))
    for kind, attempts in kinds:
        failed: dict[tuple[int, str, str], list[int]] = defaultdict(list)
        for source, row in enumerate(attempts):
            for to, tried in enumerate(row):
                if tried is None:
                    continue
                num_tried += 1
                reason = _reason(survey, to, tried)
                if reason is not Reason.REACHED:
                    failed[to, reason, tried[1]].append(source)
                    num_failed += 1
        for (to, reason, address), sources in failed.items():
            yield _unreachable(survey, kind, to, Reason(reason), address, sources)
    if num_tried and not num_failed:
        has_ports = any(host.port is not None for host in survey.hosts)
        yield Finding(
            _TOPIC,
            Level.OK,
            f"All {len(survey.hosts)} hosts reach each other, on free ports"
            f"{' and on the ports of the cluster' if has_ports else ''}.",
        )


def _reason(survey: Survey, to: int, tried: tuple[str, str]) -> Reason:
    reason = Reason(tried[0])
    if reason is Reason.REACHED or (to in survey.absent and reason is Reason.REFUSED):
        return Reason.REACHED  # an absent host that refuses is up
    is_foreign = survey.owned.get(to, {}).get(tried[1]) is False
    if is_foreign and reason in (Reason.REFUSED, Reason.TIMEOUT, Reason.SILENT, Reason.NO_ROUTE):
        return Reason.FOREIGN_ADDRESS
    return reason


def _unreachable(
    survey: Survey, kind: str, to: int, reason: Reason, address: str, sources: Sequence[int]
) -> Finding:
    host = survey.hosts[to]
    if kind == "free ports":
        place, on = host.address, " on free ports, which collectives use"
    else:
        place, on = f"{host.address}:{host.port}", ""
    at = "" if place == host.name else f" at {place}"
    resolved = "" if address in ("", host.address) else f" ({address})"
    cause, fix = _CAUSES[reason]
    return Finding(
        _TOPIC,
        Level.ERROR,
        f"{_listed(survey, sources)} cannot reach {host.name}{at}{resolved}{on}: {cause}.",
        fix,
    )


def _check_names(survey: Survey) -> Iterator[Finding]:
    """Names that a host itself resolves to its loopback interface, as Debian does."""
    for to, own in survey.own_address.items():
        rows = [row[to] for row in (*survey.cluster, *survey.free)]
        outside = sorted({tried[1] for tried in rows if tried and tried[1]} - {own})
        if own and is_loopback(own) and outside:
            host = survey.hosts[to]
            yield Finding(
                _TOPIC,
                Level.WARNING,
                f"{host.name} has the wrong interface for its own name: {host.address} is {own} "
                f"there, and {outside[0]} for others. Servers that listen at their name are out "
                "of reach.",
                f"remove the line of {own} from /etc/hosts there, or use addresses in place of "
                "names.",
            )


def _check_speed(survey: Survey) -> Iterator[Finding]:
    trips = [trip for row in survey.round_trip_s for trip in row if trip is not None]
    if not trips:
        return
    text = f"Round trips take {_range([1e3 * trip for trip in trips], 'ms')}"
    rates = [rate for row in survey.bytes_per_s for rate in row if rate is not None]
    if rates:
        text += f"; one connection transfers {_range([rate / 1e6 for rate in rates], 'MB/s')}"
    yield Finding(_TOPIC, Level.OK, f"{text}.")
    median = statistics.median(rates) if rates else 0.0
    for one, other in survey.slow_pairs()[:_MAX_SLOW]:
        rate = survey.bytes_per_s[one][other] or 0.0
        yield Finding(
            _TOPIC,
            Level.WARNING,
            f"{survey.names[one]} sends to {survey.names[other]} at {_figure(rate / 1e6)} MB/s; "
            f"the median of all pairs is {_figure(median / 1e6)} MB/s.",
            "compare the link speed (ethtool), the route (another interface?) and other load; the "
            "slowest pair limits every step.",
        )


def _check_clocks(survey: Survey) -> Iterator[Finding]:
    first = survey.names[survey.reference]
    off = False
    for index, offset_s in enumerate(survey.offset_s):
        uncertainty_s = survey.uncertainty_s[index]
        if offset_s is None or uncertainty_s is None or abs(offset_s) - uncertainty_s < _SKEW_S:
            continue
        off = True
        level = Level.ERROR if abs(offset_s) >= _FATAL_SKEW_S else Level.WARNING
        yield Finding(
            _TOPIC,
            level,
            f"The clock of {survey.names[index]} is {abs(offset_s):.3f} s "
            f"{'ahead of' if offset_s > 0 else 'behind'} {first}'s "
            f"(±{1e3 * uncertainty_s:.2g} ms).",
            "synchronize both with chrony or systemd-timesyncd (chronyc tracking, timedatectl). "
            "Certificates, signed requests to storage and the order of a run's events need it.",
        )
    known = [
        (abs(offset_s) + (survey.uncertainty_s[index] or 0.0))
        for index, offset_s in enumerate(survey.offset_s)
        if index != survey.reference and offset_s is not None
    ]
    if known and not off:
        yield Finding(
            _TOPIC, Level.OK, f"Clocks differ from {first}'s by at most {1e3 * max(known):.2g} ms."
        )


def _check_equality(survey: Survey) -> Iterator[Finding]:
    facts = {index: one for index, one in survey.facts.items() if one}
    if len(facts) < 2:
        return
    names = list(dict.fromkeys(name for one in facts.values() for name in one["versions"]))
    differing = False
    for name in names:
        groups = _grouped(
            (index, str(one["versions"].get(name, "missing"))) for index, one in facts.items()
        )
        if len(groups) > 1:
            differing = True
            common = max(groups, key=lambda version: len(groups[version]))
            yield _difference(survey, name, groups, _version_fix(name, common))
    groups = _grouped((index, str(one["devices"])) for index, one in facts.items())
    if len(groups) > 1:
        differing = True
        fix = "start each worker with the same devices (CUDA_VISIBLE_DEVICES, the pod's resources)."
        yield _difference(survey, "The set of devices", groups, fix)
    if not differing:
        versions = next(iter(facts.values()))["versions"]
        shown = ", ".join(f"{name} {version}" for name, version in versions.items())
        yield Finding(_TOPIC, Level.OK, f"All have {shown}; and {next(iter(groups))}.")


def _version_fix(name: str, version: str) -> str:
    if name == "Python":
        return f"use Python {version} on all hosts: functions are sent between them as bytecode."
    return f'pip install "{name}=={version}" on the others; all processes compile the same program.'


def _difference(survey: Survey, what: str, groups: dict[str, list[int]], fix: str) -> Finding:
    shown = "; ".join(f"{value} on {_listed(survey, at)}" for value, at in groups.items())
    is_python = what == "Python"
    minor = {value.rpartition(".")[0] for value in groups}
    level = Level.WARNING if is_python and len(minor) == 1 else Level.ERROR
    return Finding(_TOPIC, level, f"{what} differs: {shown}.", fix)


def _merge_hosts(survey: Survey) -> Iterator[Finding]:
    """Yields the findings of all hosts, equal ones once."""
    merged: dict[Finding, list[int]] = defaultdict(list)
    for index, facts in sorted(survey.facts.items()):
        for fields in facts.get("findings", []):
            finding = Finding(**{**fields, "level": Level(fields["level"])})
            if index not in merged[finding]:
                merged[finding].append(index)
    for finding, indices in merged.items():
        names = _listed(survey, indices)
        yield Finding(finding.topic, finding.level, f"{names}: {finding.text}", finding.fix)


def _grouped(pairs: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = defaultdict(list)
    for index, value in pairs:
        groups[value].append(index)
    return groups


def _listed(survey: Survey, indices: Sequence[int]) -> str:
    names = [survey.names[index] for index in indices]
    if len(names) == len(survey.hosts) > 2:
        return "all hosts"
    if len(names) > 8:
        return f"{', '.join(names[:8])} and {len(names) - 8} others"
    return ", ".join(names)


def _place(survey: Survey, index: int) -> str:
    host = survey.hosts[index]
    port = "" if host.port is None else f":{host.port}"
    place = f"{host.address}{port}"
    return host.name if host.name == place else f"{host.name} ({place})"


def _range(values: Sequence[float], unit: str) -> str:
    low, high = _figure(min(values)), _figure(max(values))
    return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
