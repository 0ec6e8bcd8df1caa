"""Detection of the environment and of the time it leaves."""

from __future__ import annotations

import time

import pytest

from stratagem.cluster.preemption.configuration import (
    name_of_environment,
    pod_time_left,
    slurm_time_left,
)


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "Kubernetes"),
        ({"SLURM_JOB_ID": "7"}, "Slurm"),
        ({"GCE_METADATA_IP": "169.254.169.254"}, "Google Cloud"),
        ({"GCE_METADATA_IP": "169.254.169.254", "SLURM_JOB_ID": "7"}, "Slurm"),
        (
            {"GCE_METADATA_IP": "169.254.169.254", "KUBERNETES_SERVICE_HOST": "10.0.0.1"},
            "Kubernetes",
        ),
    ],
)
def test_scheduler_stands_before_the_cloud(monkeypatch, variables, name) -> None:
    for variable, text in variables.items():
        monkeypatch.setenv(variable, text)
    assert name_of_environment() == name


def test_pod_uses_its_grace_period(monkeypatch) -> None:
    assert pod_time_left()() == 30.0
    monkeypatch.setenv("STRATAGEM_POD_GRACE_S", "120")
    assert pod_time_left()() == 120.0
    assert pod_time_left(90)() == 90.0


@pytest.mark.parametrize("grace_s", [0, -3.0, float("inf"), float("nan")])
def test_pod_without_time_is_refused(grace_s) -> None:
    with pytest.raises(ValueError, match=rf"A pod's grace_s={grace_s!r} is out of range"):
        pod_time_left(grace_s)


def test_pod_whose_variable_is_no_time_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_POD_GRACE_S", "2m")
    with pytest.raises(ValueError, match="STRATAGEM_POD_GRACE_S: '2m' is not a time limit"):
        pod_time_left()


def test_slurm_job_has_the_time_until_its_limit(monkeypatch) -> None:
    assert slurm_time_left() is None
    end_s = int(time.time()) + 500
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(end_s))
    left = slurm_time_left()
    assert left is not None
    before_s = time.time()
    left_s = left()
    assert end_s - time.time() <= left_s <= end_s - before_s
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1000")
    over = slurm_time_left()
    assert over is not None
    assert over() == 0.0


def test_end_of_a_slurm_job_that_is_no_time_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", "UNLIMITED")
    with pytest.raises(ValueError, match="SLURM_JOB_END_TIME='UNLIMITED' is not a time"):
        slurm_time_left()
