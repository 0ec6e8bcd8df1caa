"""Plan of the processes to start, with the environment of each."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence

from stratagem.cluster.addresses import split_address
from stratagem.launch.plan.devices import NO_GPU, SERVERS, assign_devices
from stratagem.launch.plan.devices import TRAINERS as TRAINERS
from stratagem.launch.plan.options import LaunchOptions
from stratagem.launch.plan.restart_folders import RestartFolders

INPUT = "input"  # Type of the task of input workers, which is not in the cluster.
_HOST = "127.0.0.1"
_NO_FOLDERS = RestartFolders()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskPlan:
    """One process to start.

    `task_type` is chief, worker, ps, evaluator or input; `variables` extend the inherited
    environment.
    `node` names its machine if there are several.
    """

    task_type: str
    index: int
    command: tuple[str, ...]
    variables: Mapping[str, str]
    node: str = ""

    @property
    def name(self) -> str:
        """The name used in messages, such as "worker 2"."""
        return f"{self.task_type} {self.index}"

    @property
    def file_name(self) -> str:
        """The name as part of a file name, such as "worker-2"."""
        return f"{self.task_type}-{self.index}"

    @property
    def serves(self) -> bool:
        """True for tasks that others need until the trainers have ended."""
        return self.task_type in SERVERS

    @property
    def trains(self) -> bool:
        """True for chief and workers: the job is done when these have ended."""
        return self.task_type in TRAINERS


def plan_tasks(
    options: LaunchOptions,
    command: Sequence[str],
    *,
    ports: Sequence[int],
    gpus: Sequence[str],
    base: Mapping[str, str],
    restart: int = 0,
    folders: RestartFolders = _NO_FOLDERS,
) -> tuple[TaskPlan, ...]:
    """Plans the processes of one start, the leader first.

    All tasks inherit the environment `base`. `ports` has one port per task; `gpus` are named as in
    `CUDA_VISIBLE_DEVICES`, and `restart` counts earlier starts. Raises ValueError if there are
    fewer GPUs than requested.

    Example:
        >>> (task,) = plan_tasks(LaunchOptions(), ["true"], ports=[2222], gpus=[], base={})
        >>> task.variables["TF_CONFIG"]
        '{"cluster": {"worker": ["127.0.0.1:2222"]}, "task": {"type": "worker", "index": 0}}'
    """
    tasks = numbered(options.task_types)
    cluster: dict[str, list[str]] = {}
    for (task_type, _), port in zip(tasks, ports, strict=True):
        cluster.setdefault(task_type, []).append(f"{_HOST}:{port}")
    return plan_own_tasks(
        tasks,
        options,
        command,
        cluster=cluster,
        gpus=gpus,
        base=base,
        restart=restart,
        folders=folders,
    )


def numbered(task_types: Sequence[str]) -> list[tuple[str, int]]:
    """Returns the type and index of each task.

    Example:
        >>> numbered(["chief", "worker", "worker"])
        [('chief', 0), ('worker', 0), ('worker', 1)]
    """
    return [(kind, task_types[:at].count(kind)) for at, kind in enumerate(task_types)]


def plan_own_tasks(
    tasks: Sequence[tuple[str, int]],
    options: LaunchOptions,
    command: Sequence[str],
    *,
    cluster: Mapping[str, Sequence[str]],
    gpus: Sequence[str],
    base: Mapping[str, str],
    restart: int,
    folders: RestartFolders,
    node: str = "",
) -> tuple[TaskPlan, ...]:
    """Plans those processes of a cluster that run on this machine, which is called `node`.

    `cluster` may have input workers: one task on each machine that has some, the first of them with
    the dispatcher. All tasks get its address.
    """
    devices = assign_devices(
        [task_type for task_type, _ in tasks],
        devices_per_worker=options.devices_per_worker,
        gpus=gpus,
        base=base,
    )
    shared = _shared_variables(options, restart, folders)
    services = cluster.get(INPUT, ())
    if services:
        shared["STRATAGEM_INPUT_SERVICE"] = services[0]
    trainers = {name: one for name, one in cluster.items() if name != INPUT}
    plans: list[TaskPlan] = []
    for (task_type, index), visible in zip(tasks, devices, strict=True):
        own, config = tuple(command), ""
        if task_type == INPUT:
            own = _input_command(options.input_workers, services, index)
            visible = {**visible, **NO_GPU}
        else:
            task = {"type": task_type, "index": index}
            config = json.dumps({"cluster": trainers, "task": task})
        plans.append(
            TaskPlan(
                task_type=task_type,
                index=index,
                command=own,
                variables={"TF_CONFIG": config, **shared, **visible},
                node=node,
            )
        )
    return tuple(plans)


def _shared_variables(
    options: LaunchOptions, restart: int, folders: RestartFolders
) -> dict[str, str]:
    return {
        "STRATAGEM_RESTART_COUNT": str(restart),
        # Otherwise Python buffers what it prints to a pipe.
        "PYTHONUNBUFFERED": "1",
        **_run_dir(options.run_dir),
        **({"STRATAGEM_NUM_SPARES": str(options.spares)} if options.spares else {}),
        **({} if options.log_level is None else {"STRATAGEM_LOG_LEVEL": options.log_level}),
        **folders.variables,
    }


def _input_command(count: int, addresses: Sequence[str], index: int) -> tuple[str, ...]:
    """Returns the command of the input workers of a machine."""
    host, port = split_address(addresses[index])
    words = ("-m", "stratagem", "input-service", "--workers", str(count), "--host", host)
    if index == 0:
        return (sys.executable, *words, "--port", str(port))
    return (sys.executable, *words, "--dispatcher", addresses[0])


def _run_dir(run_dir: str | os.PathLike[str] | None) -> dict[str, str]:
    # Absolute, because a task may change its working directory.
    return {} if run_dir is None else {"STRATAGEM_RUN_DIR": os.path.abspath(run_dir)}
