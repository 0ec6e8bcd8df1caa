"""`ClusterSpec`: the jobs of a cluster and the addresses of their tasks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from stratagem.errors import check_type, explain, invalid
from stratagem.logs import PublicDir, as_html, new_table

EXAMPLE = '{"worker": ["host0:2222", "host1:2222"]}'
_MAX_SHOWN = 32  # in a notebook


def parse_task_index(index: object) -> int:
    """Returns a task index as an int; `TF_CONFIG` may contain it as a string of digits.

    Raises TypeError for other types and ValueError for a negative or non-numeric index.
    """
    if isinstance(index, bool) or not isinstance(index, int | str):
        raise TypeError(
            explain(
                f"Task index {index!r} is of type {type(index).__name__}.",
                expected="an int, or a string of digits.",
                fix='pass 0 or "0" for the first task.',
            )
        )
    digits = index.strip() if isinstance(index, str) else str(index)
    if not (digits.isascii() and digits.isdecimal()):
        raise invalid(
            f"Task index {index!r} is invalid.",
            expected="an integer, 0 or more.",
            fix='number tasks from 0: 0 or "0" is the first.',
        )
    return int(digits)


@dataclasses.dataclass(frozen=True)
class JobDef:
    """A job of a `ClusterDef`.

    Args:
        name: name of the job, such as "worker".
        tasks: addresses by index.

    Example:
        >>> sg.ClusterSpec({"worker": ["a:1", "b:1"]}).as_cluster_def().job[0]
        JobDef(name='worker', tasks={0: 'a:1', 1: 'b:1'})

    Source: TF 2.21 core/protobuf/cluster.proto, JobDef.
    """

    name: str
    tasks: dict[int, str]


@dataclasses.dataclass(frozen=True)
class ClusterDef:
    """A cluster as plain data, with the fields of TensorFlow's protocol buffer.

    Args:
        job: the jobs, sorted by name.

    Example:
        >>> definition = sg.ClusterSpec({"chief": ["a:1"], "worker": ["b:1"]}).as_cluster_def()
        >>> [job.name for job in definition.job], sg.ClusterSpec(definition).job_tasks("worker")
        (['chief', 'worker'], ['b:1'])

    Source: TF 2.21 core/protobuf/cluster.proto, ClusterDef.
    """

    job: tuple[JobDef, ...]


class ClusterSpec(PublicDir):
    """The addresses of a cluster's tasks by job. Immutable.

    Addresses are not validated here; `check_cluster` validates them.

    Args:
        cluster: jobs with lists of addresses, or with `{index: address}` if only some tasks are
            known; or a `ClusterDef`; or another spec.

    Raises:
        TypeError: another type, or a job, an index or an address of another type.
        ValueError: an invalid index, or a duplicate index in a job.

    Example:
        >>> spec = sg.ClusterSpec({"worker": {0: "a:1", 2: "b:1"}, "ps": ["c:1"]})
        >>> spec.num_tasks("worker"), spec.task_indices("worker"), spec.job_tasks("worker")
        (2, [0, 2], ['a:1', None, 'b:1'])

    Source: TF 2.21 server_lib.py, ClusterSpec.
    """

    def __init__(self, cluster: Mapping[str, Any] | ClusterDef | ClusterSpec) -> None:
        jobs: Mapping[Any, Any]
        if isinstance(cluster, ClusterSpec):
            jobs = cluster._jobs
        elif isinstance(cluster, ClusterDef):
            jobs = {job.name: job.tasks for job in cluster.job}
        else:
            wanted = "a dict of jobs, a ClusterDef or a ClusterSpec"
            check_type("cluster", cluster, Mapping, wanted, f"pass a cluster such as {EXAMPLE}.")
            jobs = cluster
        self._jobs: dict[str, dict[int, str]] = {
            _job_name(job): _tasks_of_job(job, tasks) for job, tasks in jobs.items()
        }

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ClusterSpec):
            return self._jobs == other._jobs
        if isinstance(other, Mapping):
            try:
                return self._jobs == ClusterSpec(other)._jobs
            except (TypeError, ValueError):
                return False
        return NotImplemented

    def __hash__(self) -> int:
        return hash(frozenset((job, frozenset(t.items())) for job, t in self._jobs.items()))

    def __repr__(self) -> str:
        jobs = self.as_dict()
        return f"ClusterSpec({{{', '.join(f'{job!r}: {jobs[job]!r}' for job in sorted(jobs))}}})"

    def _repr_html_(self) -> str:
        return as_html([type(self).__name__, table_of_tasks(self)])

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Returns the cluster as a dict that `ClusterSpec` accepts.

        Returns:
            Jobs with lists of addresses, or with `{index: address}` if indices have gaps.
        """
        jobs: dict[str, list[str] | dict[int, str]] = {}
        for job, tasks in self._jobs.items():
            in_order = dict(sorted(tasks.items()))
            dense = bool(tasks) and max(tasks) + 1 == len(tasks)
            jobs[job] = list(in_order.values()) if dense else in_order
        return jobs

    def as_cluster_def(self) -> ClusterDef:
        """Returns the cluster with the fields of TensorFlow's protocol buffer.

        Returns:
            Jobs sorted by name, with tasks sorted by index.
        """
        jobs = sorted(self._jobs.items())
        return ClusterDef(tuple(JobDef(job, dict(sorted(tasks.items()))) for job, tasks in jobs))

    @property
    def jobs(self) -> list[str]:
        """Names of the jobs, in the order they were passed."""
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """Returns the number of known tasks of a job.

        Args:
            job_name: a job of this cluster.

        Returns:
            The number, without missing indices.

        Raises:
            ValueError: the job is not in the cluster.
        """
        return len(self._tasks(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Returns the indices of a job's tasks.

        Args:
            job_name: a job of this cluster.

        Returns:
            The indices, sorted.

        Raises:
            ValueError: the job is not in the cluster.
        """
        return sorted(self._tasks(job_name))

    def task_address(self, job_name: str, task_index: int | str) -> str:
        """Returns the address of a task.

        Args:
            job_name: a job of this cluster.
            task_index: index of the task, an int or a string of digits.

        Returns:
            The address.

        Raises:
            TypeError: an index of another type.
            ValueError: the job or the task is not in the cluster.
        """
        tasks = self._tasks(job_name)
        index = parse_task_index(task_index)
        if index not in tasks:
            raise invalid(
                f"No task with index {task_index!r} in job {job_name!r}.",
                expected=f"one of {sorted(tasks)}.",
                fix="number tasks from 0, or add the task's address to the cluster.",
            )
        return tasks[index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Returns the addresses of a job's tasks, at the positions of their indices.

        Args:
            job_name: a job of this cluster.

        Returns:
            The addresses, with None for missing indices.

        Raises:
            ValueError: the job is not in the cluster.
        """
        tasks = self._tasks(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def _tasks(self, job_name: str) -> dict[int, str]:
        if job_name not in self._jobs:
            raise invalid(
                f"No such job in cluster: {job_name!r}.",
                expected=f"one of {self.jobs}.",
                fix="correct the job's name, or add the job to the cluster.",
            )
        return self._jobs[job_name]


def _job_name(job: object) -> str:
    if not isinstance(job, str):
        raise TypeError(
            explain(
                f"Job name {job!r} is of type {type(job).__name__}.",
                expected="a string.",
                fix='name the job "chief", "worker", "ps" or "evaluator".',
            )
        )
    return job


def _tasks_of_job(job: str, tasks: object) -> dict[int, str]:
    if isinstance(tasks, list | tuple):
        pairs: list[tuple[Any, Any]] = list(enumerate(tasks))
    elif isinstance(tasks, Mapping):
        pairs = list(tasks.items())
    else:
        raise TypeError(
            explain(
                f"The tasks of job {job!r} are {tasks!r}, a {type(tasks).__name__}.",
                expected="a list of addresses, or a dict from indices to addresses.",
                fix='write a single task as ["host:port"].',
            )
        )
    addresses: dict[int, str] = {}
    for key, address in pairs:
        index = parse_task_index(key)
        if not isinstance(address, str):
            raise TypeError(
                explain(
                    f"The address of task {index} of job {job!r} is {address!r}, "
                    f"a {type(address).__name__}.",
                    expected="a string.",
                    fix="write it as host:port. To omit unknown tasks, use {index: address}.",
                )
            )
        if index in addresses:
            raise invalid(
                f"Task index {index} occurs twice in job {job!r}.",
                expected="each index once.",
                fix="write all indices as numbers, or all as strings.",
            )
        addresses[index] = address
    return addresses


def table_of_tasks(spec: ClusterSpec) -> Table:
    """Returns a table of the tasks of a cluster and their addresses, for a notebook."""
    table = new_table(None, ["job", "task", "address"])
    tasks = [(job, index) for job in sorted(spec.jobs) for index in spec.task_indices(job)]
    for job, index in tasks[:_MAX_SHOWN]:
        table.add_row(job, str(index), spec.task_address(job, index))
    if len(tasks) > _MAX_SHOWN:
        table.add_row(f"... {len(tasks) - _MAX_SHOWN} more", "", "")
    return table
