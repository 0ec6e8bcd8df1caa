"""Processes of one cluster, as threads here: they join, are refused, or miss another."""

from __future__ import annotations

import asyncio
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

from stratagem.cli.doctor import together
from stratagem.cli.doctor.accelerators import Probe
from stratagem.cli.doctor.findings import Finding, Level
from stratagem.cli.doctor.survey import Failure, Reason, Survey, SurveyedHost, check_survey
from stratagem.cli.doctor.together import (
    attempt,
    examine_together,
    identity_in,
    own_facts,
    take_survey,
)
from stratagem.cluster.addresses import free_ports
from stratagem.cluster.processes import Processes
from stratagem.cluster.resolvers.simple import ProcessClusterResolver, SimpleClusterResolver
from stratagem.cluster.spec import ClusterSpec
from stratagem.errors import DeadlineExceededError, UnavailableError
from stratagem.group.authentication.connections import UnansweredError
from stratagem.group.authentication.secret import Credentials, Gate, Secret
from stratagem.group.current import Identity
from tests.unit.cli.doctor.environments import closed_port, cluster

_LIMIT_S = 120.0
_PROBE = Probe([{"platform": "cpu", "kind": "cpu", "process": 0, "memory_bytes": None}] * 2)


@pytest.fixture(autouse=True)
def examinations(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """JAX is not started, and the findings about this machine are made up."""
    found = [Finding("machine", Level.WARNING, "No room.", "make some.")]
    monkeypatch.setattr(together, "probe_devices", lambda: _PROBE)
    monkeypatch.setattr(together, "examine", lambda **_: iter(found))
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
def test_all_processes_have_the_same_survey(
    secret: str | None, lists_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if secret is not None:
        monkeypatch.setenv("STRATAGEM_SECRET", secret)
    identities = _identities(3, lists_all=lists_all)
    outcomes: list[tuple[int, bool, str]] = []

    async def recorded(host: str, port: int, *rest: Any) -> tuple[str, str]:
        outcome = await attempt(host, port, *rest)
        outcomes.append((rest[1], (host, port) in identities[0].addresses, outcome[0]))
        return outcome

    monkeypatch.setattr(together, "attempt", recorded)
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
    assert max(map(abs, survey.offset_s)) <= max(survey.uncertainty_s)
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
    monkeypatch.setattr(together, "attempt", failed)
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
    find = together.own_facts

    def interrupted(identity: Identity, *rest: Any) -> SurveyedHost:
        if identity.process_id == 1:
            raise RuntimeError("interrupted")
        return find(identity, *rest)

    monkeypatch.setattr(together, "own_facts", interrupted)
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
def test_environment_without_a_cluster_is_an_error(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert found is not None
    assert found.labels == ("process 0", "process 1", "process 2", "process 3")
    assert (found.process_id, found.host, found.port, found.addresses) == (2, "a", 9, ())
    on_one_machine = identity_in(ProcessClusterResolver(Processes(2, 0, "a:9", 0, 2)))
    assert on_one_machine is not None
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
    assert found["versions"]["Python"] == platform.python_version()
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
def test_error_of_a_connection_has_a_reason(
    error: OSError, reason: Reason, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(together, "reach", fail)
    assert _attempt(1) is reason
