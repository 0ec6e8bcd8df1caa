"""Tasks of one cluster on this machine: they join, are refused, or find no leader."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import warnings
from typing import Any

import pytest

from stratagem.cli.doctor.network.joining import survey_as_task
from stratagem.cli.doctor.network.survey import Survey, SurveyedHost, SurveySettings
from stratagem.launch.plan.ports import free_ports

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
