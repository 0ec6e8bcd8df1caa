"""`stratagem doctor --cluster`: the processes of a cluster examine it together.

The command runs on every host, as a training script would, and goes through these steps:

1. The processes join a group at the port, and with the secret and certificates, of a run. What
   would keep them from training keeps them from joining: a process that is missing, another
   secret, another cluster, a port that is taken.
2. Each opens a gate at the port of its task and at a free port. It examines itself, and tells the
   others what it found, and its free port.
3. Some exchanges in a row bound the differences of the clocks.
4. Each connects to the gates of all others. A gate admits holders of the secret only, and tells
   them the number of its process.
5. They tell each other whom they did not reach, and at which address.

All have the same survey then, and print the same findings. If a process does not come, or is lost,
the group names it on all others within a limit, and each of these examines its own machine instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import itertools
import logging
import math
import platform
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from stratagem import logs, settings
from stratagem.cli.doctor.accelerators import counted_devices, probe_devices
from stratagem.cli.doctor.clusters import check_own_address, examine_resolvers
from stratagem.cli.doctor.examination import examine, variables_of_user
from stratagem.cli.doctor.findings import Finding, Level, error, under
from stratagem.cli.doctor.survey import (
    Failure,
    Reason,
    Survey,
    SurveyedHost,
    check_survey,
    clock_offsets,
)
from stratagem.cli.doctor.versions import installed_versions
from stratagem.cluster.addresses import join_address, split_address
from stratagem.cluster.detection import ENVIRONMENTS
from stratagem.cluster.processes import Processes
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
_NUM_READINGS = 5
# Connections that a process tries at once: a gate cuts handshakes short beyond 64 of an address.
_MOST_AT_ONCE = 32
_PURPOSE = "doctor"
_ANSWER_BYTES = 16
_LOOPBACK = "127.0.0.1"


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
        return None, itertools.chain(under("cluster", [_finding_of(failed)]), examine())
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
        readings: list[tuple[float, float]] = []
        for number in range(_NUM_READINGS):
            before_s = time.time()
            exchange(f"clock {number}", None)
            readings.append((before_s, time.time()))
        trying = _failures([places for _, places in told], own, credentials, limit_s)
        failed = [dataclasses.astuple(one) for one in asyncio.run(trying)]
        # Each connection is a lookup, a handshake of two parts, and an answer.
        rounds = math.ceil(2 * count / _MOST_AT_ONCE)
        results = exchange("connections", [failed, readings], _STEP_LIMIT_S + 4 * limit_s * rounds)
    offset_s, uncertainty_s = clock_offsets([one for _, one in results])
    return Survey(
        hosts=[SurveyedHost(**one) for one, _ in told],
        failures=[Failure(*one) for several, _ in results for one in several],
        offset_s=offset_s,
        uncertainty_s=uncertainty_s,
    )


def own_facts(identity: Identity, run_address: str, found: Iterable[Finding]) -> SurveyedHost:
    """Returns what this process tells the others, with the findings that were made before."""
    address, port = dict(enumerate(identity.addresses)).get(identity.process_id, ("", None))
    probe, variables = probe_devices(), variables_of_user()
    made = [*under("cluster", found), *examine(probe=probe, has_cluster=False)]
    return SurveyedHost(
        name=identity.label.partition(" (")[0],
        address=address,
        port=port,
        versions={"Python": platform.python_version(), **installed_versions(_PACKAGES)},
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
) -> tuple[str, str]:
    """Tries to reach the gate of a process; returns the outcome and the numeric address tried.

    Args:
        host: host name or address.
        port: port.
        credentials: those of the run.
        expected: number of the process.
        limit_s: seconds for each of: the lookup, the connection, the handshake, the answer.
    """
    loop = asyncio.get_running_loop()
    try:
        looking = loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        found = await asyncio.wait_for(looking, limit_s)
    except (OSError, UnicodeError):
        return Reason.UNKNOWN_NAME, ""
    tried: list[tuple[str, str]] = []
    for address in dict.fromkeys(str(entry[4][0]) for entry in found):
        tried.append((await _attempt_at(address, port, credentials, expected, limit_s), address))
        if tried[-1][0] is Reason.REACHED:
            return tried[-1]
    return tried[0]


async def _attempt_at(
    address: str, port: int, credentials: Credentials, expected: int, limit_s: float
) -> Reason:
    try:
        connection = await reach(
            address,
            port,
            credentials,
            "doctor",
            purpose=_PURPOSE,
            server=f"process {expected}",
            limit_s=limit_s,
        )
    except (UnansweredError, ValueError):  # no proof, or that of another run
        return Reason.SILENT
    except TimeoutError:
        return Reason.TIMEOUT
    except ConnectionRefusedError:
        return Reason.REFUSED
    except OSError as failed:
        is_lost = failed.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES)
        return Reason.NO_ROUTE if is_lost else Reason.ERROR
    with connection, contextlib.suppress(OSError):
        receiving = asyncio.get_running_loop().sock_recv(connection, _ANSWER_BYTES)
        answer = await asyncio.wait_for(receiving, limit_s)
        return Reason.REACHED if answer == str(expected).encode() else Reason.WRONG_HOST
    return Reason.SILENT


def _finding_of(failed: Exception) -> Finding:
    """Returns the error of a group as a finding; it may end with the place of this process."""
    problem, _, rest = str(failed).partition("\nFix: ")
    fix = " ".join(line for line in rest.splitlines() if not line.startswith("This is "))
    return error(
        problem.replace("\n", " "), fix or "see what the command prints on the other hosts."
    )
