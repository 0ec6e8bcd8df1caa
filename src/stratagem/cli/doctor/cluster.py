"""The cluster: what this machine sees of it, and what all hosts find together.

`stratagem doctor` asks each resolver, and tries the addresses of the first cluster that one finds.

`stratagem doctor --cluster` runs on every host, as a training script would, in these steps:

1. The processes join a group at the port, and with the secret and certificates, of a run. What
   would keep them from training keeps them from joining: a process that is missing, another
   secret, another cluster, a port that is taken.
2. Each opens a gate at the port of its task and at a free port. It examines itself, and tells the
   others what it found, and its free port.
3. Each connects to the gates of all others. A gate admits holders of the secret only, and tells
   them the number of its process.
4. They tell each other whom they did not reach, and at which address.

All have the same survey then, and print the same findings. If a process does not come, or is lost,
the group names it on all others within a limit, and each of these examines its own machine instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import errno
import itertools
import logging
import math
import platform
import socket
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from stratagem import environment, logs, settings
from stratagem.cli.doctor.findings import Finding, Level, error, note, ok, under, warning
from stratagem.cli.doctor.machine import (
    counted_devices,
    examine,
    installed_versions,
    probe_devices,
    variables_of_user,
)
from stratagem.cluster.addresses import (
    UnknownHostError,
    join_address,
    listening_error,
    split_address,
)
from stratagem.cluster.detection import ENVIRONMENTS
from stratagem.cluster.processes import Processes, check_cluster
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.errors import DeadlineExceededError, explain
from stratagem.group.authentication.connections import (
    UnansweredError,
    listening_sockets,
    reach,
)
from stratagem.group.authentication.secret import Credentials, Gate
from stratagem.group.current import Identity
from stratagem.group.member import Group
from stratagem.group.verdict import GroupLimits

_logger = logging.getLogger(__name__)

# What must be equal on all hosts: packages, and variables that change compiled programs.
_PACKAGES = ("stratagem", "jax", "jaxlib", "keras")
_VARIABLES = (
    "XLA_FLAGS",
    "LIBTPU_INIT_ARGS",
    "JAX_ENABLE_X64",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "JAX_DEFAULT_PRNG_IMPL",
    "JAX_THREEFRY_PARTITIONABLE",
)
# JAX is started for the facts, and has two minutes for that.
_STEP_LIMIT_S = 180.0
# Connections that a process tries at once: a gate cuts handshakes short beyond 64 of an address.
_MOST_AT_ONCE = 32
_PURPOSE = "doctor"
_ANSWER_BYTES = 16
_LOOPBACK = "127.0.0.1"
_CONNECT_LIMIT_S = 3.0
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
        "the name is unknown",
        "add it to DNS or to /etc/hosts; in Kubernetes, create the headless Service of the job.",
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


# What this machine sees.


def examine_clusters() -> Iterator[Finding]:
    """Asks all resolvers, and tries the addresses of the first cluster that one finds."""
    findings, resolver = examine_resolvers(ENVIRONMENTS)
    yield from findings
    if resolver is None:
        return
    spec = resolver.cluster_spec()
    addresses: dict[tuple[str | None, int | None], str] = {
        (job, index): spec.task_address(job, index)
        for job in spec.jobs
        for index in spec.task_indices(job)
    }
    own = addresses.pop((resolver.task_type, resolver.task_id), None)
    if own is not None:
        yield check_own_address(own)
    yield from check_peers({f"{job} {index}": one for (job, index), one in addresses.items()})


def examine_resolvers(
    resolvers: Mapping[str, Callable[[], ClusterResolver | None]],
) -> tuple[list[Finding], ClusterResolver | None]:
    """Returns each resolver's view, and the first resolver that finds a cluster."""
    findings: list[Finding] = []
    first: ClusterResolver | None = None
    for name, make in resolvers.items():
        try:
            if (resolver := make()) is not None:
                used = "" if first is None else " It is not used: an earlier one has a cluster."
                findings.append(ok(_view(name, resolver) + used))
                first = first or resolver
        except (ValueError, RuntimeError) as wrong:
            problem, _, rest = str(wrong).partition("\n")
            fix = rest.partition("Fix: ")[2] or f"correct the variables of {name}."
            text = problem if problem.startswith(name) else f"{name}: {problem}"
            findings.append(error(text, fix.replace("\nHelp: ", " Help: ")))
    if findings:
        return findings, first
    if '"cluster"' not in (environment.lookup("TF_CONFIG") or '"cluster"'):
        lone = warning(
            "TF_CONFIG describes no cluster: it has no key 'cluster', so that this process trains "
            "alone.",
            'write {"cluster": {"worker": ["host0:2222", ...]}, "task": {"type": "worker", '
            '"index": 0}}, or unset it.',
        )
        return [lone], None
    text = "No cluster is described by TF_CONFIG, a launcher or a scheduler: one process trains."
    return [ok(text)], None


