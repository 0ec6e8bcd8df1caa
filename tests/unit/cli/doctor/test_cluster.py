"""The cluster: each resolver's view, ports and hosts; the survey of all processes, as threads here.

Processes join, are refused, or miss another; surveys with problems are made up.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.metadata
import json
import platform
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from typing import Any

import pytest

from stratagem.cli.doctor import cluster as cluster_checks
from stratagem.cli.doctor.cluster import (
    Failure,
    Reason,
    Survey,
    SurveyedHost,
    attempt,
    check_survey,
    examine_together,
    identity_in,
    own_facts,
    take_survey,
)
from stratagem.cli.doctor.findings import Finding, Level
from stratagem.cli.doctor.machine import Probe
from stratagem.cluster.addresses import free_ports
from stratagem.cluster.detection import ENVIRONMENTS
from stratagem.cluster.processes import Processes
from stratagem.cluster.resolvers.simple import ProcessClusterResolver, SimpleClusterResolver
from stratagem.cluster.spec import ClusterSpec
from stratagem.errors import DeadlineExceededError, UnavailableError
from stratagem.group.authentication.connections import UnansweredError
from stratagem.group.authentication.secret import Credentials, Gate, Secret
from stratagem.group.current import Identity
from tests.unit.cli.doctor.environments import closed_port, cluster


@pytest.fixture
def port() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_cluster_whose_machines_answer_is_fine(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    own, server = (f"127.0.0.1:{closed_port()}" for _ in range(2))
    workers = [own, f"127.0.0.1:{port}"]
    for task, words in (
        ({"type": "worker", "index": 0}, "2 processes in lockstep, this is worker 0"),
        ({"type": "ps", "index": 0}, "this is ps 0"),
    ):
        config = {"cluster": {"worker": workers, "ps": [server]}, "task": task}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        findings = list(cluster_checks.examine_clusters())
        assert [one.level for one in findings] == [Level.OK] * 3
        assert [one.text for one in findings] == [
            f"TF_CONFIG: {words}; 2 worker, 1 ps.",
            f"This machine can listen at {server if task['type'] == 'ps' else own}.",
            "All 2 other tasks can be reached.",
        ]


_LONE = '{"worker": ["a:1", "b:1"]}'


@pytest.mark.parametrize(
    ("config", "level", "text", "fix"),
    [
        ("", Level.OK, "No cluster is described by TF_CONFIG", ""),
        (_LONE, Level.WARNING, "TF_CONFIG .* has no key 'cluster'", '{"cluster": {"worker"'),
        ("{'cluster': {}}", Level.ERROR, "TF_CONFIG is not JSON", "json.dumps"),
        (cluster(["a", "b"]), Level.ERROR, "TF_CONFIG.*'a' is not of the form", "host0:2222"),
        (cluster(["a:1", "b:1"], 2), Level.ERROR, "TF_CONFIG.*index 2 is outside", "from 0"),
        (cluster(["a:1"], kind="trainer"), Level.ERROR, "TF_CONFIG.*'trainer' is unknown", "type"),
        (cluster(["a:1", "a:1"]), Level.ERROR, "TF_CONFIG.*same address 'a:1'", "different ports"),
    ],
    ids=["none", "no key", "no JSON", "no port", "no such task", "no such type", "one twice"],
)
def test_what_tf_config_lacks_is_named(config, level, text, fix, monkeypatch) -> None:
    monkeypatch.setenv("TF_CONFIG", config)
    (finding,) = cluster_checks.examine_clusters()
    assert finding.level is level
    assert re.match(text, finding.text)
    assert fix in finding.fix
    assert "\n" not in finding.fix


def test_address_at_which_this_machine_cannot_listen_is_named(port: int) -> None:
    unknown = "no-such-host.invalid:2222"
    for address, words, fix in (
        (f"127.0.0.1:{port}", f"Another program uses 127.0.0.1:{port}", f"'sport = :{port}'"),
        ("192.0.2.1:2222", "cannot listen", "task type and index"),  # of another machine
        (unknown, "no-such-host.invalid, has no address", "headless Service"),
    ):
        finding = cluster_checks.check_own_address(address)
        assert finding.level is Level.ERROR
        assert words in finding.text
        assert fix in finding.fix
    (peer,) = cluster_checks.check_peers({"worker 1": unknown})
    assert peer.text == f"worker 1 at {unknown} cannot be reached: the name is unknown."
    assert (peer.level, "headless Service" in peer.fix) == (Level.ERROR, True)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TimeoutError(), "no answer in time."),
        (OSError(113, "No route to host"), "there is no route to it."),
        (OSError(101, "Network is unreachable"), "there is no route to it."),
    ],
)
def test_lost_hosts_are_named_and_many_are_counted(error, words, monkeypatch) -> None:
    async def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(asyncio, "open_connection", fail)
    lost = {f"worker {n}": "10.0.0.9:2222" for n in range(20)}
    findings = list(cluster_checks.check_peers(lost, limit_s=0.5))
    assert len(findings) == 9
    assert findings[0].text == f"worker 0 at 10.0.0.9:2222 cannot be reached: {words}"
    assert findings[-1].text == "12 more tasks cannot be reached."


def test_second_cluster_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", cluster(["127.0.0.1:2222"]))
    make = ENVIRONMENTS["TF_CONFIG"]
    findings, resolver = cluster_checks.examine_resolvers({"first": make, "second": make})
    assert resolver is not None
    assert findings[1].text.endswith("It is not used: an earlier one has a cluster.")


# Findings of made-up surveys.

_VERSIONS = {"Python": "3.11", "jax": "0.10.2"}


def _sound(size: int = 4) -> Survey:
    hosts = [
        SurveyedHost(
            f"worker {index}",
            f"host{index}",
            2222,
            dict(_VERSIONS),
            devices="8 x NVIDIA H100 (gpu)",
            run_address=f"10.0.0.{index}",
        )
        for index in range(size)
    ]
    return Survey(hosts, failures=[])


def _with(survey: Survey, index: int, **fields: Any) -> Survey:
    """The survey with another host in the place of one."""
    hosts = list(survey.hosts)
    hosts[index] = dataclasses.replace(hosts[index], **fields)
    return dataclasses.replace(survey, hosts=hosts)


def _failing(
    survey: Survey, one: int, to: int, reason: Reason, address: str, *, is_free: bool = False
) -> Survey:
    """The survey with one more failure."""
    failure = Failure(one, to, is_free, reason.value, address)
    return dataclasses.replace(survey, failures=[*survey.failures, failure])


def _problems(survey: Survey) -> list[Finding]:
    return [one for one in check_survey(survey) if one.is_problem]


def test_sound_cluster_is_described_in_two_lines() -> None:
    findings = check_survey(_sound())
    assert [one.text for one in findings] == [
        "All 4 hosts reach each other, on free ports and on the ports of the cluster.",
        "All have Python 3.11, jax 0.10.2; and 8 x NVIDIA H100 (gpu).",
    ]
    assert {one.level for one in findings} == {Level.OK}


@pytest.mark.parametrize(
    ("reason", "cause", "fix"),
    [
        (Reason.REFUSED, "the connection is refused", "firewall on that host"),
        (Reason.TIMEOUT, "no answer in time", "security group"),
        (Reason.UNKNOWN_NAME, "the name is unknown", "/etc/hosts"),
        (Reason.NO_ROUTE, "there is no route to it", "ip route get"),
        (Reason.WRONG_HOST, "another host of the cluster answers there", "DNS"),
        (Reason.SILENT, "another program answers there", "end that program"),
        (Reason.ERROR, "the connection fails", "nc -vz"),
    ],
)
def test_lost_connection_names_who_and_why(reason: Reason, cause: str, fix: str) -> None:
    survey = _sound()
    for one in (0, 3):
        survey = _failing(survey, one, 2, reason, "10.0.0.2")
    (finding,) = _problems(survey)
    assert finding.text == (
        f"worker 0, worker 3 cannot reach worker 2 at host2:2222 (10.0.0.2): {cause}."
    )
    assert fix in finding.fix
    assert not any("reach each other" in one.text for one in check_survey(survey))


def test_closed_free_ports_are_a_problem_of_collectives() -> None:
    (finding,) = _problems(_failing(_sound(2), 0, 1, Reason.TIMEOUT, "10.0.0.1", is_free=True))
    assert finding.text == (
        "worker 0 cannot reach worker 1 at 10.0.0.1 on free ports, which collectives use: no "
        "answer in time."
    )


@pytest.mark.parametrize(
    ("name", "version", "fix"),
    [
        ("jax", "0.10.0", "install jax 0.10.2"),
        ("jax", None, "install jax 0.10.2"),
        ("Python", "3.12", "install Python 3.11"),
    ],
)
def test_other_version_is_named(name: str, version: str | None, fix: str) -> None:
    versions = {**_VERSIONS, name: version}
    kept = {one: text for one, text in versions.items() if text is not None}
    (finding,) = _problems(_with(_sound(), 3, versions=kept))
    assert finding.level is Level.ERROR
    assert f"{name} differs: " in finding.text
    assert finding.text.endswith(
        f" on worker 0, worker 1, worker 2; {version or 'missing'} on worker 3."
    )
    assert finding.fix.startswith(fix)


def test_other_devices_and_variables_of_compiled_programs_are_named() -> None:
    (finding,) = _problems(_with(_sound(2), 1, devices="7 x NVIDIA H100 (gpu)"))
    assert "8 x NVIDIA H100 (gpu) on worker 0; 7 x NVIDIA H100 (gpu) on worker 1" in finding.text
    (finding,) = _problems(_with(_sound(3), 1, settings={"JAX_ENABLE_X64": "1"}))
    assert finding.level is Level.WARNING
    assert finding.text == "JAX_ENABLE_X64 differs: not set on worker 0, worker 2; 1 on worker 1."
    assert finding.fix.startswith("set JAX_ENABLE_X64 alike on all hosts")


def test_equal_findings_of_hosts_are_shown_once() -> None:
    fields = {"topic": "machine", "level": "warning", "text": "No room.", "fix": "Make some."}
    survey = _sound(3)
    for index in (0, 2):
        survey = _with(survey, index, findings=[fields, fields])
    (finding,) = _problems(survey)
    assert finding == Finding(
        "machine", Level.WARNING, "worker 0, worker 2: No room.", "Make some."
    )


# The survey itself.

_LIMIT_S = 120.0
_PROBE = Probe([{"platform": "cpu", "kind": "cpu", "process": 0, "memory_bytes": None}] * 2)


@pytest.fixture(autouse=True)
def examinations(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """JAX is not started, and the findings about this machine are made up."""
    found = [Finding("machine", Level.WARNING, "No room.", "make some.")]
    monkeypatch.setattr(cluster_checks, "probe_devices", lambda: _PROBE)
    monkeypatch.setattr(cluster_checks, "examine", lambda *_, **__: iter(found))
    monkeypatch.delenv("STRATAGEM_SECRET", raising=False)
    monkeypatch.delenv("STRATAGEM_SECRET_FILE", raising=False)
    return found


def _identities(size: int, *, lists_all: bool = True) -> list[Identity]:
    addresses = tuple(("127.0.0.1", port) for port in free_ports(size))
    labels = tuple(
        f"worker {index} (127.0.0.1:{port})" for index, (_, port) in enumerate(addresses)
    )
    listed = addresses if lists_all else ()
    same = {"the cluster": ", ".join(labels)}
    return [Identity(index, labels, *addresses[0], same, listed) for index in range(size)]


def _surveys(
    identities: Sequence[Identity], wait_s: float = _LIMIT_S
) -> list[Survey | BaseException]:
    """What the processes have, each in a thread."""

    def take(identity: Identity) -> Survey | BaseException:
        try:
            return take_survey(identity, wait_s, _LIMIT_S)
        except Exception as error:  # noqa: BLE001 - compared by the test
            return error

    with ThreadPoolExecutor(len(identities)) as threads:
        return list(threads.map(take, identities))


@pytest.mark.parametrize("lists_all", [True, False], ids=["addresses", "coordinator alone"])
@pytest.mark.parametrize("secret", [None, "s" * 32], ids=["without a secret", "with a secret"])
def test_all_processes_have_the_same_survey(secret, lists_all, monkeypatch) -> None:
    if secret is not None:
        monkeypatch.setenv("STRATAGEM_SECRET", secret)
    identities = _identities(3, lists_all=lists_all)
    outcomes: list[tuple[int, bool, str]] = []

    async def recorded(host: str, port: int, *rest: Any) -> tuple[str, str]:
        outcome = await attempt(host, port, *rest)
        outcomes.append((rest[1], (host, port) in identities[0].addresses, outcome[0]))
        return outcome

    monkeypatch.setattr(cluster_checks, "attempt", recorded)
    surveys = _surveys(identities)
    survey = surveys[0]
    assert isinstance(survey, Survey), survey
    assert surveys == [survey] * 3
    assert survey.failures == []
    expected = [(to, False, Reason.REACHED) for to in range(3)]
    expected += [(to, True, Reason.REACHED) for to in (1, 2) if lists_all]
    assert sorted(outcomes) == sorted(2 * expected)
    assert [host.name for host in survey.hosts] == ["worker 0", "worker 1", "worker 2"]
    assert [host.run_address for host in survey.hosts] == ["127.0.0.1"] * 3
    assert survey.hosts[2].findings[0]["text"] == "No room."


def test_process_that_never_comes_is_named_with_the_option() -> None:
    first, second, _ = _identities(3)
    errors = _surveys([first, second], wait_s=1.5)
    problem, expected, fix = str(errors[0]).splitlines()
    assert re.search(r"of 3 joined within \d+ s; .*worker 2 \(127.0.0.1:\d+\) did not\.", problem)
    assert expected == "Expected the command on all hosts within 1.5 s."
    assert "--wait changes the limit" in fix
    assert all(isinstance(error, DeadlineExceededError) for error in errors)


def test_port_of_the_first_process_that_is_taken_is_an_error() -> None:
    identity, _ = _identities(2)
    with socket.create_server((identity.host, identity.port)):
        (error,) = _surveys([identity])
    assert isinstance(error, ValueError)
    assert f"cannot listen on port {identity.port}" in str(error)


def test_port_of_another_process_that_is_taken_is_a_finding_about_it() -> None:
    identities = _identities(2)
    with socket.create_server(identities[1].addresses[1]):
        survey, _ = _surveys(identities)
    assert isinstance(survey, Survey)
    assert survey.failures == []
    assert "Another program uses 127.0.0.1" in survey.hosts[1].findings[0]["text"]


def test_failed_connection_is_in_the_survey_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    async def failed(
        host: str, port: int, credentials: Credentials, to: int, limit_s: float
    ) -> Any:
        is_lost = (host, port) == identities[2].addresses[2]
        return (Reason.TIMEOUT, "192.0.2.1") if is_lost else (Reason.REACHED, host)

    identities = _identities(3)
    monkeypatch.setattr(cluster_checks, "attempt", failed)
    first, *others = _surveys(identities)
    assert isinstance(first, Survey)
    assert others == [first] * 2
    assert first.failures == [Failure(one, 2, False, "timeout", "192.0.2.1") for one in (0, 1)]
    (finding,) = (one for one in check_survey(first) if "cannot reach" in one.text)
    assert finding.text.endswith("(192.0.2.1): no answer in time.")


def test_other_description_of_the_cluster_is_named_on_all() -> None:
    first, second = _identities(2)
    for error in _surveys([first, replace(second, same={"the cluster": "another"})]):
        assert isinstance(error, ValueError)
        assert "has the cluster" in str(error)


def test_process_that_ends_in_a_survey_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = cluster_checks.own_facts

    def interrupted(identity: Identity, *rest: Any) -> SurveyedHost:
        if identity.process_id == 1:
            raise RuntimeError("interrupted")
        return find(identity, *rest)

    monkeypatch.setattr(cluster_checks, "own_facts", interrupted)
    first, second, third = _surveys(_identities(3))
    assert str(second) == "interrupted"
    for error in (first, third):
        assert isinstance(error, UnavailableError)
        assert "worker 1 (127.0.0.1:" in str(error)


def test_network_needs_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", cluster(["10.0.0.1:2222", "10.0.0.2:2222"]))
    survey, found = examine_together(_LIMIT_S, _LIMIT_S)
    first, *others = found
    assert survey is None
    assert first.text.startswith("worker 0 (10.0.0.1:2222) has no secret, and the run uses the")
    assert "stratagem secret --file run.secret" in first.fix
    assert [one.text for one in others] == ["No room."]


@pytest.mark.parametrize("config", ["", cluster(["127.0.0.1:9"])], ids=["none", "one task"])
def test_environment_without_a_cluster_is_an_error(config, monkeypatch) -> None:
    monkeypatch.setenv("TF_CONFIG", config)
    survey, (finding,) = examine_together(_LIMIT_S, _LIMIT_S)
    assert survey is None
    assert "describes no cluster of several hosts" in finding.text
    assert "set TF_CONFIG on each host" in finding.fix


# Who takes part.


def _resolver(task_type: str, task_id: int) -> SimpleClusterResolver:
    spec = ClusterSpec({"ps": ["d:4"], "worker": ["b:1", "c:2"], "chief": ["a:3"]})
    return SimpleClusterResolver(spec, task_type=task_type, task_id=task_id)


def test_all_tasks_of_a_cluster_take_part() -> None:
    found = [identity_in(_resolver(*task)) for task in (("worker", 1), ("ps", 0))]
    first, second = (one for one in found if one is not None)
    labels = ("chief 0 (a:3)", "worker 0 (b:1)", "worker 1 (c:2)", "ps 0 (d:4)")
    assert first.labels == labels
    assert (first.process_id, second.process_id) == (2, 3)
    assert (first.host, first.port) == ("a", 3)
    assert first.addresses[1] == ("b", 1)
    assert replace(first, process_id=3) == second


def test_processes_of_a_launcher_take_part() -> None:
    found = identity_in(ProcessClusterResolver(Processes(4, 2, "a:9")))
    assert found.labels == ("process 0", "process 1", "process 2", "process 3")
    assert (found.process_id, found.host, found.port, found.addresses) == (2, "a", 9, ())
    on_one_machine = identity_in(ProcessClusterResolver(Processes(2, 0, "a:9", 0, 2)))
    assert on_one_machine.host == "127.0.0.1"
    assert identity_in(ProcessClusterResolver(Processes(1, 0))) is None


# What a process tells the others.


def test_facts_are_json_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_ENABLE_X64", "true")
    monkeypatch.setenv("XLA_FLAGS", "--a=1")
    before = [
        Finding("cluster", Level.ERROR, "Another program.", "End it."),
        Finding("cluster", Level.OK, "Fine."),
    ]
    found = json.loads(json.dumps(asdict(own_facts(_identities(2)[1], "10.0.0.1", before))))
    assert found["name"] == "worker 1"
    assert found["address"] == "127.0.0.1"
    assert found["run_address"] == "10.0.0.1"
    assert found["devices"] == "2 x cpu"
    assert platform.python_version().startswith(found["versions"]["Python"])
    assert found["versions"]["jaxlib"] == importlib.metadata.version("jaxlib")
    assert found["settings"]["JAX_ENABLE_X64"] == "true"
    assert found["settings"]["XLA_FLAGS"] == "--a=1"
    assert [one["text"] for one in found["findings"]] == ["Another program.", "No room."]


# Connections to a gate, and each reason for a failure.

_KNOWN = Credentials(Secret("s" * 32))


@pytest.fixture
def gate() -> Iterator[Callable[[bytes], int]]:
    """Opens a gate that tells its number; returns its port."""
    with ExitStack() as stack:

        def opened(number: bytes) -> int:
            def tell(connection: socket.socket, claim: str) -> None:
                with closing(connection):
                    connection.send(number)

            listener = socket.create_server(("127.0.0.1", 0))
            stack.enter_context(Gate([listener], _KNOWN, tell, purpose="doctor"))
            return listener.getsockname()[1]

        yield opened


def _attempt(port: int, credentials: Credentials = _KNOWN, host: str = "127.0.0.1") -> Reason:
    reason, _ = asyncio.run(attempt(host, port, credentials, 3, _LIMIT_S))
    return Reason(reason)


@pytest.mark.parametrize(
    ("number", "reason"),
    [(b"3", Reason.REACHED), (b"13", Reason.WRONG_HOST), (b"4", Reason.WRONG_HOST)],
)
def test_who_answers_is_seen(number: bytes, reason: Reason, gate: Callable[[bytes], int]) -> None:
    assert _attempt(gate(number)) is reason


def test_gate_tells_strangers_nothing(gate: Callable[[bytes], int]) -> None:
    port = gate(b"3")
    assert _attempt(port, Credentials()) is Reason.SILENT
    assert _attempt(port, Credentials(Secret("t" * 32))) is Reason.SILENT
    assert _attempt(closed_port()) is Reason.REFUSED


def test_name_without_an_address_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:  # a machine without a network asks for long
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert _attempt(1, host="no-such-host.invalid") is Reason.UNKNOWN_NAME


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TimeoutError(), Reason.TIMEOUT),
        (OSError(113, "No route to host"), Reason.NO_ROUTE),
        (OSError(5, "Input/output error"), Reason.ERROR),
        (UnansweredError("closed"), Reason.SILENT),
    ],
    ids=["timeout", "no route", "other error", "no handshake"],
)
def test_error_of_a_connection_has_a_reason(error, reason, monkeypatch) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cluster_checks, "reach", fail)
    assert _attempt(1) is reason
