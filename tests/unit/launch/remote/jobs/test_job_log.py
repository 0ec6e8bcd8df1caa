"""Log of a job, followed by its client."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stratagem.errors import UnavailableError
from stratagem.launch.remote.jobs import job_log
from stratagem.launch.remote.jobs.job_log import FrameWriter, JobOutput, JobResult, follow
from stratagem.launch.remote.jobs.jobs_client import JobState


class Logged:
    """A job whose log is known; each reading of it is one of `readings`, None breaks off."""

    def __init__(self, readings: list[list[str | None]], *states: JobState | None) -> None:
        self.readings = readings
        self.states = list(states)
        self.machines: list[dict[str, float]] = [{"CPU": 1.0}]

    def resources(self) -> list[dict[str, float]]:
        return self.machines

    def state(self, job: str) -> JobState:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if state is None:
            raise UnavailableError("nobody there")
        return state

    async def log(self, job: str) -> AsyncIterator[str]:
        for text in self.readings.pop(0) if self.readings else []:
            if text is None:
                raise UnavailableError("broken")
            yield text


def _log(path: Path, *frames: tuple[str, str, str]) -> str:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    writer = FrameWriter("n", descriptor)
    for kind, text, task in frames:
        writer.write(kind, text, task)
    os.close(descriptor)
    return path.read_text()


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr(job_log, "_RETRY_S", 0.01)


def test_output_answer_and_exit_code_arrive(tmp_path, capsys) -> None:
    text = _log(
        tmp_path / "log",
        *(("started", "", ""), ("out", "1\r2\n", ""), ("err", "careful\n", "")),
        *(("note", "the client is late", ""), ("answer", "abc", ""), ("end", "-9", "")),
    )
    jobs = Logged([[text]], JobState("RUNNING"))
    assert follow(jobs, "job", "n", JobOutput([])) == JobResult(-9, "abc", "the client is late")
    printed = capsys.readouterr()
    assert printed.out == "1\r2\n"
    assert printed.err == "careful\nthe client is late\n"


def test_lines_of_several_tasks_have_their_names(tmp_path, capsys) -> None:
    text = _log(
        tmp_path / "log",
        *(("started", "", ""), ("out", "a1", "worker 0"), ("out", "b\n", "worker 1")),
        *(("out", "a2\nrest", "worker 0"), ("err", "oh\n", "worker 1"), ("end", "0", "")),
    )
    jobs = Logged([[text]], JobState("RUNNING"))
    follow(jobs, "job", "n", JobOutput(["worker 0", "worker 1"]))
    printed = capsys.readouterr()
    assert printed.out == "[worker 1] b\n[worker 0] a1a2\n[worker 0] rest\n"
    assert printed.err == "[worker 1] oh\n"


def test_log_is_read_again_where_the_connection_broke(tmp_path, capsys) -> None:
    text = _log(tmp_path / "log", ("started", "", ""), ("out", "once\n", ""), ("end", "0", ""))
    cut = text.index("once") + 2
    jobs = Logged(
        [[text[:cut], None], [None], [text]], JobState("RUNNING"), None, JobState("RUNNING")
    )
    assert follow(jobs, "job", "n", JobOutput([])) == JobResult(0, "", "")
    assert capsys.readouterr().out == "once\n"


def test_job_can_be_left() -> None:
    jobs = Logged([["Runtime env"]], JobState("RUNNING"))
    assert follow(jobs, "job", "n", JobOutput([]), lambda: True) is None


def test_job_that_was_stopped_has_an_exit_code(tmp_path) -> None:
    jobs = Logged([["Runtime env"]], JobState("STOPPED"))
    assert follow(jobs, "job", "n", JobOutput([])) == JobResult(1, "", "")


def test_program_that_cannot_be_started_says_why() -> None:
    jobs = Logged(
        [["Runtime env is setting up.\nNo module named stratagem\n"]], JobState("FAILED", "m", 1)
    )
    with pytest.raises(UnavailableError, match="could not start the program") as raised:
        follow(jobs, "job", "n", JobOutput([]))
    assert "No module named stratagem" in str(raised.value)


def test_cluster_that_is_silent_for_too_long_is_lost(monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "0.05")
    jobs = Logged([[None]] * 1000, None)
    with pytest.raises(UnavailableError, match="has not responded about job job") as raised:
        follow(jobs, "job", "n", JobOutput([]))
    assert "STRATAGEM_PEER_TIMEOUT_S" in str(raised.value)


def test_connection_that_breaks_after_a_long_silence_is_tried_again(monkeypatch, tmp_path) -> None:
    """The job printed nothing for longer than the limit, but its log was connected."""
    text = _log(tmp_path / "log", ("started", "", ""), ("end", "0", ""))

    class Silent(Logged):
        async def log(self, job: str) -> AsyncIterator[str]:
            yield ""
            if len(self.states) > 1:
                await asyncio.sleep(0.6)
                raise UnavailableError("the leader's proxy was restarted")
            yield text

    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "0.5")
    jobs = Silent([], None, JobState("RUNNING"))
    assert follow(jobs, "job", "n", JobOutput([])) == JobResult(0, "", "")


def test_other_errors_of_the_connection_are_raised_here() -> None:
    class Broken(Logged):
        async def log(self, job: str) -> AsyncIterator[str]:
            raise ImportError("no aiohttp")
            yield ""

    with pytest.raises(ImportError, match="no aiohttp"):
        follow(Broken([], JobState("RUNNING")), "job", "n", JobOutput([]))


@pytest.mark.parametrize(
    ("reading", "status", "machines", "join_s"),
    [
        ([""], "RUNNING", [{"CPU": 1.0}], 60),
        ([None], "RUNNING", [{"CPU": 1.0}], 60),
        (["", None], "RUNNING", [{"CPU": 1.0}], 60),
        ([""], "PENDING", [], 60),
        ([None], "PENDING", [{"CPU": 1.0}], 0.2),
    ],
    ids=["ends", "fails", "breaks", "no machine", "never started"],
)
def test_job_that_only_the_head_knows_is_lost(
    monkeypatch, reading, status, machines, join_s
) -> None:
    """The head goes on answering when the machine that would end the job is gone."""
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "0.3")
    monkeypatch.setenv("STRATAGEM_JOIN_TIMEOUT_S", str(join_s))
    jobs = Logged([reading] * 10_000, JobState(status))
    jobs.machines = machines
    with pytest.raises(UnavailableError, match=r"has not responded about job job for 0\.3 s"):
        follow(jobs, "job", "n", JobOutput([]))


def test_job_that_starts_late_is_waited_for(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "0.05")
    text = _log(tmp_path / "log", ("started", "", ""), ("end", "0", ""))
    jobs = Logged([[None]] * 20 + [[text]], JobState("PENDING"))
    assert follow(jobs, "job", "n", JobOutput([])) == JobResult(0, "", "")


class Quiet(Logged):
    """A job whose log stays open and says nothing, since the head's source of it is gone."""

    async def log(self, job: str) -> AsyncIterator[str]:
        for text in self.readings.pop(0) if self.readings else [""]:
            assert text is not None
            yield text
        await asyncio.sleep(60.0)


