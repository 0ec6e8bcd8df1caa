"""Actor that runs one task."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from stratagem.launch.remote.ray.streamed_process import TaskActor, TaskMessage
from tests.unit.launch.remote.living import wait_for_end


@pytest.fixture
def actor() -> Iterator[TaskActor]:
    with contextlib.closing(TaskActor("10.0.0.7")) as made:
        yield made


def _all_messages(actor: TaskActor) -> list[TaskMessage]:
    found: list[TaskMessage] = []
    while not found or found[-1][0] != "end":
        found += actor.next(0.2)
    return found


def test_address_is_a_free_port_of_its_machine(actor) -> None:
    host, port = actor.free_address()
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
    *found, end = _all_messages(actor)
    assert {kind for kind, _ in found} == {"out"}
    assert "".join(text for _, text in found) == "None of the job True\n"
    assert end == ("end", "3")
    assert actor.answer() == b"42"


def test_task_without_an_answer_has_none(actor) -> None:
    actor.start(("-c", ""), {})
    assert _all_messages(actor) == [("end", "0")]
    assert actor.answer() == b""


def test_closed_actor_ends_its_process(actor) -> None:
    actor.start(("-uc", "import os, time; print(os.getpid()); time.sleep(100)"), {})
    found: list[TaskMessage] = []
    while not found:
        found = actor.next(1.0)
    pid = int(found[0][1])
    os.kill(pid, 0)
    actor.close()
    assert wait_for_end([pid]) == set()
