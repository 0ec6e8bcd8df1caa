"""Resolver for the tasks of a Slurm job step, with the compact lists of hosts that Slurm gives."""

from __future__ import annotations

import re
from collections.abc import Mapping

from stratagem import environment
from stratagem.cluster.accelerators import local_gpus
from stratagem.cluster.launchers import number_of
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.cluster.spec import ClusterSpec
from stratagem.errors import explain, invalid

# Parsing of Slurm's compact lists of hosts and of tasks per node.


# A part between commas outside brackets.
_PART = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_PIECE = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_hostlist(hostlist: str) -> list[str]:
    """Returns the hosts of a Slurm host list.

    Args:
        hostlist: names with ranges in brackets, separated by commas.

    Returns:
        The hosts in order, including duplicates.

    Raises:
        ValueError: the list is malformed.
    """
    parts = _PART.findall(hostlist)
    if ",".join(parts) != hostlist:
        raise _hostlist_error(hostlist)
    return [host for part in parts for host in _hosts_of_part(part, hostlist)]


def _hosts_of_part(part: str, hostlist: str) -> list[str]:
    """Expands a name with ranges, such as `rack[1-2]n[1-3]`; the last varies fastest."""
    hosts = [""]
    for number, piece in enumerate(_PIECE.split(part)):
        # Plain text and the contents of brackets alternate.
        suffixes = [piece] if number % 2 == 0 else _numbers(piece, hostlist)
        hosts = [host + suffix for host in hosts for suffix in suffixes]
    return hosts


def _numbers(ranges: str, hostlist: str) -> list[str]:
    numbers: list[str] = []
    for text in ranges.split(","):
        match = _RANGE.fullmatch(text)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise _hostlist_error(hostlist)
        first, last = match[1], match[2] or match[1]
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers


def _hostlist_error(hostlist: str) -> ValueError:
    return invalid(
        f"Invalid hostlist format {hostlist!r}.",
        expected="hosts with ranges in brackets, such as n[1-2],m5,o[08-10].",
        fix="check the output of `scontrol show hostnames $SLURM_STEP_NODELIST`.",
    )


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """Returns the number of tasks on each node.

    Args:
        tasks_per_node: numbers separated by commas; `(x3)` repeats a number for three nodes.

    Returns:
        One number per node.

    Raises:
        ValueError: the text is malformed.
    """
    numbers: list[int] = []
    for part in tasks_per_node.split(","):
        match = _TASKS.fullmatch(part)
        if match is None:
            raise invalid(
                f"Invalid tasks-per-node list format {tasks_per_node!r}.",
                expected="numbers and repetitions, such as 3(x2),2,1.",
                fix="correct SLURM_STEP_TASKS_PER_NODE, or pass tasks_per_node.",
            )
        numbers += [int(match[1])] * int(match[2] or 1)
    return numbers


# Resolver for the tasks of a Slurm job step.


