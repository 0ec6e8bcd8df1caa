"""Which processes there will be, and what each finds in its environment."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence

from stratagem.launch.plan.devices import TRAINERS, deal_devices
from stratagem.launch.plan.options import LaunchOptions
from stratagem.launch.plan.restart_folders import KeptFolders

__all__ = ["TRAINERS", "TaskPlan", "plan_tasks"]

_HOST = "127.0.0.1"
_NONE_KEPT = KeptFolders()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskPlan:
    """One process to start.

    Args:
        task_type: chief, worker, ps or evaluator.
        index: its place among those of its type.
        command: the program and its arguments.
        variables: what is set in its environment, beside what it inherits.
    """

    task_type: str
    index: int
    command: tuple[str, ...]
    variables: Mapping[str, str]

    @property
    def name(self) -> str:
        """How messages call it: "worker 2"."""
        return f"{self.task_type} {self.index}"

    @property
    def file_name(self) -> str:
        """The same as part of a file's name."""
        return f"{self.task_type}-{self.index}"

    @property
    def trains(self) -> bool:
        """Whether the work is done when this task and its like have ended."""
        return self.task_type in TRAINERS


def plan_tasks(
    options: LaunchOptions,
    command: Sequence[str],
    *,
    ports: Sequence[int],
    gpus: Sequence[str],
    base: Mapping[str, str],
    restart: int = 0,
    folders: KeptFolders = _NONE_KEPT,
) -> tuple[TaskPlan, ...]:
    """Plans the processes of one start. The first one leads.

    Args:
        options: which tasks there are.
        command: the program that all run, and its arguments.
        ports: a port a task.
        gpus: the GPUs to deal out.
        base: the variables that all tasks inherit.
        restart: how often these tasks were started before.
        folders: where they keep something for the next start.

    Returns:
        The tasks.

    Raises:
        ValueError: fewer GPUs than asked for.

    Example:
        >>> (task,) = plan_tasks(LaunchOptions(), ["true"], ports=[2222], gpus=[], base={})
        >>> task.variables["TF_CONFIG"]
        '{"cluster": {"worker": ["127.0.0.1:2222"]}, "task": {"type": "worker", "index": 0}}'
    """
    task_types = options.task_types
    cluster: dict[str, list[str]] = {}
    indices: list[int] = []
    for task_type, port in zip(task_types, ports, strict=True):
        addresses = cluster.setdefault(task_type, [])
        indices.append(len(addresses))
        addresses.append(f"{_HOST}:{port}")
    devices = deal_devices(
        task_types, devices_per_worker=options.devices_per_worker, gpus=gpus, base=base
    )
    shared = {
        "STRATAGEM_RESTART_COUNT": str(restart),
        # Python keeps what it prints into a pipe until there is much of it.
        "PYTHONUNBUFFERED": "1",
        **_run_dir(options.run_dir),
        **folders.variables,
    }
    plans: list[TaskPlan] = []
    for task_type, index, seen in zip(task_types, indices, devices, strict=True):
        task = {"type": task_type, "index": index}
        told = json.dumps({"cluster": cluster, "task": task})
        variables = {"TF_CONFIG": told, **shared, **seen}
        plans.append(
            TaskPlan(task_type=task_type, index=index, command=tuple(command), variables=variables)
        )
    return tuple(plans)


def _run_dir(run_dir: str | os.PathLike[str] | None) -> dict[str, str]:
    # Absolute: a task may change its folder.
    return {} if run_dir is None else {"STRATAGEM_RUN_DIR": os.path.abspath(run_dir)}
