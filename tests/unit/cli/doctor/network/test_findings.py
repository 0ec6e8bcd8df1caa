"""Findings of made-up surveys: problems with their hosts, and a cluster without any."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import importlib.metadata
import io
import json
import platform
import socket
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
from rich.console import Console

from stratagem.cli.doctor import cluster_command
from stratagem.cli.doctor.accelerators import Probe
from stratagem.cli.doctor.cluster_command import gather_facts
from stratagem.cli.doctor.network import surveyor
from stratagem.cli.doctor.network.agent import Reason
from stratagem.cli.doctor.network.findings import check_survey
from stratagem.cli.doctor.network.survey import (
    Survey,
    SurveyedHost,
    SurveySettings,
    hosts_of,
    own_index,
    survey_tables,
)
from stratagem.cli.doctor.network.surveyor import Surveyor, survey_as_task
from stratagem.cli.doctor.settings import Finding, Level
from stratagem.cluster.addresses import free_ports
from stratagem.cluster.resolvers.simple import SimpleClusterResolver
from stratagem.cluster.spec import ClusterSpec

_FACTS: dict[str, Any] = {
    "versions": {"Python": "3.11.7", "jax": "0.10.2"},
    "devices": "8 x NVIDIA H100 (gpu)",
    "findings": [],
}


def _sound(size: int = 4) -> Survey:
    hosts = [SurveyedHost(f"worker {i}", f"host{i}", 2222) for i in range(size)]
    survey = Survey(hosts, facts={i: copy.deepcopy(_FACTS) for i in range(size)})
    for one in range(size):
        survey.own_address[one] = f"10.0.0.{one}"
        survey.owned[one] = {f"10.0.0.{one}": True}
        for other in range(size):
            if one != other:
                reached = (Reason.REACHED.value, f"10.0.0.{other}")
                survey.cluster[one][other] = survey.free[one][other] = reached
                survey.round_trip_s[one][other] = 1e-4
                survey.bytes_per_s[one][other] = 1e9
    survey.offset_s, survey.uncertainty_s = [0.0] * size, [1e-4] * size
    return survey


def _problems(survey: Survey) -> list[Finding]:
    return [one for one in check_survey(survey) if one.level in (Level.WARNING, Level.ERROR)]


def test_sound_cluster_is_described_in_four_lines() -> None:
    findings = check_survey(_sound())
    assert [one.text for one in findings] == [
        "All 4 hosts reach each other, on free ports and on the ports of the cluster.",
        "Round trips take 0.1 ms; one connection transfers 1000 MB/s.",
        "Clocks differ from worker 0's by at most 0.1 ms.",
        "All have Python 3.11.7, jax 0.10.2; and 8 x NVIDIA H100 (gpu).",
    ]
    assert {one.level for one in findings} == {Level.OK}


@pytest.mark.parametrize(
    ("reason", "cause", "fix"),
    [
        (Reason.REFUSED, "the connection is refused", "firewall on that host"),
        (Reason.TIMEOUT, "no answer in time", "security group"),
        (Reason.UNKNOWN_NAME, "the name is unknown there", "/etc/hosts"),
        (Reason.NO_ROUTE, "there is no route to it", "ip route get"),
        (Reason.WRONG_HOST, "another host of the cluster answers there", "DNS"),
        (Reason.SILENT, "another program answers there", "end that program"),
        (Reason.ERROR, "the connection fails", "nc -vz"),
    ],
)
def test_lost_connection_names_who_and_why(reason: Reason, cause: str, fix: str) -> None:
    survey = _sound()
    for one in (0, 3):
        survey.cluster[one][2] = (reason.value, "10.0.0.2")
    (finding,) = _problems(survey)
    assert finding.text == (
        f"worker 0, worker 3 cannot reach worker 2 at host2:2222 (10.0.0.2): {cause}."
    )
    assert fix in finding.fix
    assert not any("reach each other" in one.text for one in check_survey(survey))


def test_closed_free_ports_are_a_problem_of_collectives() -> None:
    survey = _sound(2)
    survey.free[0][1] = (Reason.TIMEOUT.value, "10.0.0.1")
    (finding,) = _problems(survey)
    assert "worker 1 at host1 (10.0.0.1) on free ports, which collectives use" in finding.text


def test_address_of_no_interface_is_the_wrong_one() -> None:
    survey = _sound(2)
    survey.cluster[0][1] = (Reason.TIMEOUT.value, "10.9.9.9")
    survey.owned[1]["10.9.9.9"] = False
    (finding,) = _problems(survey)
    assert "wrong interface" in finding.text
    assert "ip address" in finding.fix


def test_loopback_address_of_the_own_name_is_the_wrong_interface() -> None:
    survey = _sound(2)
    survey.own_address[1] = "127.0.1.1"
    (finding,) = _problems(survey)
    assert finding.level is Level.WARNING
    assert finding.text.startswith("worker 1 has the wrong interface for its own name: host1 is")
    assert "127.0.1.1 from /etc/hosts" in finding.fix


def test_cluster_on_one_machine_uses_loopback() -> None:
    survey = _sound(2)
    for one in range(2):
        survey.own_address[one] = "127.0.0.1"
        survey.cluster[one][1 - one] = survey.free[one][1 - one] = ("reached", "127.0.0.1")
    assert _problems(survey) == []


def test_absent_host_is_named_with_the_remedy() -> None:
    reason = "did not answer within 60 s"
    survey = Survey([SurveyedHost("a", "a"), SurveyedHost("host1", "host1")], absent={1: reason})
    (finding,) = _problems(survey)
    assert finding.text.startswith(f"host1 {reason}")
    assert "start stratagem doctor --cluster there" in finding.fix


def test_absent_host_that_refuses_is_up() -> None:
    survey = _sound(2)
    survey.absent[1] = "did not answer within 60 s"
    survey.cluster[0][1] = (Reason.REFUSED.value, "10.0.0.1")
    (finding,) = _problems(survey)
    assert finding.text == "worker 1 (host1:2222) did not answer within 60 s."


@pytest.mark.parametrize(
    ("offset_s", "level"),
    [(0.4, None), (-0.6, Level.WARNING), (299.0, Level.WARNING), (-301.0, Level.ERROR)],
)
def test_skew_is_measured_against_its_uncertainty(offset_s: float, level: Level | None) -> None:
    survey = _sound(2)
    survey.offset_s[1] = offset_s
    problems = _problems(survey)
    assert [one.level for one in problems] == ([] if level is None else [level])
    if level is not None:
        side = "ahead of" if offset_s > 0 else "behind"
        assert f"worker 1 is {abs(offset_s):.3f} s {side} worker 0's (±0.1 ms)" in problems[0].text
        assert "chrony" in problems[0].fix
    survey.uncertainty_s[1] = abs(offset_s)
    assert _problems(survey) == []


def test_slow_pair_is_named() -> None:
    survey = _sound()
    survey.bytes_per_s[1][2] = 1e8
    (finding,) = _problems(survey)
    assert finding.text.startswith("worker 1 sends to worker 2 at 100 MB/s; the median")


@pytest.mark.parametrize(
    ("name", "version", "level", "fix"),
    [
        ("jax", "0.10.0", Level.ERROR, 'pip install "jax==0.10.2"'),
        ("jax", None, Level.ERROR, 'pip install "jax==0.10.2"'),
        ("Python", "3.11.9", Level.WARNING, "use Python 3.11.7"),
        ("Python", "3.12.1", Level.ERROR, "use Python 3.11.7"),
    ],
)
def test_other_version_is_named(name: str, version: str | None, level: Level, fix: str) -> None:
    survey = _sound()
    survey.facts[3]["versions"][name] = version
    if version is None:
        del survey.facts[3]["versions"][name]
    (finding,) = _problems(survey)
    assert finding.level is level
    assert f"{name} differs: " in finding.text
    assert finding.text.endswith(
        f" on worker 0, worker 1, worker 2; {version or 'missing'} on worker 3."
    )
    assert finding.fix.startswith(fix)


def test_other_devices_are_named() -> None:
    survey = _sound(2)
    survey.facts[1]["devices"] = "7 x NVIDIA H100 (gpu)"
    (finding,) = _problems(survey)
    assert "8 x NVIDIA H100 (gpu) on worker 0; 7 x NVIDIA H100 (gpu) on worker 1" in finding.text


def test_equal_findings_of_hosts_are_shown_once() -> None:
    survey = _sound(3)
    fields = {"topic": "machine", "level": "warning", "text": "No room.", "fix": "Make some."}
    for index in (0, 2):
        survey.facts[index]["findings"] = [fields]
    (finding,) = _problems(survey)
    assert finding == Finding(
        "machine", Level.WARNING, "worker 0, worker 2: No room.", "Make some."
    )


def test_failed_measurements_and_rejected_tasks_are_shown() -> None:
    survey = _sound(2)
    survey.failures = ["transfer from worker 0 to worker 1: no answer in time"]
    survey.rejected = ["A second task at 10.0.0.7 is worker 1, too"]
    assert [one.text for one in _problems(survey)] == [
        "A second task at 10.0.0.7 is worker 1, too.",
        "transfer from worker 0 to worker 1: no answer in time.",
    ]


# Order of a survey, and members that are silent or leave during it.

_OFFSETS_S = [0.0, 5.0, -2.0]


class _Member:
    """A member with made-up measurements; `fails` maps an order to what happens instead."""

    def __init__(self, index: int, log: list[tuple[int, str]], fails: Mapping[str, Any]) -> None:
        self.free_port = 1000 + index
        self._index = index
        self._log = log
        self._fails = fails

    async def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        kind = order["kind"]
        self._log.append((self._index, kind))
        if isinstance(failure := self._fails.get(kind), BaseException):
            raise failure
        if failure == "silent":
            await asyncio.sleep(60)
        if failure is not None:
            return dict(failure)
        to = order.get("to", 0)
        tried = [(Reason.REACHED, f"10.0.0.{i}") if i != self._index else None for i in range(3)]
        return {
            "facts": {"facts": {"versions": {}}},
            "reach": {"reach": {"cluster": [None] * 3, "free": tried}},
            "owns": {"owns": {}, "own_address": "10.0.0.1"},
            "echo": {
                "round_trip_s": 1e-3,
                "offset_s": _OFFSETS_S[to] - _OFFSETS_S[self._index],
                "uncertainty_s": 5e-4,
            },
            "transfer": {"bytes_per_s": 100.0 + 10.0 * self._index + to},
        }[kind]

    async def end(self, report: Mapping[str, Any]) -> None:
        del report


def _survey(
    fails: Mapping[int, Mapping[str, Any]],
    transfer_s: float = 0.1,
    present: tuple[int, ...] = (0, 1, 2),
) -> tuple[Survey, list[tuple[int, str]]]:
    log: list[tuple[int, str]] = []
    survey = Survey([SurveyedHost(name, name) for name in "abc"])
    members = {index: _Member(index, log, fails.get(index, {})) for index in present}
    running = Surveyor(survey, members, limit_s=0.01, transfer_s=transfer_s, note=lambda text: None)
    return asyncio.run(running.run()), log


def test_pairs_are_measured_one_after_the_other() -> None:
    survey, log = _survey({})
    pairs = [entry for entry in log if entry[1] in ("echo", "transfer")]
    assert pairs == [
        (one, kind) for one in range(3) for _ in range(2) for kind in ("echo", "transfer")
    ]
    assert survey.bytes_per_s == [[None, 101.0, 102.0], [110.0, None, 112.0], [120.0, 121.0, None]]
    assert survey.offset_s == _OFFSETS_S
    assert survey.uncertainty_s == [0.0, 5e-4, 5e-4]
    assert survey.absent == {}


def test_no_transfer_is_made_if_none_is_wanted() -> None:
    survey, log = _survey({}, transfer_s=0.0)
    assert not any(kind == "transfer" for _, kind in log)
    assert survey.bytes_per_s == [[None] * 3] * 3


def test_clock_is_read_from_the_other_side_if_only_that_can_connect() -> None:
    tried = [None, (Reason.TIMEOUT, ""), (Reason.TIMEOUT, "")]
    reach = {"reach": {"cluster": [None] * 3, "free": tried}}
    survey, _ = _survey({0: {"reach": reach}})
    assert survey.offset_s == _OFFSETS_S
    assert survey.round_trip_s[0] == [None] * 3


def test_first_host_that_is_there_is_the_reference() -> None:
    survey, _ = _survey({}, present=(1, 2))
    assert survey.reference == 1
    assert survey.offset_s == [None, 0.0, -7.0]


@pytest.mark.parametrize("kind", ["facts", "reach", "echo", "transfer"])
@pytest.mark.parametrize("failure", ["silent", ConnectionError("closed by the other side")])
def test_member_that_is_lost_is_named_and_the_others_go_on(
    kind: str, failure: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surveyor, "_SLACK_S", 0.05)
    monkeypatch.setattr(surveyor, "_FACTS_LIMIT_S", 0.05)
    survey, log = _survey({1: {kind: failure}}, transfer_s=0.01)
    assert list(survey.absent) == [1]
    assert survey.absent[1].startswith("stopped answering")
    assert repr(kind) in survey.absent[1]
    assert survey.bytes_per_s[2][0] == 120.0
    assert log[-1][0] == 2


def test_failed_measurement_is_recorded() -> None:
    survey, _ = _survey({0: {"transfer": {"error": "no answer"}}})
    assert survey.failures == [
        "transfer from a to b: no answer",
        "transfer from a to c: no answer",
    ]
    assert survey.bytes_per_s[0] == [None, None, None]
    assert survey.bytes_per_s[1][0] == 110.0


def test_slow_pair_is_measured_again_and_the_faster_one_counts() -> None:
    class Slow(dict[str, Any]):
        """Only the first transfer is slow."""

        def get(self, kind: str, default: object = None) -> Any:
            return {"bytes_per_s": 1.0} if kind == "transfer" and self.pop(kind, None) else None

    survey, log = _survey({0: Slow(transfer=True)})
    assert survey.bytes_per_s[0] == [None, 101.0, 102.0]
    assert [entry for entry in log if entry[1] == "transfer"][-1] == (0, "transfer")
    assert len([entry for entry in log if entry[1] == "transfer"]) == 7


# Tasks of one cluster on this machine: they join, are refused, or find no leader.

_SETTINGS = SurveySettings(wait_s=10.0, limit_s=5.0, transfer_s=0.01)


def _hosts(size: int) -> list[SurveyedHost]:
    ports = free_ports(size)
    return [SurveyedHost(f"worker {i}", "127.0.0.1", port) for i, port in enumerate(ports)]


def _facts(index: int) -> dict[str, Any]:
    return {"versions": {"jax": str(index)}, "devices": "1 x cpu", "findings": []}


async def _together(
    *tasks: tuple[list[SurveyedHost], int], settings: SurveySettings = _SETTINGS
) -> list[Survey]:
    return await asyncio.gather(
        *(survey_as_task(hosts, index, lambda: _facts(0), settings) for hosts, index in tasks)
    )


def test_all_tasks_have_the_same_survey() -> None:
    hosts = _hosts(3)
    surveys = asyncio.run(_together(*((hosts, index) for index in range(3))))
    assert surveys[0] == surveys[1] == surveys[2]
    survey = surveys[0]
    assert survey.absent == {}
    for one in range(3):
        for other in range(3):
            assert (survey.bytes_per_s[one][other] is None) == (one == other)
            assert (survey.cluster[one][other] or ("", ""))[0] == (
                "reached" if one != other else ""
            )


def test_task_that_never_comes_is_absent() -> None:
    hosts = _hosts(3)
    settings = SurveySettings(wait_s=1.5, limit_s=60.0, transfer_s=0.01)
    survey, other = asyncio.run(_together((hosts, 0), (hosts, 1), settings=settings))
    assert survey.absent == {2: "did not answer within 1.5 s"}
    assert survey.bytes_per_s[0][1] is not None
    assert other == survey
    assert survey.cluster[0][2] == ("refused", "127.0.0.1")


@pytest.mark.slow
def test_task_without_a_leader_names_it() -> None:
    hosts = _hosts(2)
    settings = SurveySettings(wait_s=0.3, limit_s=1.0)
    (survey,) = asyncio.run(_together((hosts, 1), settings=settings))
    assert survey.absent[0].startswith("did not answer within 0.3 s (")
    assert survey.facts[1] == _facts(0)


@pytest.mark.slow
def test_task_that_is_interrupted_closes_its_connection() -> None:
    hosts = _hosts(2)

    async def interrupted() -> None:
        with socket.create_server(("127.0.0.1", hosts[0].port)):  # It never answers.
            joining = asyncio.create_task(_together((hosts, 1)))
            await asyncio.sleep(0.3)
            joining.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await joining

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(interrupted())
        gc.collect()
    assert [str(one.message) for one in caught] == []


def test_leader_whose_port_is_taken_waits_for_none() -> None:
    hosts = _hosts(2)
    assert hosts[0].port is not None
    with socket.create_server(("127.0.0.1", hosts[0].port)):
        (survey,) = asyncio.run(_together((hosts, 0)))
    assert survey.absent == {1: "was not asked: worker 0 cannot listen at its address"}


def test_other_description_of_the_cluster_is_refused() -> None:
    hosts = _hosts(2)
    others = [hosts[0], SurveyedHost("worker 1", "127.0.0.1", 9)]
    settings = SurveySettings(wait_s=1.5, limit_s=60.0, transfer_s=0.0)
    survey, refused = asyncio.run(_together((hosts, 0), (others, 1), settings=settings))
    (problem,) = survey.rejected
    assert problem.startswith("worker 1 at 127.0.0.1 describes another cluster: ")
    assert refused.rejected == [problem]
    assert 1 in survey.absent


def test_second_task_of_one_index_is_refused() -> None:
    hosts = _hosts(2)

    async def three() -> list[Survey]:
        settings = SurveySettings(wait_s=60.0, limit_s=60.0, transfer_s=0.0)
        leader = asyncio.create_task(survey_as_task(hosts, 0, lambda: _slow(0.5), settings))
        others = [
            asyncio.create_task(survey_as_task(hosts, 1, lambda: _facts(1), settings))
            for _ in range(2)
        ]
        return await asyncio.gather(leader, *others)

    leader, *others = asyncio.run(three())
    assert leader.rejected == ["A second task at 127.0.0.1 is worker 1, too"]
    assert sorted(bool(one.facts) for one in others) == [False, True]


def _slow(duration_s: float) -> dict[str, Any]:
    import time

    time.sleep(duration_s)
    return _facts(0)


# Tables of made-up surveys: directions, missing values, and what is left out.


def _shown(survey: Survey) -> dict[str, list[list[str]]]:
    """Cells of each table, by its title."""
    found: dict[str, list[list[str]]] = {}
    for table in survey_tables(survey):
        console = Console(width=120, record=True, file=io.StringIO())
        console.print(table)
        lines = [line for line in console.export_text().splitlines() if line.startswith("│")]
        found[str(table.title)] = [
            [cell.strip() for cell in line.strip("│").split("│")] for line in lines
        ]
    return found


def _survey_of_tables(size: int = 2) -> Survey:
    survey = Survey([SurveyedHost(f"h{i}", f"h{i}") for i in range(size)])
    for one in range(size):
        for other in range(size):
            survey.free[one][other] = ("reached", "10.0.0.1") if one != other else None
    return survey


def test_rows_send_and_columns_receive() -> None:
    survey = _survey_of_tables()
    survey.bytes_per_s[0][1] = 2e9
    survey.round_trip_s[1][0] = 5e-4
    survey.offset_s, survey.uncertainty_s = [0.0, 0.25], [0.0, 1e-3]
    assert _shown(survey) == {
        "Bandwidth, MB/s": [["h0", "", "2000"], ["h1", "-", ""]],
        "Round trip, ms": [["h0", "", "-"], ["h1", "0.50", ""]],
        "Clocks": [["h1", "250.00", "1.00"]],
    }


def test_connections_are_shown_if_one_fails() -> None:
    survey = _survey_of_tables()
    assert _shown(survey) == {}
    survey.free[0][1] = ("timeout", "10.0.0.1")
    assert _shown(survey) == {"Free port": [["h0", "", "timeout"], ["h1", "reached", ""]]}


def test_many_hosts_have_no_matrix() -> None:
    survey = _survey_of_tables(13)
    survey.bytes_per_s[0][1] = 2e9
    survey.offset_s[:2] = [0.0, 0.0]
    assert list(_shown(survey)) == ["Clocks"]
    assert len(_shown(survey)["Clocks"]) == 12


# Hosts of a cluster's description.


def test_tasks_of_a_cluster_are_in_one_order() -> None:
    spec = ClusterSpec({"worker": ["b:1", "c:2"], "chief": ["a:3"]})
    resolver = SimpleClusterResolver(spec, task_type="worker", task_id=1)
    hosts = hosts_of(resolver)
    assert sorted(host.name for host in hosts) == ["chief 0", "worker 0", "worker 1"]
    index = own_index(resolver, hosts)
    assert index is not None
    assert hosts[index] == SurveyedHost("worker 1", "c", 2)


def test_process_without_a_task_has_no_index() -> None:
    resolver = SimpleClusterResolver(ClusterSpec({"worker": ["b:1", "c:2"]}))
    assert own_index(resolver, hosts_of(resolver)) is None


# Facts of this machine: versions, devices and problems, without those of the cluster.

_PROBE = Probe([{"platform": "cpu", "kind": "cpu", "process": 0, "memory_bytes": None}] * 2)


def test_facts_are_json_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_command, "probe_devices", lambda: _PROBE)
    monkeypatch.setenv("JAX_DISABLE_JIT", "true")
    monkeypatch.setenv("TF_CONFIG", "{")
    before = [
        Finding("cluster", Level.ERROR, "Another program.", "End it."),
        Finding("cluster", Level.OK, "Fine."),
    ]
    found = json.loads(json.dumps(gather_facts(before)))
    assert found["devices"] == "2 x cpu"
    assert found["versions"]["Python"] == platform.python_version()
    assert found["versions"]["jaxlib"] == importlib.metadata.version("jaxlib")
    texts = [one["text"] for one in found["findings"]]
    assert texts[0] == "Another program."
    assert any("JAX_DISABLE_JIT" in text for text in texts)
    assert not any("TF_CONFIG" in text or text == "Fine." for text in texts)


# A survey as JSON and back.


def test_json_has_all_of_a_survey() -> None:
    survey = Survey([SurveyedHost("a", "a", 1), SurveyedHost("b", "b", 2)], absent={1: "is away"})
    survey.facts[0] = {"versions": {"jax": "1"}}
    survey.free[0][1] = ("reached", "10.0.0.2")
    survey.bytes_per_s[0][1] = 1e9
    survey.owned[0] = {"10.0.0.1": True}
    survey.own_address[0] = "10.0.0.1"
    assert Survey.from_dict(json.loads(json.dumps(survey.as_dict()))) == survey
