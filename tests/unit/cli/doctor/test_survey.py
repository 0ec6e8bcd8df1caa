"""Findings of made-up surveys: problems with their hosts, and a cluster without any."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from stratagem.cli.doctor.findings import Finding, Level
from stratagem.cli.doctor.survey import (
    Failure,
    Reason,
    Survey,
    SurveyedHost,
    check_survey,
    clock_offsets,
)

_VERSIONS = {"Python": "3.11.7", "jax": "0.10.2"}


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
    return Survey(
        hosts,
        failures=[],
        offset_s=[0.0] * size,
        uncertainty_s=[1e-4] * size,
    )


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


def test_sound_cluster_is_described_in_three_lines() -> None:
    findings = check_survey(_sound())
    assert [one.text for one in findings] == [
        "All 4 hosts reach each other, on free ports and on the ports of the cluster.",
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
    ("offset_s", "level"),
    [(0.4, None), (-0.6, Level.WARNING), (299.0, Level.WARNING), (-301.0, Level.ERROR)],
)
def test_skew_is_measured_against_its_uncertainty(offset_s: float, level: Level | None) -> None:
    survey = dataclasses.replace(_sound(2), offset_s=[0.0, offset_s])
    found = _problems(survey)
    assert [one.level for one in found] == ([] if level is None else [level])
    if level is not None:
        side = "ahead of" if offset_s > 0 else "behind"
        assert f"worker 1 is {abs(offset_s):.3f} s {side} worker 0's (±0.1 ms)" in found[0].text
        assert "chrony" in found[0].fix
    assert _problems(dataclasses.replace(survey, uncertainty_s=[0.0, abs(offset_s)])) == []


@pytest.mark.parametrize("seed", range(20))
def test_offset_of_a_clock_is_within_its_error_limits(seed: int) -> None:
    """Exchanges of made-up length, in which no process leaves before all have begun."""
    numbers = random.Random(seed)
    true_s = [0.0, *(numbers.uniform(-100, 100) for _ in range(3))]
    readings: list[list[tuple[float, float]]] = [[] for _ in true_s]
    now_s = 1000.0
    for _ in range(5):
        begun_s = [now_s + numbers.expovariate(50) for _ in true_s]
        ended_s = [max(begun_s) + numbers.expovariate(50) for _ in true_s]
        now_s = max(ended_s)
        for index, ahead_s in enumerate(true_s):
            readings[index].append((begun_s[index] + ahead_s, ended_s[index] + ahead_s))
    offsets_s, uncertainties_s = clock_offsets(readings)
    assert (offsets_s[0], uncertainties_s[0]) == (0.0, 0.0)
    for offset_s, uncertainty_s, ahead_s in zip(offsets_s, uncertainties_s, true_s, strict=True):
        assert abs(offset_s - ahead_s) <= uncertainty_s + 1e-6
        assert uncertainty_s < 0.2


def test_clock_that_is_set_meanwhile_has_an_offset() -> None:
    first = [(0.0, 0.1), (1.0, 1.1)]
    offsets_s, uncertainties_s = clock_offsets([first, [(0.0, 0.1), (61.0, 61.1)]])
    assert 0 < offsets_s[1] < 60
    assert uncertainties_s[1] == 0.0


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
    versions = {**_VERSIONS, name: version}
    kept = {one: text for one, text in versions.items() if text is not None}
    (finding,) = _problems(_with(_sound(), 3, versions=kept))
    assert finding.level is level
    assert f"{name} differs: " in finding.text
    assert finding.text.endswith(
        f" on worker 0, worker 1, worker 2; {version or 'missing'} on worker 3."
    )
    assert finding.fix.startswith(fix)


def test_other_devices_are_named() -> None:
    (finding,) = _problems(_with(_sound(2), 1, devices="7 x NVIDIA H100 (gpu)"))
    assert "8 x NVIDIA H100 (gpu) on worker 0; 7 x NVIDIA H100 (gpu) on worker 1" in finding.text


def test_other_variables_of_compiled_programs_are_named() -> None:
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
