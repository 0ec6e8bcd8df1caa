"""Program run in lockstep: as every task of a cluster, each on its own machine."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import types
from collections.abc import Mapping
from typing import Any

from stratagem.cluster.addresses import join_address, split_address
from stratagem.cluster.spec import ClusterSpec
from stratagem.group.authentication.secret import with_secret
from stratagem.launch.remote.jobs.job_log import FrameWriter
from stratagem.launch.remote.ray.ray_cluster import (
    RayWatch,
    load_ray,
    read_token,
    watched_addresses,
)
from stratagem.launch.remote.ray.ray_nodes import resource_of_task
from stratagem.launch.remote.ray.streamed_process import TaskActor, TaskMessage

# Plan of a job, sent as JSON in the job's command.

JOB_VARIABLE = "STRATAGEM_REMOTE_JOB"
"""Environment variable of programs that a client has sent: the nonce of their job."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobPlan:
    """Program, tasks and limits of a job.

    In `command`, arguments for this Python, "{answer}" stands for the answer file. `nonce` is a
    random number that only client and job share. An empty `cluster` is a plain Ray cluster; without
    `tasks` one process runs on the head. An empty `head` or `url` (where the head accepts jobs)
    asks Ray. The job continues for `lease_s` without its client, or forever if None; it sends a
    heartbeat every `heartbeat_s`, or none if None. `answers` is the task whose answer is returned
    unless another fails, None for the first. `python` is the version that a pickled function needs,
    such as "3.11"; "" for any.
    """

    nonce: str
    command: tuple[str, ...]
    cluster: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tasks: tuple[tuple[str, int], ...] = ()
    head: str = ""
    url: str = ""
    lease_s: float | None = None
    heartbeat_s: float | None = None
    answers: tuple[str, int] | None = None
    python: str = ""

    def to_json(self) -> str:
        """Returns the plan as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> JobPlan:
        """Parses the result of `to_json`."""
        content: dict[str, Any] = json.loads(text)
        content["command"] = tuple(content["command"])
        content["tasks"] = tuple((kind, index) for kind, index in content["tasks"])
        content["answers"] = tuple(content["answers"]) if content["answers"] else None
        return cls(**content)

    def variables(self) -> dict[str, str]:
        """Returns the environment variables of each process of the program."""
        found = {JOB_VARIABLE: self.nonce, "PYTHONUNBUFFERED": "1"}
        return {**found, "RAY_ADDRESS": self.head} if self.head else found


def answer_key(nonce: str) -> bytes:
    """Returns the key with which a job signs its answer."""
    return f"{read_token()} {nonce}".encode()


_POLL_S = 0.5
_CLOSING_S = 15.0


@dataclasses.dataclass(eq=False)
class _JobTask:
    task_type: str
    index: int
    actor: Any
    pending: Any = None  # Ray's reference to the next messages
    code: int | None = None

    @property
    def name(self) -> str:
        return f"{self.task_type} {self.index}"


def run_in_lockstep(
    plan: JobPlan, frames: FrameWriter, is_over: threading.Event
) -> tuple[int, bytes]:
    """Runs the program of a job as each of its tasks, until they end or `is_over` is set.

    Returns the exit code of the task that failed first, or 0; and the answer of that task, or of
    the task in `plan.answers`.
    """
    ray = load_ray()
    ray.init(address=plan.head or None, logging_level="error", log_to_driver=False)
    with contextlib.closing(_JobTasks(ray, plan)) as tasks:
        tasks.start(plan)
        frames.write("started", "")
        with RayWatch(watched_addresses(), tasks.lose_ray):
            failed = tasks.follow(frames, is_over)
        task = failed or tasks.find(plan.answers)
        return (failed.code or 1) if failed else 0, tasks.answer_of(task)


class _JobTasks:
    """All tasks of a job."""

    def __init__(self, ray: types.ModuleType, plan: JobPlan) -> None:
        self._ray = ray
        actor_class = ray.remote(TaskActor)
        spec = ClusterSpec(plan.cluster)
        self._tasks = [
            _JobTask(
                task_type,
                index,
                actor_class.options(
                    num_cpus=0,
                    resources={resource_of_task(task_type, index): 1},
                    max_concurrency=2,
                ).remote(split_address(spec.task_address(task_type, index))[0]),
            )
            for task_type, index in plan.tasks
        ]
        self._loss: Exception | None = None

    def lose_ray(self, error: Exception) -> None:
        """Ends `follow` with an error. Call from any thread."""
        self._loss = error

    def start(self, plan: JobPlan) -> None:
        """Starts all tasks, at free ports: Ray itself listens at the address of the leader."""
        addresses = self._ray.get([task.actor.free_address.remote() for task in self._tasks])
        cluster: dict[str, dict[int, str]] = {}
        for task, (host, port) in zip(self._tasks, addresses, strict=True):
            cluster.setdefault(task.task_type, {})[task.index] = join_address(host, port)
        jobs = ClusterSpec(cluster).as_dict()
        starts: list[Any] = []
        shared = with_secret(plan.variables())
        for task in self._tasks:
            config = {"cluster": jobs, "task": {"type": task.task_type, "index": task.index}}
            variables = {**shared, "TF_CONFIG": json.dumps(config)}
            starts.append(task.actor.start.remote(plan.command, variables))
        self._ray.get(starts)

    def follow(self, frames: FrameWriter, is_over: threading.Event) -> _JobTask | None:
        """Writes the output of the tasks until all end, or one fails; returns that task or None."""
        for task in self._tasks:
            task.pending = task.actor.next.remote(_POLL_S)
        while pending := [task.pending for task in self._tasks if task.code is None]:
            if is_over.is_set():
                self._end()
            if self._loss is not None:
                frames.write("err", f"{self._loss}\n")
                lost = self._tasks[0]
                lost.code = 1
                return lost
            ready, _ = self._ray.wait(pending, num_returns=1, timeout=_POLL_S)
            for task in [task for task in self._tasks if task.pending in ready]:
                for kind, text in self._messages(task):
                    if kind == "end":
                        task.code = int(text)
                    else:
                        frames.write(kind, text, task.name)
                if task.code:
                    return task
                if task.code is None:
                    task.pending = task.actor.next.remote(_POLL_S)
        return None

    def find(self, name: tuple[str, int] | None) -> _JobTask:
        """Returns the task of this type and index; the first one for None."""
        return next(one for one in self._tasks if name in (None, (one.task_type, one.index)))

    def answer_of(self, task: _JobTask) -> bytes:
        """Returns the answer that a task has written, or b""."""
        if self._loss is not None:
            return b""
        with contextlib.suppress(self._ray.exceptions.RayError):
            return bytes(self._ray.get(task.actor.answer.remote(), timeout=_CLOSING_S))
        return b""

    def close(self) -> None:
        """Ends the tasks that still run; without Ray, they end with their actors."""
        if self._loss is not None:
            return
        self._end()
        for task in self._tasks:
            self._ray.kill(task.actor)

    def _end(self) -> None:
        closing = [task.actor.close.remote() for task in self._tasks]
        self._ray.wait(closing, num_returns=len(closing), timeout=_CLOSING_S)

    def _messages(self, task: _JobTask) -> list[TaskMessage]:
        try:
            return self._ray.get(task.pending)
        except self._ray.exceptions.RayError as error:
            return [("err", f"The machine of {task.name} was lost: {error}\n"), ("end", "1")]
