"""Findings of made-up surveys: problems with their hosts, and a cluster without any."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from stratagem.cli.doctor.network.findings import check_survey
from stratagem.cli.doctor.network.probes import Reason
from stratagem.cli.doctor.network.survey import Survey, SurveyedHost
from stratagem.cli.doctor.settings import Finding, Level

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


@pytest.mark.parametrize(
    ("reason", "login", "fix"),
    [
        ("did not answer within 60 s", "", "start stratagem doctor --cluster there"),
        ("did not answer within 60 s", "me@host1", "try ssh me@host1; --wait changes the limit"),
        ("runs no agent: me@host1: Permission denied (publickey).", "me@host1", "ssh-copy-id me"),
        ("runs no agent: Host key verification failed.", "me@host1", "accept its key"),
        ("runs no agent: No module named stratagem", "me@host1", "--python"),
        ("runs no agent: sh: 1: /x/python: not found", "me@host1", "--python"),
    ],
)
def test_absent_host_is_named_with_the_remedy(reason: str, login: str, fix: str) -> None:
    survey = Survey(
        [SurveyedHost("a", "a"), SurveyedHost("host1", "host1", None, login)], absent={1: reason}
    )
    (finding,) = _problems(survey)
    assert finding.text.startswith(f"host1 {reason}")
    assert fix in finding.fix


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
