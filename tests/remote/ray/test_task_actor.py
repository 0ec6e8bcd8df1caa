"""What runs in the actor of a task."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from stratagem.remote.ray.task_actor import Said, TaskActor
from tests.remote.living import wait_for_end


@pytest.fixture
def actor() -> Iterator[TaskActor]:
    with contextlib.closing(TaskActor("10.0.0.7")) as made:
        yield made


def _all_said(actor: TaskActor) -> list[Said]:
    said: list[Said] = []
    while not said or said[-1][0] != "end":
        said += actor.next(0.2)
    return said


def test_place_is_a_free_port_of_its_machine(actor) -> None:
    host, port = actor.place()
    assert host == "10.0.0.7"
    assert 0 < port < 65536


def test_task_says_what_it_prints_and_how_it_ends(actor, monkeypatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "of the actor")
    monkeypatch.setenv("TF_CONFIG", "of the machine")
    program = (
        "import os, sys\n"
        "open(sys.argv[1], 'w').write('42')\n"
        "print(os.environ.get('RAY_ADDRESS'), os.environ['TF_CONFIG'], os.environ['HOME'] != '')\n"
        "sys.exit(3)\n"
    )
    actor.start(("-c", program, "{answer}"), {"TF_CONFIG": "of the job"})
    *said, end = _all_said(actor)
    assert {kind for kind, _ in said} == {"out"}
    assert "".join(text for _, text in said) == "None of the job True\n"
    assert end == ("end", "3")
    assert actor.answer() == b"42"


def test_task_without_an_answer_has_none(actor) -> None:
    actor.start(("-c", ""), {})
    assert _all_said(actor) == [("end", "0")]
    assert actor.answer() == b""


def test_closed_actor_ends_its_process(actor) -> None:
    actor.start(("-uc", "import os, time; print(os.getpid()); time.sleep(100)"), {})
    said: list[Said] = []
    while not said:
        said = actor.next(1.0)
    pid = int(said[0][1])
    os.kill(pid, 0)
    actor.close()
    assert wait_for_end([pid]) == set()
