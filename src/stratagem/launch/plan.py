"""Nodes of a job, and the processes to start on this one, with the environment of each.

Each node starts its own workers, numbered through all nodes, and tells them the number of processes
and the address of process 0. There the workers of all nodes meet as those of any cluster
(`group/hub.py`): launchers do not speak with each other. If a worker fails, those of other nodes
lose a peer and fail as well, so each launcher restarts its own. A restarted worker that finds the
former group still there waits until that has ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sys
from collections.abc import Generator, Mapping, Sequence

from stratagem.cluster.addresses import split_address, with_port
from stratagem.cluster.detection import LAUNCH_PORT, detect_node
from stratagem.errors import invalid
from stratagem.launch.options import LaunchOptions
from stratagem.resources import TemporaryFolder

# Temporary folders of a launch, whose contents survive a restart of the tasks.

# A user who sets one of these has chosen JAX's cache on disk.
_JAX_CACHE_VARIABLES = {"JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE"}
# A file system in memory, on Linux, where our folders are private. The variable names another.
_MEMORY, _MEMORY_VARIABLE = "/dev/shm", "STRATAGEM_MEMORY_DIR"  # noqa: S108
LOSS_FILE = "STRATAGEM_LOSS_FILE"
"""Variable of the file in which a task records the loss of another one (`group/verdict.py`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchFolders:
    """Folder for records of losses, None for none; and variables that name the others to tasks."""

    losses: str | None = None
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def make_launch_folders(
    options: LaunchOptions, base: Mapping[str, str]
) -> Generator[LaunchFolders]:
    """Makes the folders; removes them when the launch ends.

    If tasks may restart, there is one for compiled programs, and one in memory for training state.
    They are outside the run's folder, where files of a killed task would stay forever. Makes none
    that the inherited environment `base` names already. Those of a killed launcher are removed by
    the next one.
    """
    with contextlib.ExitStack() as stack:

        def make(prefix: str, parent: str | None) -> str:
            return str(stack.enter_context(TemporaryFolder(prefix, parent)).path)

        variables: dict[str, str] = {}
        if options.max_restarts and not _JAX_CACHE_VARIABLES & base.keys():
            programs = make("stratagem-programs-", None)
            variables = {
                # This package makes every process write, where JAX has only process 0 write.
                "STRATAGEM_PROGRAM_DIR": programs,
                "JAX_COMPILATION_CACHE_DIR": programs,
                # By default only programs that compile for a second; a start has many small ones.
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            }
        can_keep = options.max_restarts and os.access(_MEMORY, os.W_OK)
        if can_keep and _MEMORY_VARIABLE not in base:
            variables[_MEMORY_VARIABLE] = make("stratagem-memory-", _MEMORY)
        yield LaunchFolders(losses=make("stratagem-losses-", None), variables=variables)


# Assignment of GPUs or virtual CPU devices to tasks, as environment variables.

TRAINERS = ("chief", "worker")
SERVERS = ("ps", "input")  # They run until the trainers have ended.

_DEVICE_COUNT = re.compile(r"\s*--xla_force_host_platform_device_count=\S*")
_GPU_PLATFORMS = {"cuda", "gpu", "rocm"}
# Keeps a task without a GPU from using the memory of others, and from warning about it.
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
# XLA:CPU threads per virtual device, as in environment.size_cpu_thread_pool.
_THREADS_PER_DEVICE = 4


def uses_gpus(base: Mapping[str, str]) -> bool:
    """Returns False if `JAX_PLATFORMS` names only platforms other than GPUs."""
    platforms = base.get("JAX_PLATFORMS", "")
    return not platforms or bool(_GPU_PLATFORMS & set(platforms.lower().split(",")))


def assign_devices(
    task_types: Sequence[str],
    *,
    devices_per_worker: int | None,
    gpus: Sequence[str],
    base: Mapping[str, str],
) -> list[dict[str, str]]:
    """Returns the variables of each task that assign it GPUs, or virtual CPU devices without GPUs.

    Servers get no device. The evaluator gets the GPUs that the workers leave, at most as many as a
    worker; with none left it runs on the CPU. None for `devices_per_worker` divides the GPUs
    evenly, or changes nothing if there are fewer GPUs than workers. `gpus` are named as in
    `CUDA_VISIBLE_DEVICES`; all tasks inherit the environment `base`. Raises ValueError if there are
    fewer GPUs than requested.

    Example:
        >>> assign_devices(["worker", "ps"], devices_per_worker=None, gpus=["0", "1"], base={})
        [{'CUDA_VISIBLE_DEVICES': '0,1'}, {'CUDA_VISIBLE_DEVICES': '', 'JAX_PLATFORMS': 'cpu'}]
    """
    if not gpus or not uses_gpus(base):
        cpu = {} if devices_per_worker is None else _cpu_devices(devices_per_worker, base)
        return [{} if task_type in SERVERS else dict(cpu) for task_type in task_types]
    num_trainers = sum(task_type in TRAINERS for task_type in task_types)
    share = len(gpus) // num_trainers if devices_per_worker is None else devices_per_worker
    if share == 0:
        return [{} for _ in task_types]
    if share * num_trainers > len(gpus):
        raise invalid(
            f"{num_trainers} workers with devices_per_worker={share} need "
            f"{share * num_trainers} GPUs, but there are {len(gpus)}: {','.join(gpus)}.",
            expected="enough GPUs for all workers.",
            fix="lower workers or devices_per_worker, or set JAX_PLATFORMS=cpu to use virtual "
            "devices.",
        )
    return _assign_gpus(task_types, gpus, share)


def _assign_gpus(
    task_types: Sequence[str], gpus: Sequence[str], share: int
) -> list[dict[str, str]]:
    free = list(gpus)
    assigned: list[dict[str, str]] = []
    # Workers precede the evaluator in every list of tasks, so they are served first.
    for task_type in task_types:
        own = [] if task_type in SERVERS else free[:share]
        free = free[len(own) :]
        assigned.append({"CUDA_VISIBLE_DEVICES": ",".join(own)} if own else dict(NO_GPU))
    return assigned


def _cpu_devices(num_devices: int, base: Mapping[str, str]) -> dict[str, str]:
    """Sets the number in both spellings, because either may already be in the environment."""
    flags = _DEVICE_COUNT.sub("", base.get("XLA_FLAGS", ""))
    variables = {
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={num_devices}".strip(),
        "JAX_NUM_CPU_DEVICES": str(num_devices),
    }
    if num_devices > 1 and "NPROC" not in base:
        variables["NPROC"] = str(_THREADS_PER_DEVICE * num_devices)
    return variables


INPUT = "input"  # Type of the task of input workers, which is not in the cluster.
_HOST = "127.0.0.1"
_NO_FOLDERS = LaunchFolders()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskPlan:
    """One process to start.

    `task_type` is chief, worker, ps, evaluator or input; `variables` extend the inherited
    environment.
    """

    task_type: str
    index: int
    command: tuple[str, ...]
    variables: Mapping[str, str]

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
    folders: LaunchFolders = _NO_FOLDERS,
    node: Node | None = None,
) -> tuple[TaskPlan, ...]:
    """Plans the processes of one start, the leader first.

    All tasks inherit the environment `base`. `ports` has one port per task; `gpus` are named as in
    `CUDA_VISIBLE_DEVICES`, and `restart` counts earlier starts. `node` is this machine, if there
    are several: its workers know only process 0. All tasks get the address of the input workers,
    which are one task. Raises ValueError if there are fewer GPUs than requested.

    Example:
        >>> (task,) = plan_tasks(LaunchOptions(), ["true"], ports=[2222], gpus=[], base={})
        >>> task.variables["TF_CONFIG"]
        '{"cluster": {"worker": ["127.0.0.1:2222"]}, "task": {"type": "worker", "index": 0}}'
    """
    tasks = numbered(options.task_types)
    cluster: dict[str, list[str]] = {}
    for (task_type, _), port in zip(tasks, ports, strict=True):
        cluster.setdefault(task_type, []).append(f"{_HOST}:{port}")
    devices = assign_devices(
        [task_type for task_type, _ in tasks],
        devices_per_worker=options.devices_per_worker,
        gpus=gpus,
        base=base,
    )
    shared = _shared_variables(options, restart, folders)
    services = cluster.pop(INPUT, [])
    if services:
        shared["STRATAGEM_INPUT_SERVICE"] = services[0]
    plans: list[TaskPlan] = []
    for (task_type, index), visible in zip(tasks, devices, strict=True):
        own, at = tuple(command), {"TF_CONFIG": ""}
        if task_type == INPUT:
            own = _input_command(options.input_workers, services[0])
            visible = {**visible, **NO_GPU}
        elif node is not None:
            index += node.rank * options.workers
            at |= _variables_of_process(node, index, options.workers)
        else:
            task = {"type": task_type, "index": index}
            at = {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}
        variables = {**at, **shared, **visible}
        plan = TaskPlan(task_type=task_type, index=index, command=own, variables=variables)
        if folders.losses is not None:
            variables[LOSS_FILE] = os.path.join(folders.losses, f"{plan.file_name}.json")
        plans.append(plan)
    return tuple(plans)


