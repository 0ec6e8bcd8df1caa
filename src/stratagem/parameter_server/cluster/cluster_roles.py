"""Checks of the cluster given to a parameter-server strategy, and roles of its tasks."""

from __future__ import annotations

from stratagem.cluster.checks import check_addresses
from stratagem.cluster.detection import detect_with_servers
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.cluster.roles import check_task, task_count
from stratagem.cluster.spec import ClusterSpec
from stratagem.messages import explain

_JOBS = {"num_workers": "worker", "num_servers": "ps"}


def checked_cluster(resolver: object, strategy: str) -> tuple[ClusterResolver, ClusterSpec]:
    """Returns the resolver and cluster of a strategy; the cluster is empty without one.

    `resolver=None` reads `TF_CONFIG`, or a Slurm step with servers. Raises a TypeError or
    ValueError for a resolver of another type, without a cluster, or with invalid tasks or
    addresses.

    Source: TF 2.21 parameter_server_strategy_v2.py, _verify_args_and_config.
    """
    if resolver is not None and not isinstance(resolver, ClusterResolver):
        raise TypeError(
            explain(
                f"cluster_resolver={resolver!r} is of type {type(resolver).__name__}.",
                expected="a ClusterResolver, or None.",
                fix="pass sg.cluster_resolver.TFConfigClusterResolver(), for example.",
            )
        )
    used = resolver or detect_with_servers()
    spec = used.cluster_spec()
    if resolver is not None and not spec:
        raise ValueError(
            explain(
                f"cluster_resolver={type(resolver).__name__} of {strategy} has an empty cluster.",
                expected="a cluster with tasks.",
                fix="set TF_CONFIG or pass a cluster_spec; omit cluster_resolver to start all "
                "processes on this machine.",
            )
        )
    if spec:
        is_chief_alone = used.task_type == "chief" and used.task_id is None
        check_task(spec, used.task_type or None, 0 if is_chief_alone else used.task_id)
        check_addresses(spec)
    return used, spec


def check_counts(spec: ClusterSpec) -> None:
    """Raises a ValueError unless a coordinator's cluster has a server and a worker."""
    counts = {job: task_count(spec, job) for job in ("ps", "worker")}
    if not all(counts.values()):
        raise ValueError(
            explain(
                f"The cluster has {counts['ps']} ps and {counts['worker']} worker tasks.",
                expected="at least one of each.",
                fix='list them in TF_CONFIG: {"cluster": {"chief": [...], "ps": [...], '
                '"worker": [...]}}.',
                code="SG511",
            )
        )


def refuse_numbers(spec: ClusterSpec, **numbers: int | None) -> None:
    """Raises a ValueError for a `num_workers` or `num_servers` other than None with a cluster."""
    for name, number in numbers.items():
        if number is not None:
            job = _JOBS[name]
            raise ValueError(
                explain(
                    f"{name}={number!r} was passed for a cluster with {task_count(spec, job)} "
                    f"{job} tasks.",
                    expected=f"{name} only without a cluster.",
                    fix=f"omit {name}.",
                )
            )


def is_non_training(
    spec: ClusterSpec, task: tuple[str | None, int | None], *, independent: bool
) -> bool:
    """Returns True for a task that runs the common program but does not train.

    `task` is the type and index of this process; `independent` means that workers train without a
    coordinator. Raises a ValueError if the cluster has no such task.
    """
    task_type, index = task
    is_cluster = bool(spec) and task_count(spec, "ps") > 0 and index is not None
    has_chief = is_cluster and task_count(spec, "chief") > 0
    others = ("ps", "evaluator") if independent else ("ps", "evaluator", "worker")
    is_other = is_cluster and (independent or has_chief) and task_type in others
    if is_other and (task_type != "evaluator" or "evaluator" in spec.jobs):
        check_task(spec, task_type, index)
    return is_other