def check_own_address(address: str) -> Finding:
    """Checks that this machine can listen at its task's address."""
    reason = listening_error(address)
    if reason is None:
        return ok(f"This machine can listen at {address}.")
    if isinstance(reason, UnknownHostError):
        return error(
            f"The host of this task, {split_address(address)[0]}, has no address: "
            f"{reason.strerror}.",
            _CAUSES[Reason.UNKNOWN_NAME][1],
        )
    if reason.errno == errno.EADDRINUSE:
        return error(
            f"Another program uses {address}, the address of this task.",
            f"end it (ss -ltnp 'sport = :{address.rpartition(':')[2]}' shows it), or choose "
            "another port in the cluster's description on all machines.",
        )
    return error(
        f"This machine cannot listen at {address}, the address of this task: {reason.strerror}.",
        "check that task type and index are those of this machine.",
    )


def check_peers(
    addresses: Mapping[str, str], limit_s: float = _CONNECT_LIMIT_S
) -> Iterator[Finding]:
    """Checks that the hosts of other tasks, `host:port` by task, can be reached in `limit_s` each.

    A refused connection counts as reached: the host answers, its program has not started.
    """
    turn = asyncio.Semaphore(_MOST_AT_ONCE)

    async def try_task(address: str) -> Reason:
        async with turn:
            return (await probe(*split_address(address), limit_s))[0]

    async def try_all() -> list[Reason]:
        return await asyncio.gather(*map(try_task, addresses.values()))

    tried = zip(addresses.items(), asyncio.run(try_all()), strict=True)
    fine = (Reason.REACHED, Reason.REFUSED)
    lost = [(*place, reason) for place, reason in tried if reason not in fine]
    if addresses and not lost:
        yield ok(f"All {len(addresses)} other tasks can be reached.")
    for task, address, reason in lost[:_MOST_NAMED]:
        cause, fix = _CAUSES[reason]
        yield error(f"{task} at {address} cannot be reached: {cause}.", fix)
    if len(lost) > _MOST_NAMED:
        yield note(f"{len(lost) - _MOST_NAMED} more tasks cannot be reached.")


def _view(name: str, resolver: ClusterResolver) -> str:
    spec = resolver.cluster_spec()
    jobs = ", ".join(f"{spec.num_tasks(job)} {job}" for job in spec.jobs)
    counts = jobs or "addresses are exchanged when it starts"
    if resolver.task_type == "ps":  # it has no rank among the processes that train
        check_cluster(spec, "ps", resolver.task_id)
        return f"{name}: this is ps {resolver.task_id}; {counts}."
    processes = resolver.processes()
    task = f"process {processes.process_id}"
    if resolver.task_type is not None:
        task = f"{resolver.task_type} {resolver.task_id}"
    return f"{name}: {processes.num_processes} processes in lockstep, this is {task}; {counts}."


