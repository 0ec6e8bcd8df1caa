"""Program run in lockstep: as every task of a cluster, each on its own machine."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import types
from typing import Any

from stratagem.cluster.addresses import join_address, split_address
from stratagem.cluster.spec import ClusterSpec
from stratagem.group.authentication.secret import with_secret
from stratagem.launch.remote.jobs.job_plan import JobPlan
from stratagem.launch.remote.jobs.log_frames import FrameWriter
from stratagem.launch.remote.ray.ray_cluster import load_ray
from stratagem.launch.remote.ray.ray_nodes import resource_of_task
from stratagem.launch.remote.ray.ray_watch import RayWatch, watched_addresses
from stratagem.launch.remote.ray.task_actor import TaskActor, TaskMessage

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