def _variables_of_process(node: Node, process_id: int, num_workers: int) -> dict[str, str]:
    """Returns what a worker of one of several nodes knows of the others, in Kubeflow's names."""
    return {
        "JAX_NUM_PROCESSES": str(node.count * num_workers),
        "JAX_PROCESS_ID": str(process_id),
        "JAX_COORDINATOR_ADDRESS": node.coordinator,
    }


def numbered(task_types: Sequence[str]) -> list[tuple[str, int]]:
    """Returns the type and index of each task.

    Example:
        >>> numbered(["chief", "worker", "worker"])
        [('chief', 0), ('worker', 0), ('worker', 1)]
    """
    return [(kind, task_types[:at].count(kind)) for at, kind in enumerate(task_types)]


def _shared_variables(
    options: LaunchOptions, restart: int, folders: LaunchFolders
) -> dict[str, str]:
    variables = {
        "STRATAGEM_RESTART_COUNT": str(restart),
        # Otherwise Python buffers what it prints to a pipe.
        "PYTHONUNBUFFERED": "1",
        **folders.variables,
    }
    if options.run_dir is not None:  # absolute, because a task may change its working directory
        variables["STRATAGEM_RUN_DIR"] = os.path.abspath(options.run_dir)
    if options.log_level is not None:
        variables["STRATAGEM_LOG_LEVEL"] = options.log_level
    return variables


