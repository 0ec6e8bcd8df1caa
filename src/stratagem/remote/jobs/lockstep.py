"""A program as every task of a cluster, each on its own machine, in lockstep."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Iterator
from typing import Any

from stratagem.cluster import ClusterSpec
from stratagem.cluster.addresses import join_address, split_address
from stratagem.remote.jobs.job_plan import JobPlan
from stratagem.remote.jobs.log_frames import FrameWriter
from stratagem.remote.ray.ray_cluster import load_ray
from stratagem.remote.ray.ray_nodes import resource_of_task
from stratagem.remote.ray.task_actor import TaskActor

__all__ = ["run_in_lockstep"]

_POLL_S = 0.5
_CLOSING_S = 15.0
# A failure of one is soon one of all; which was first is known by then.
_FAILED = 1


@dataclasses.dataclass(eq=False)
class _Task:
    """One task."""

    kind: str
    index: int
    actor: Any
    asked: Any = None
    code: int | None = None

    @property
    def name(self) -> str:
        return f"{self.kind} {self.index}"


def run_in_lockstep(
    plan: JobPlan, frames: FrameWriter, is_over: threading.Event
) -> tuple[int, bytes]:
    """Runs the program of a job as each of its tasks.

    Args:
        plan: the job's.
        frames: where it tells.
        is_over: ends it.

    Returns:
        The exit code of the task that failed first, or 0; and the answer of that task, or of the
        one that the plan names, or of the first task of all.
    """
    ray = load_ray()
    ray.init(address=plan.head or None, logging_level="error", log_to_driver=False)
    with contextlib.closing(_Tasks(ray, plan)) as tasks:
        tasks.start(plan)
        frames.write("started", "")
        failed = tasks.follow(frames, is_over)
        chosen = failed or tasks.named(plan.answers)
        return (failed.code or _FAILED) if failed else 0, tasks.answer_of(chosen)


class _Tasks:
    """All tasks of a job."""

    def __init__(self, ray: Any, plan: JobPlan) -> None:
        self._ray = ray
        actor_class = ray.remote(TaskActor)
        spec = ClusterSpec(plan.cluster)
        self.all = [
            _Task(
                kind,
                index,
                actor_class.options(
                    num_cpus=0,
                    resources={resource_of_task(kind, index): 1},
                    max_concurrency=2,
                ).remote(split_address(spec.task_address(kind, index))[0]),
            )
            for kind, index in plan.tasks
        ]

    def start(self, plan: JobPlan) -> None:
        """Starts all, each with the places of all: Ray itself listens at that of the leader."""
        places = self._ray.get([task.actor.place.remote() for task in self.all])
        cluster: dict[str, dict[int, str]] = {}
        for task, (host, port) in zip(self.all, places, strict=True):
            cluster.setdefault(task.kind, {})[task.index] = join_address(host, port)
        jobs = ClusterSpec(cluster).as_dict()
        self._ray.get(
            [
                task.actor.start.remote(
                    plan.command,
                    {
                        **plan.variables(),
                        "TF_CONFIG": json.dumps(
                            {"cluster": jobs, "task": {"type": task.kind, "index": task.index}}
                        ),
                    },
                )
                for task in self.all
            ]
        )

    def follow(self, frames: FrameWriter, is_over: threading.Event) -> _Task | None:
        """Tells what the tasks say until all have ended, or one has failed; returns that one."""
        for task in self.all:
            task.asked = task.actor.next.remote(_POLL_S)
        while waited := [task.asked for task in self.all if task.code is None]:
            if is_over.is_set():
                self._end()
            ready, _ = self._ray.wait(waited, num_returns=1, timeout=_POLL_S)
            for task in self._asked(ready):
                for kind, text in self._said(task):
                    if kind == "end":
                        task.code = int(text)
                    else:
                        frames.write(kind, text, task.name)
                if task.code:
                    return task
                if task.code is None:
                    task.asked = task.actor.next.remote(_POLL_S)
        return None

    def named(self, name: tuple[str, int] | None) -> _Task:
        """Returns the task of a type and index; the first one for None."""
        return next(one for one in self.all if name in (None, (one.kind, one.index)))

    def answer_of(self, task: _Task) -> bytes:
        """Returns what a task has written as its answer."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            return bytes(self._ray.get(task.actor.answer.remote(), timeout=_CLOSING_S))
        return b""

    def close(self) -> None:
        """Ends those that still run."""
        self._end()
        for task in self.all:
            self._ray.kill(task.actor)

    def _end(self) -> None:
        closing = [task.actor.close.remote() for task in self.all]
        self._ray.wait(closing, num_returns=len(closing), timeout=_CLOSING_S)

    def _asked(self, ready: list[Any]) -> Iterator[_Task]:
        return (task for task in self.all if task.asked in ready)

    def _said(self, task: _Task) -> list[tuple[str, str]]:
        try:
            return self._ray.get(task.asked)
        except self._ray.exceptions.RayError as error:
            return [("err", f"The machine of {task.name} was lost: {error}\n"), ("end", "1")]