async def _knock(address: str, port: int, limit_s: float) -> Reason:
    async with asyncio.timeout(limit_s):
        _, writer = await asyncio.open_connection(address, port)
    writer.close()
    return Reason.REACHED


async def probe(
    host: str,
    port: int,
    limit_s: float,
    meet: Callable[[str, int, float], Awaitable[Reason]] = _knock,
) -> tuple[Reason, str]:
    """Tries to reach a port; returns the outcome and the numeric address tried.

    Args:
        host: host name or address.
        port: port.
        limit_s: seconds for each of: the lookup, and each step of `meet`.
        meet: talks to the program there; by default it only connects.
    """
    loop = asyncio.get_running_loop()
    try:
        looking = loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        found = await asyncio.wait_for(looking, limit_s)
    except (OSError, UnicodeError):
        return Reason.UNKNOWN_NAME, ""
    tried: list[tuple[Reason, str]] = []
    for address in dict.fromkeys(str(entry[4][0]) for entry in found):
        tried.append((await _outcome(meet(address, port, limit_s)), address))
        if tried[-1][0] is Reason.REACHED:
            return tried[-1]
    return tried[0]


async def _outcome(meeting: Awaitable[Reason]) -> Reason:
    try:
        return await meeting
    except (UnansweredError, ValueError):  # no proof, or that of another run
        return Reason.SILENT
    except TimeoutError:
        return Reason.TIMEOUT
    except ConnectionRefusedError:
        return Reason.REFUSED
    except OSError as failed:
        is_lost = failed.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES)
        return Reason.NO_ROUTE if is_lost else Reason.ERROR


