"""The program of a job: it runs the client's command, and reports its output, answer and end."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from stratagem.launch.remote.jobs import job
from stratagem.launch.remote.jobs.job_log import FrameReader, verified
from stratagem.launch.remote.jobs.lockstep import JobPlan, answer_key


def own_python() -> str:
    return ".".join(map(str, sys.version_info[:2]))


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        ({}, ""),
        ({"worker": ["a:1"]}, {"cluster": {"worker": ["a:1"]}}),
        (
            {"chief": ["a:1"], "ps": ["b:1"]},
            {
                "cluster": {"chief": ["a:1"], "ps": ["b:1"]},
                "task": {"type": "chief", "index": 0},
            },
        ),
    ],
    ids=["no cluster", "workers", "chief"],
)
def test_program_on_the_head_is_the_chief_of_its_cluster(cluster, expected) -> None:
    plan = JobPlan(nonce="n0", command=("-c", ""), cluster=cluster)
    config = job._config(plan)
    assert (json.loads(config) if config else config) == expected


def test_message_about_another_python_names_both_versions() -> None:
    text = job._other_python("3.99", own_python())
    assert "The client has Python 3.99, but this cluster has Python " + own_python() in text
    assert "\nExpected the same version" in text


def frames_of(plan: JobPlan) -> tuple[int, list[tuple[str, str]]]:
    """Runs a job, and returns its exit code and what its frames report."""
    command = [sys.executable, "-m", "stratagem.launch.remote.jobs.job", plan.to_json()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    reader = FrameReader(plan.nonce)
    return done.returncode, [(frame.kind, frame.text) for frame in reader.feed(done.stdout)]


def test_program_reports_its_output_answer_and_exit_code() -> None:
    program = (
        "import os, sys; open(sys.argv[1], 'wb').write(b'4 2'); print(os.environ['TF_CONFIG']);"
        "sys.exit(3)"
    )
    plan = JobPlan(nonce="n0", command=("-c", program, "{answer}"), cluster={"worker": ["a:1"]})
    code, frames = frames_of(plan)
    texts: dict[str, str] = {}
    for kind, text in frames:
        texts[kind] = texts.get(kind, "") + text
    assert (code, texts["end"]) == (3, "3")
    assert json.loads(texts["out"]) == {"cluster": {"worker": ["a:1"]}}
    assert verified(texts["answer"], answer_key("n0")) == b"4 2"
    assert frames[-1][0] == "end"


def test_another_python_is_refused_before_the_program_starts() -> None:
    code, frames = frames_of(JobPlan(nonce="n0", command=("-c", "print(1)"), python="2.7"))
    assert code == 1
    assert [kind for kind, _ in frames] == ["note", "end"]
    assert "The client has Python 2.7" in frames[0][1]


def test_program_sends_heartbeats() -> None:
    plan = JobPlan(nonce="n0", command=("-c", "import time; time.sleep(1)"), heartbeat_s=0.02)
    _, frames = frames_of(plan)
    assert frames.count(("heartbeat", "")) >= 3
    assert ("heartbeat", "") not in frames_of(JobPlan(nonce="n0", command=("-c", "")))[1]