def test_end_of_a_job_with_a_quiet_log_is_noticed(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "0.05")
    text = _log(tmp_path / "log", ("started", "", ""))
    jobs = Quiet([[text]], JobState("RUNNING"), JobState("FAILED", "the node died", 1))
    assert follow(jobs, "job", "n", JobOutput([])) == JobResult(1, "", "")


@pytest.mark.parametrize("state", [JobState("RUNNING"), None], ids=["no machine", "no answer"])
def test_quiet_log_of_a_cluster_without_machines_is_lost(monkeypatch, tmp_path, state) -> None:
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "0.3")
    jobs = Quiet([[_log(tmp_path / "log", ("started", "", ""))]], state)
    jobs.machines = []
    with pytest.raises(UnavailableError, match=r"has not responded about job job for 0\.3 s"):
        follow(jobs, "job", "n", JobOutput([]))


def test_quiet_log_of_a_running_job_is_followed(monkeypatch, tmp_path) -> None:
    text = _log(tmp_path / "log", ("started", "", ""), ("end", "0", ""))

    class Late(Logged):
        num_readings = 0

        async def log(self, job: str) -> AsyncIterator[str]:
            self.num_readings += 1
            yield text[:-2]
            await asyncio.sleep(1.0)
            yield text[-2:]

    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "0.05")
    jobs = Late([], JobState("RUNNING"))
    assert follow(jobs, "job", "n", JobOutput([])) == JobResult(0, "", "")
    assert jobs.num_readings == 1


def test_program_that_was_stopped_is_lost(monkeypatch, tmp_path) -> None:
    """Its cluster answers, and its machine is there."""
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "0.2")
    text = _log(tmp_path / "log", ("heartbeat", "", ""), ("started", "", ""), ("out", "1\n", ""))
    jobs = Quiet([[text]], JobState("RUNNING"))
    with pytest.raises(UnavailableError, match=r"no heartbeat for 0\.4 s") as raised:
        follow(jobs, "job", "n", JobOutput([]))
    assert "twice STRATAGEM_PEER_TIMEOUT_S" in str(raised.value)


def test_heartbeats_are_no_output(tmp_path, capsys) -> None:
    text = _log(tmp_path / "log", ("heartbeat", "", ""), ("heartbeat", "", ""), ("end", "0", ""))
    follow(Logged([[text]], JobState("RUNNING")), "job", "n", JobOutput([]))
    assert capsys.readouterr() == ("", "")
