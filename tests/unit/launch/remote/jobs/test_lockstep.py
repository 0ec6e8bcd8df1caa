"""Program run as several tasks; actors are objects of this process, called in threads."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from stratagem.launch.remote.jobs import lockstep
from stratagem.launch.remote.jobs.job_log import FrameReader, FrameWriter, LogFrame
from stratagem.launch.remote.jobs.lockstep import JobPlan, run_in_lockstep


class RayError(Exception):
    """As Ray's own."""


class Actor:
    """An object whose methods are called elsewhere."""

    def __init__(self, made: Any, pool: concurrent.futures.Executor, options: Any) -> None:
        self.made = made
        self.options = options
        self.is_lost = False
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if self.is_lost:
                raise RayError("the node died")
            return getattr(self.made, name)(*arguments)

        return types.SimpleNamespace(remote=lambda *arguments: self._pool.submit(call, *arguments))


class FakeRay:
    """What of Ray is used."""

    exceptions = types.SimpleNamespace(RayError=RayError)

    def __init__(self, pool: concurrent.futures.Executor) -> None:
        self.actors: list[Actor] = []
        self.killed: list[Actor] = []
        self._pool = pool

    def init(self, **options: Any) -> None:
        self.options = options

    def remote(self, kind: Any) -> Any:
        def make(options: Any, *arguments: Any) -> Actor:
            self.actors.append(Actor(kind(*arguments), self._pool, options))
            return self.actors[-1]

        return types.SimpleNamespace(
            options=lambda **options: types.SimpleNamespace(
                remote=lambda *arguments: make(options, *arguments)
            )
        )

    def get(self, asked: Any, timeout: float | None = None) -> Any:
        many = asked if isinstance(asked, list) else [asked]
        got = [one.result(timeout or 30.0) for one in many]
        return got if isinstance(asked, list) else got[0]

    def wait(self, asked: list[Any], num_returns: int, timeout: float) -> Any:
        when = concurrent.futures.FIRST_COMPLETED
        if num_returns > 1:
            when = concurrent.futures.ALL_COMPLETED
        done, rest = concurrent.futures.wait(asked, timeout, when)
        return list(done), list(rest)

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor)


@pytest.fixture
def fake_ray(monkeypatch):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        made = FakeRay(pool)
        monkeypatch.setattr(lockstep, "load_ray", lambda: made)
        monkeypatch.setattr(lockstep, "watched_addresses", dict)
        yield made


def _plan(program: str) -> JobPlan:
    return JobPlan(
        nonce="n",
        command=("-uc", program, "{answer}"),
        cluster={"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]},
        tasks=(("chief", 0), ("worker", 0)),
        head="127.0.0.1:1",
    )


def _run(
    plan: JobPlan, path: Path, is_over: threading.Event | None = None
) -> tuple[tuple[int, bytes], list[LogFrame]]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    frames = FrameWriter("n", descriptor)
    try:
        ended = run_in_lockstep(plan, frames, is_over or threading.Event())
    finally:
        os.close(descriptor)
    return ended, list(FrameReader("n").feed(path.read_text()))


_NAMES = ("chief 0", "worker 0")
_CONFIG = """
import json, os, sys
config = json.loads(os.environ["TF_CONFIG"])
print(json.dumps(config), flush=True)
open(sys.argv[1], "w").write(config["task"]["type"])
"""


def test_answer_is_that_of_the_task_that_is_named(fake_ray, tmp_path) -> None:
    plan = dataclasses.replace(_plan(_CONFIG), answers=("worker", 0))
    (code, answer), _ = _run(JobPlan.from_json(plan.to_json()), tmp_path / "log")
    assert (code, answer) == (0, b"worker")


def test_each_task_has_its_place_in_a_cluster_of_free_ports(fake_ray, tmp_path) -> None:
    (code, answer), frames = _run(_plan(_CONFIG), tmp_path / "log")
    assert (code, answer) == (0, b"chief")
    assert frames[0].kind == "started"
    printed = {name: "".join(f.text for f in frames if f.task == name) for name in _NAMES}
    configs = {name: json.loads(text) for name, text in printed.items()}
    assert configs["chief 0"]["task"] == {"type": "chief", "index": 0}
    assert configs["worker 0"]["task"] == {"type": "worker", "index": 0}
    clusters = [config["cluster"] for config in configs.values()]
    assert clusters[0] == clusters[1]
    ports = {int(one[0].rpartition(":")[2]) for one in clusters[0].values()}
    assert len(ports) == 2
    assert not {1, 2} & ports
    assert [actor.options["resources"] for actor in fake_ray.actors] == [
        {"chief:0": 1},
        {"worker:0": 1},
    ]
    assert fake_ray.killed == fake_ray.actors
    assert fake_ray.options["address"] == "127.0.0.1:1"


def test_first_failure_ends_all(fake_ray, tmp_path) -> None:
    program = (
        "import os, sys, time\n"
        "if 'type\": \"worker' in os.environ['TF_CONFIG']:\n"
        "    open(sys.argv[1], 'w').write('why')\n"
        "    sys.exit(9)\n"
        "time.sleep(100)\n"
    )
    ended, _ = _run(_plan(program), tmp_path / "log")
    assert ended == (9, b"why")


def test_job_that_is_over_ends_its_tasks(fake_ray, tmp_path) -> None:
    is_over = threading.Event()
    is_over.set()
    (code, answer), _ = _run(_plan("import time; time.sleep(100)"), tmp_path / "log", is_over)
    assert (code, answer) == (-15, b"")


def test_lost_machine_is_a_failure_of_its_task(fake_ray, tmp_path, monkeypatch) -> None:
    class LostLater(lockstep.TaskActor):
        def next(self, timeout_s: float) -> Any:
            fake_ray.actors[1].is_lost = True
            return super().next(timeout_s)

    monkeypatch.setattr(lockstep, "TaskActor", LostLater)
    ended, frames = _run(_plan("import time; time.sleep(100)"), tmp_path / "log")
    fake_ray.actors[1].made.close()
    assert ended == (1, b"")
    assert "The machine of worker 0 was lost: the node died" in frames[-1].text


def test_lost_ray_ends_the_job_with_its_error(fake_ray, tmp_path, monkeypatch) -> None:
    class LostAtOnce(contextlib.nullcontext):
        def __init__(self, addresses: Any, on_lost: Any) -> None:
            super().__init__()
            on_lost(RuntimeError(f"Ray's GCS is lost: {addresses}"))

    monkeypatch.setattr(lockstep, "RayWatch", LostAtOnce)
    monkeypatch.setattr(lockstep, "watched_addresses", lambda: {"GCS": "a:1"})
    ended, frames = _run(_plan("import time; time.sleep(100)"), tmp_path / "log")
    for actor in fake_ray.actors:
        actor.made.close()
    assert ended == (1, b"")
    assert frames[-1].text == "Ray's GCS is lost: {'GCS': 'a:1'}\n"
    assert fake_ray.killed == []  # Ray would not answer