# What all hosts find together: the survey, and the findings that follow from it.


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

    The port of the first task is not tried: the others have joined through it.
    """

    hosts: Sequence[SurveyedHost]
    failures: Sequence[Failure]


def check_survey(survey: Survey) -> list[Finding]:
    """Returns all findings of a survey, those that hide others first."""
    checks = (_check_connections, _check_equality, _merged_findings)
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


def _check_equality(survey: Survey) -> Iterator[Finding]:
    hosts = survey.hosts
    versions = list(_differences(survey, [host.versions for host in hosts], "missing"))
    for name, common, text in versions:
        fix = f"install {name} {common} on all hosts: all processes compile the same program."
        yield error(text, fix)
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


# The survey is taken by a group of all processes.


def examine_together(wait_s: float, limit_s: float) -> tuple[Survey | None, Iterator[Finding]]:
    """Surveys the cluster that the environment describes; returns it and its findings.

    Args:
        wait_s: seconds to wait for all processes.
        limit_s: seconds to wait for each connection between them.

    Without a survey, the findings say why, and describe this machine.
    """
    findings, resolver = examine_resolvers(ENVIRONMENTS)
    wrong = [finding for finding in findings if finding.level is Level.ERROR]
    identity = None if wrong or resolver is None else identity_in(resolver)
    if identity is None:
        alone = error(
            "The environment describes no cluster of several hosts, or not the task of this one.",
            "set TF_CONFIG on each host, or start it by a launcher.",
        )
        return None, under("cluster", wrong or [alone])
    try:
        survey = take_survey(identity, wait_s, limit_s)
    except (OSError, RuntimeError, ValueError) as failed:
        return None, itertools.chain(
            under("cluster", [_finding_of(failed)]), examine(check_cluster=examine_clusters)
        )
    return survey, iter(check_survey(survey))


def identity_in(resolver: ClusterResolver) -> Identity | None:
    """Returns this process among all tasks of its cluster, servers included; None if it is alone.

    The first is the one that leads a run. Without the addresses of all, those that train count.
    """
    spec = resolver.cluster_spec()
    jobs = sorted(spec.jobs, key=lambda job: (job not in ("chief", "worker"), job))
    tasks = {
        f"{job} {index}": split_address(spec.task_address(job, index))
        for job in jobs
        for index in spec.task_indices(job)
    }
    own = f"{resolver.task_type} {resolver.task_id}"
    # A parameter server has no rank among the processes that train.
    processes = Processes(1, 0) if resolver.task_type == "ps" else resolver.processes()
    address = processes.coordinator_address
    # A launcher names the coordinator alone, and a TPU the hosts of one slice.
    if own in tasks and len(tasks) >= max(2, processes.num_processes):
        labels = tuple(f"{name} ({join_address(*place)})" for name, place in tasks.items())
        addresses = tuple(tasks.values())
        host, port = addresses[0] if address is None else split_address(address)
        return Identity(
            process_id=list(tasks).index(own),
            labels=labels,
            host=host,
            port=port,
            same={"the cluster": ", ".join(labels)},
            addresses=addresses,
        )
    if address is None or processes.num_processes == 1:
        return None
    host, port = split_address(address)
    is_one_machine = processes.num_local_processes == processes.num_processes
    return Identity(
        process_id=processes.process_id,
        labels=tuple(f"process {index}" for index in range(processes.num_processes)),
        host=_LOOPBACK if is_one_machine else host,
        port=port,
        same={"the cluster": f"that of {host}"},
    )


def take_survey(identity: Identity, wait_s: float, limit_s: float) -> Survey:
    """Returns the same survey on all processes; arguments as for `examine_together`.

    Raises as `Credentials.find`, `Group` and `Group.exchange`: OSError, RuntimeError, ValueError.
    """
    credentials = Credentials.find(identity.label, [identity.host, *identity.hosts])
    own = identity.addresses[identity.process_id : identity.process_id + 1]
    # Before this process listens there itself.
    found = [check_own_address(join_address(*place)) for place in own]
    limits = GroupLimits(
        join_s=wait_s,
        peer_s=settings.read("peer_timeout_s"),
        stuck_s=math.inf,
        barrier_s=_STEP_LIMIT_S,
    )
    try:
        group = Group(identity, limits, credentials)
    except DeadlineExceededError as late:
        raise DeadlineExceededError(
            explain(
                str(late).partition("\n")[0],
                expected=f"the command on all hosts within {wait_s:g} s.",
                fix="start stratagem doctor --cluster on each host at the same time; --wait "
                "changes the limit.",
            )
        ) from late
    try:
        survey = _exchange_all(group, credentials, found, limit_s)
        group.leave()
        return survey
    finally:
        group.abandon()


def _exchange_all(
    group: Group, credentials: Credentials, found: Iterable[Finding], limit_s: float
) -> Survey:
    own, count = group.process_id, group.num_processes
    logs.announce(
        _logger, f"{group.identity.label}: all {count} have joined, and examine themselves"
    )

    def tell_number(connection: socket.socket, claim: str) -> None:
        del claim  # whoever asks
        with connection, contextlib.suppress(OSError):
            connection.send(str(own).encode())

    def exchange(name: str, value: object, limit_s: float = _STEP_LIMIT_S) -> list[Any]:
        return group.exchange(name, value, timeout_s=limit_s, setting="a limit of the doctor")

    listeners, places = _listeners(group, credentials)
    with Gate(listeners, credentials, tell_number, purpose=_PURPOSE):
        facts = dataclasses.asdict(own_facts(group.identity, group.own_address, found))
        told = exchange("facts of each host", [facts, places])
        trying = _failures([places for _, places in told], own, credentials, limit_s)
        failed = [dataclasses.astuple(one) for one in asyncio.run(trying)]
        # Each connection is a lookup, a handshake of two parts, and an answer.
        rounds = math.ceil(2 * count / _MOST_AT_ONCE)
        results = exchange("connections", failed, _STEP_LIMIT_S + 4 * limit_s * rounds)
    return Survey(
        hosts=[SurveyedHost(**one) for one, _ in told],
        failures=[Failure(*one) for several in results for one in several],
    )


def own_facts(identity: Identity, run_address: str, found: Iterable[Finding]) -> SurveyedHost:
    """Returns what this process tells the others, with the findings that were made before."""
    address, port = dict(enumerate(identity.addresses)).get(identity.process_id, ("", None))
    probe, variables = probe_devices(), variables_of_user()
    made = [*under("cluster", found), *examine(probe)]
    return SurveyedHost(
        name=identity.label.partition(" (")[0],
        address=address,
        port=port,
        versions={
            "Python": ".".join(platform.python_version_tuple()[:2]),  # its bytecode is sent
            **installed_versions(_PACKAGES),
        },
        settings={name: variables[name] for name in _VARIABLES if name in variables},
        devices=", ".join(counted_devices(probe.devices)) or "none",
        findings=[dataclasses.asdict(one) for one in made if one.is_problem],
        run_address=run_address,
    )


def _listeners(
    group: Group, credentials: Credentials
) -> tuple[list[socket.socket], list[tuple[str, int, bool]]]:
    """Returns sockets at a free port of the address in a run, and at the port of this task.

    They come with the places at which others reach them, which say whether the port is a free one.
    The hub of the group has the port of the first task.
    """
    identity = group.identity
    wanted = [(group.own_address, 0)]
    if identity.process_id and identity.addresses:
        wanted.append(identity.addresses[identity.process_id])
    sockets: list[socket.socket] = []
    places: list[tuple[str, int, bool]] = []
    for host, port in wanted:
        with contextlib.suppress(OSError):  # `check_own_address` has reported it
            is_proved = credentials.secret is not None
            found = listening_sockets(host, port, identity.hosts, may_be_everywhere=is_proved)
            for one in found[: None if port else 1]:
                sockets.append(one)
                places.append((host, port or one.getsockname()[1], not port))
    return sockets, list(dict.fromkeys(places))


async def _failures(
    places: Sequence[Sequence[tuple[str, int, bool]]],
    own: int,
    credentials: Credentials,
    limit_s: float,
) -> list[Failure]:
    """Tries all places of the other processes."""
    turn = asyncio.Semaphore(_MOST_AT_ONCE)

    async def try_place(to: int, host: str, port: int, is_free: bool) -> Failure:
        async with turn:
            reason, address = await attempt(host, port, credentials, to, limit_s)
        return Failure(own, to, is_free, reason, address)

    # Each begins with the next one, so that no process is tried by all others at once.
    order = [(own + step) % len(places) for step in range(1, len(places))]
    tries = [try_place(to, *place) for to in order for place in places[to]]
    return [one for one in await asyncio.gather(*tries) if one.reason != Reason.REACHED]


async def attempt(
    host: str, port: int, credentials: Credentials, expected: int, limit_s: float
) -> tuple[Reason, str]:
    """Tries to reach the gate of the process `expected`; returns as `probe`."""

    async def meet(address: str, port: int, limit_s: float) -> Reason:
        connection = await reach(
            address,
            port,
            credentials,
            "doctor",
            purpose=_PURPOSE,
            server=f"process {expected}",
            limit_s=limit_s,
        )
        with connection, contextlib.suppress(OSError):
            receiving = asyncio.get_running_loop().sock_recv(connection, _ANSWER_BYTES)
            answer = await asyncio.wait_for(receiving, limit_s)
            return Reason.REACHED if answer == str(expected).encode() else Reason.WRONG_HOST
        return Reason.SILENT

    return await probe(host, port, limit_s, meet)


def _finding_of(failed: Exception) -> Finding:
    """Returns the error of a group as a finding; it may end with the place of this process."""
    problem, _, rest = str(failed).partition("\nFix: ")
    fix = " ".join(line for line in rest.splitlines() if not line.startswith("This is "))
    return error(
        problem.replace("\n", " "), fix or "see what the command prints on the other hosts."
    )