def _input_command(count: int, address: str) -> tuple[str, ...]:
    """Returns the command of the input workers."""
    host, port = split_address(address)
    words = ("-m", "stratagem", "input-service", "--workers", str(count))
    return (sys.executable, *words, "--host", host, "--port", str(port))


# Nodes: how many machines run this launch, which one this is, where process 0 listens.


@dataclasses.dataclass(frozen=True)
class Node:
    """One of `count` nodes; `coordinator` is `host:port` of process 0, which runs on node 0."""

    count: int
    rank: int
    coordinator: str


def find_node(options: LaunchOptions) -> Node | None:
    """Returns which node this is, by the options or else by the scheduler; see `detect_node`.

    None for this machine alone. Raises ValueError if the rank or the address of process 0 is
    missing or invalid, or for tasks that need other addresses; RuntimeError for invalid variables
    of Slurm.
    """
    if options.nnodes == 1:
        return None
    found_count, found_rank, found_coordinator = detect_node()
    count = options.nnodes or found_count or 1
    if count == 1:
        return None
    rank = found_rank if options.node_rank is None else options.node_rank
    if rank is None or rank >= count:
        raise invalid(
            f"node_rank={rank} on one of {count} nodes.",
            expected=f"0 to {count - 1}.",
            fix="give each node its own --node-rank, and all the same --nnodes.",
        )
    coordinator = options.coordinator or found_coordinator
    if coordinator is None:
        raise invalid(
            f"nnodes={count} without the address of process 0.",
            expected="coordinator, or a scheduler that says it: a Slurm step, mpirun, or an "
            "Indexed Job of Kubernetes whose pods name a headless service as `subdomain`.",
            fix="pass --coordinator HOST:PORT, an address of node 0; in a Ray job use "
            "sg.ParameterServerStrategy or Ray Train, which place their processes themselves.",
        )
    _check_tasks(options, count)
    return Node(count, rank, with_port(coordinator, LAUNCH_PORT))


def _check_tasks(options: LaunchOptions, count: int) -> None:
    """Raises ValueError for tasks and restarts that need the addresses of all, or one launcher."""
    of_tasks = ("chief", "ps", "evaluator", "input_workers")
    for name in (*of_tasks, "survivors", "min_workers", "max_workers"):
        if value := getattr(options, name):
            raise invalid(
                f"{name}={value!r} with nnodes={count}.",
                expected="the same number of workers on each node, which restart together.",
                fix="leave it out: process 0 is the chief. Other tasks, and an "
                "ElasticStrategy, need the address of each: set TF_CONFIG, or use "
                "`stratagem slurm render`, `stratagem kubernetes render` or Ray.",
            )