class SlurmClusterResolver(ClusterResolver):
    """Reads the cluster and this process's task from the variables of a Slurm job step.

    Tasks are numbered host by host, as with `srun --distribution=block`, also over the components
    of a heterogeneous job. The first task on each host uses `port_base`, the next ones the
    following ports. Jobs, sorted by name, take the tasks in order.

    Args:
        jobs: number of tasks per job; None for those of `STRATAGEM_SLURM_JOBS`, which `stratagem
            slurm render --ps` sets, or else makes all tasks workers.
        port_base: port of the first task on each host.
        gpus_per_node: GPUs per host; None for those visible to this process.
        gpus_per_task: GPUs per task; None divides a host's GPUs evenly.
        tasks_per_node: tasks per host, as one number for all or by host name.
        auto_set_gpu: makes `cluster_spec()` restrict this task to its GPUs with
            `CUDA_VISIBLE_DEVICES`. No effect if there are fewer GPUs than tasks.
        rpc_layer: prefix of addresses.

    Raises:
        RuntimeError: outside a step, numbers of tasks that do not match, too many GPUs, or ranks
            that are not numbered host by host.
        ValueError: a malformed variable.

    Example:
        >>> from unittest import mock
        >>> step = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4",  # srun sets them
        ...         "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
        >>> with mock.patch.dict("os.environ", step):
        ...     resolver = sg.cluster_resolver.SlurmClusterResolver({"chief": 1, "worker": 3},
        ...                                                         gpus_per_node=0)
        ...     resolver.get_task_info(), resolver.cluster_spec().as_dict()["worker"]
        (('worker', 1), ['n1:8889', 'n2:8888', 'n2:8889'])

    Source: TF 2.21 slurm_cluster_resolver.py, SlurmClusterResolver.
    """

    _is_local = True

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
    ) -> None:
        self._rank = _number("SLURM_PROCID")
        self._jobs = dict(jobs) if jobs is not None else _jobs_of_environment()
        self._hosts = _tasks_of_hosts(tasks_per_node)
        self._port_base = port_base
        self._auto_set_gpu = auto_set_gpu
        self._rpc_layer = rpc_layer
        # GPUs to assign, by name; a number given by the caller counts from 0.
        gpus = local_gpus() if gpus_per_node is None else tuple(map(str, range(gpus_per_node)))
        most_tasks = max(self._hosts.values(), default=0)
        share = len(gpus) // most_tasks if most_tasks else 0
        self._gpus = gpus
        self._gpus_per_task = share if gpus_per_task is None else gpus_per_task
        self._check(most_tasks)
        tasks = [(job, index) for job, n in sorted(self._jobs.items()) for index in range(n)]
        self._task_type, self._task_id = tasks[self._rank]
        self._check_host()

    def cluster_spec(self) -> ClusterSpec:
        """Returns the tasks of the step, and restricts this task to its GPUs.

        Returns:
            The cluster.
        """
        if self._auto_set_gpu and self._gpus_per_task:
            rank_on_host = self._rank - self._host_of_each_task().index(self._host())
            first = rank_on_host * self._gpus_per_task
            environment.show_gpus(self._gpus[first : first + self._gpus_per_task])
        addresses = [
            f"{host}:{self._port_base + offset}"
            for host, num_tasks in self._hosts.items()
            for offset in range(num_tasks)
        ]
        jobs: dict[str, list[str]] = {}
        for job, num_tasks in sorted(self._jobs.items()):
            jobs[job], addresses = addresses[:num_tasks], addresses[num_tasks:]
        return ClusterSpec(jobs)

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Returns the task of this process.

        Returns:
            Type and index.
        """
        return self.task_type, self.task_id

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Returns the GPUs per task, the same for all tasks.

        Args:
            task_type: ignored.
            task_id: ignored.
            config_proto: ignored.

        Returns:
            A dict such as `{"GPU": 4}`.
        """
        del task_type, task_id, config_proto
        return {"GPU": self._gpus_per_task}

    def _check(self, most_tasks: int) -> None:
        num_requested, num_assigned = sum(self._jobs.values()), sum(self._hosts.values())
        if num_requested != num_assigned or self._rank >= num_assigned:
            raise RuntimeError(
                explain(
                    f"Requested {num_requested} tasks: {self._jobs}, this one with SLURM_PROCID="
                    f"{self._rank}, but {num_assigned} were assigned: {self._hosts}.",
                    expected="the same number of tasks in the jobs as on the hosts.",
                    fix="change jobs, tasks_per_node, or srun's --ntasks.",
                    code="SG512",
                )
            )
        if most_tasks * self._gpus_per_task > len(self._gpus):
            raise RuntimeError(
                explain(
                    f"Requested more GPUs per node than available: {most_tasks} tasks with "
                    f"{self._gpus_per_task} GPUs, of {len(self._gpus)}.",
                    expected="tasks of a host times gpus_per_task <= gpus_per_node.",
                    fix="lower gpus_per_task, or request more with --gpus-per-node.",
                    code="SG512",
                )
            )

    def _check_host(self) -> None:
        """Raises if Slurm runs this task on another host, as with --distribution=cyclic."""
        runs_on = environment.lookup("SLURMD_NODENAME")
        expected = self._host()
        if runs_on in self._hosts and runs_on != expected:
            raise RuntimeError(
                explain(
                    f"Task {self._rank} runs on {runs_on}, but counting host by host it belongs "
                    f"to {expected}: {self._hosts}.",
                    expected="ranks numbered host by host.",
                    fix="start the step with srun --distribution=block.",
                    code="SG512",
                )
            )

    def _host(self) -> str:
        return self._host_of_each_task()[self._rank]

    def _host_of_each_task(self) -> list[str]:
        return [host for host, num_tasks in self._hosts.items() for _ in range(num_tasks)]


def _text(name: str) -> str:
    text = environment.lookup(name)
    if text is None:
        raise RuntimeError(
            explain(
                f"{name} not found in environment.",
                expected="a process in a Slurm job step.",
                fix="start the script with srun inside the allocation.",
                code="SG512",
            )
        )
    return text


def _number(name: str) -> int:
    _text(name)  # which says what to do where it is missing
    return number_of(name) or 0


def _jobs_of_environment() -> dict[str, int]:
    """Returns the jobs of `STRATAGEM_SLURM_JOBS`, such as "chief=1,ps=2,worker=4", or workers."""
    text = environment.lookup("STRATAGEM_SLURM_JOBS")
    if text is None:
        return {"worker": _number("SLURM_STEP_NUM_TASKS")}
    pairs = [re.fullmatch(r"\s*(\w+)=(\d+)\s*", pair) for pair in text.split(",")]
    jobs = {pair[1]: int(pair[2]) for pair in pairs if pair is not None}
    if len(jobs) != len(pairs):
        raise invalid(
            f"STRATAGEM_SLURM_JOBS={text!r} is malformed.",
            expected="each job once with its number of tasks, such as chief=1,ps=2,worker=4.",
            fix="start the job with a script of `stratagem slurm render`, or pass jobs.",
            code="SG512",
        )
    return jobs


def _tasks_of_hosts(tasks_per_node: int | Mapping[str, int] | None) -> dict[str, int]:
    """Returns the number of tasks per host, in Slurm's order."""
    if isinstance(tasks_per_node, Mapping):
        listed = environment.lookup("SLURM_STEP_NODELIST")
        order = expand_hostlist(listed) if listed is not None else []
        known = [host for host in order if host in tasks_per_node]
        others = sorted(tasks_per_node.keys() - set(known))
        return {host: tasks_per_node[host] for host in (*known, *others)}
    hosts = expand_hostlist(_text("SLURM_STEP_NODELIST"))
    if tasks_per_node is not None:
        return dict.fromkeys(hosts, int(tasks_per_node))
    numbers = expand_tasks_per_node(_text("SLURM_STEP_TASKS_PER_NODE"))
    if len(hosts) != len(numbers):
        raise invalid(
            f"SLURM_STEP_NODELIST names {len(hosts)} hosts, SLURM_STEP_TASKS_PER_NODE "
            f"{len(numbers)}.",
            expected="one number of tasks per host.",
            fix="pass tasks_per_node, or start the script with srun.",
            code="SG512",
        )
    return dict(zip(hosts, numbers, strict=True))
