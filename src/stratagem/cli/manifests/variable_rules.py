"""Valid values of the packaged templates' variables, checked before rendering."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from stratagem.cli.manifests.rendering import Template, packaged_template
from stratagem.errors import explain

_MAX_PORT = 65535
_MAX_INT32 = 2**31 - 1
_MAX_LABEL_LETTERS = 63
# Kubernetes' limit for an indexed Job with a backoff limit per index.
_MAX_WORKERS = 100_000
_TASK_ROLES = {"worker": "worker_replicas", "ps": "ps_replicas", "evaluator": "has_eval"}


@dataclasses.dataclass(frozen=True)
class VariableRule:
    """Valid values of a template variable; `expected` describes them in error messages."""

    is_valid: Callable[[object], bool]
    expected: str


def check_values(values: Mapping[str, object], rules: Mapping[str, VariableRule]) -> None:
    """Raises ValueError for the first invalid value; variables without a rule may be anything.

    Example:
        >>> from stratagem.cli.manifests.variable_rules import KUBERNETES, check_values
        >>> check_values({"port": 70000}, KUBERNETES)
        Traceback (most recent call last):
        ...
        ValueError: port=70000 is not valid.
        Expected a port from 1 to 65535.
        Fix: set port to such a value.
    """
    for variable, value in values.items():
        rule = rules.get(variable)
        if rule is None or rule.is_valid(value):
            continue
        raise ValueError(
            explain(
                f"{variable}={value!r} is not valid.",
                expected=rule.expected,
                fix=f"set {variable} to such a value.",
            )
        )


def check_pod_names(values: Mapping[str, Any]) -> None:
    """Raises ValueError if a pod's name would be too long for a DNS label."""
    # A JobSet numbers its Jobs too.
    middle = "" if values.get("workload", "Job") == "Job" else "-0"
    for role, variable in _TASK_ROLES.items():
        count = int(values.get(variable, 0))
        check_name_length(
            f"{values.get('name', '')}-{role}{middle}-{max(count - 1, 0)}" if count else "",
            f"last {role}",
        )


def check_name_length(name: str, owner: str, longest: int = _MAX_LABEL_LETTERS) -> None:
    """Raises ValueError for a name that is too long; `owner` names its object in the message."""
    if len(name) > longest:
        raise ValueError(
            explain(
                f"The name of the {owner}, {name!r}, has {len(name)} characters.",
                expected=f"at most {longest}.",
                fix="choose a shorter name.",
            )
        )


def _is_text(value: object) -> bool:
    """Returns True if a process accepts the string as an argument."""
    if not isinstance(value, str) or "\0" in value:
        return False
    return not any("\ud800" <= letter <= "\udfff" for letter in value)


def _matches(pattern: str) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _int_rule(minimum: int, maximum: int = _MAX_INT32) -> VariableRule:
    def is_valid(value: object) -> bool:
        return type(value) is int and minimum <= value <= maximum

    most = "" if maximum == _MAX_INT32 else f" and at most {maximum}"
    return VariableRule(is_valid, f"an integer of at least {minimum}{most}.")


def _is_command_line(value: object) -> bool:
    return all(map(_is_text, value)) if isinstance(value, list | tuple) else _is_text(value)


_TRUTH = VariableRule(lambda value: isinstance(value, bool), "True or False.")
_COMMAND_LINE = VariableRule(_is_command_line, "text, or a list of words.")
_FILE = VariableRule(lambda value: _is_text(value) and value != "", "the path of a file.")
_DNS_NAME = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_ARRAY_PART = r"\d+(-\d+(:[1-9]\d*)?)?"
_QUANTITY = r"[0-9]+(\.[0-9]+)?([EPTGMk]i?|Ki)?"

KUBERNETES: Mapping[str, VariableRule] = {
    "name": VariableRule(
        _matches(r"[a-z]([-a-z0-9]*[a-z0-9])?"),
        "a DNS label: lowercase letters, digits and dashes, starting with a letter, no final dash.",
    ),
    "image": VariableRule(_matches(r"\S+"), "the name of a container image."),
    "worker_replicas": _int_rule(1, _MAX_WORKERS),
    "ps_replicas": _int_rule(0, _MAX_WORKERS),
    "input_replicas": _int_rule(0, _MAX_WORKERS),
    "num_gpus_per_worker": _int_rule(0),
    "has_eval": _TRUTH,
    "has_tensorboard": _TRUTH,
    "train_dir": VariableRule(
        lambda value: _is_text(value) and _matches(r"/[^:]*[^:/][^:]*|[a-z0-9]+://\S+")(value),
        "a folder as /path, or a URL such as gs://bucket/folder.",
    ),
    "script": _FILE,
    "cmdline_args": _COMMAND_LINE,
    "credential_secret_json": VariableRule(_matches(r"[-._a-zA-Z0-9]+"), "the name of a file."),
    "credential_secret_key": VariableRule(
        _matches(f"({_DNS_NAME})?"), 'the name of a secret, or "".'
    ),
    "run_secret": VariableRule(_matches(f"({_DNS_NAME})?"), 'the name of a secret, or "".'),
    "port": dataclasses.replace(_int_rule(1, _MAX_PORT), expected=f"a port from 1 to {_MAX_PORT}."),
    "max_restarts": _int_rule(0),
    "grace_period_s": _int_rule(0),
    "volume_size": VariableRule(_matches(_QUANTITY), "a size such as 10Gi."),
    "volume_access_mode": VariableRule(
        _matches("ReadWriteMany|ReadWriteOnce"), "ReadWriteMany or ReadWriteOnce."
    ),
    "storage_class": VariableRule(
        _matches(f"({_DNS_NAME})?"), 'the name of a storage class, or "".'
    ),
    "expose_tasks": _TRUTH,
    "workload": VariableRule(_matches("Job|JobSet|TrainJob"), "Job, JobSet or TrainJob."),
    "queue": VariableRule(
        lambda value: _matches(f"({_DNS_NAME})?")(value) and len(str(value)) <= _MAX_LABEL_LETTERS,
        'the name of a LocalQueue, of at most 63 characters, or "".',
    ),
    "cpus_per_task": _int_rule(0),
    "memory_per_task": VariableRule(_matches(f"({_QUANTITY})?"), 'a size such as 4Gi, or "".'),
    "max_evictions": _int_rule(0),
    "user_id": dataclasses.replace(_int_rule(1), expected="the number of a user other than root."),
    "read_only_root": _TRUTH,
}
"""Valid values of the variables of `template.yaml.jinja`."""

RAY: Mapping[str, VariableRule] = {
    **{name: KUBERNETES[name] for name in ("name", "image", "worker_replicas")},
    "ps_replicas": _int_rule(1, _MAX_WORKERS),
    "num_gpus_per_worker": _int_rule(0),
    "cpus_per_task": _int_rule(1),
    "memory_per_task": VariableRule(_matches(_QUANTITY), "a size such as 4Gi."),
    "ray_version": VariableRule(_matches(r"[0-9]+(\.[0-9a-z]+)+"), "a version such as 2.60.0."),
    "token_secret": VariableRule(_matches(_DNS_NAME), "the name of a secret."),
    "script": VariableRule(_is_text, 'the path of a file, or "".'),
    "expose_jobs": _TRUTH,
    **{
        name: KUBERNETES[name]
        for name in (
            *("port", "cmdline_args", "max_restarts", "grace_period_s", "queue"),
            *("max_evictions", "user_id", "read_only_root"),
        )
    },
}
"""Valid values of the variables of `ray.yaml.jinja`."""

SLURM: Mapping[str, VariableRule] = {
    "name": VariableRule(
        _matches(r"[A-Za-z0-9][-._A-Za-z0-9]*"), "letters, digits, dots, dashes and underscores."
    ),
    "worker_replicas": _int_rule(1),
    "ps_replicas": _int_rule(0),
    "heterogeneous": _TRUTH,
    "tasks_per_node": _int_rule(1),
    "num_gpus_per_worker": _int_rule(0),
    "cpus_per_worker": _int_rule(0),
    "partition": VariableRule(
        _matches(r"([-._A-Za-z0-9]+(,[-._A-Za-z0-9]+)*)?"), "partition names separated by commas."
    ),
    "time": VariableRule(
        _matches(r"(\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}|UNLIMITED|INFINITE)?"),
        "minutes, or a time such as 30:00, 12:00:00, 1-12, 1-12:00 or 1-12:00:00.",
    ),
    "array": VariableRule(
        _matches(rf"({_ARRAY_PART}(,{_ARRAY_PART})*(%[1-9]\d*)?)?"),
        "indices such as 0-7, 1,3,5 or 0-15:4, and the number that run at once as in 0-7%2.",
    ),
    "python": _FILE,
    "script": _FILE,
    "cmdline_args": _COMMAND_LINE,
    "grace_period_s": _int_rule(0, _MAX_PORT),
}
"""Valid values of the variables of `slurm.sh.jinja`."""


# KubeRay manifests of a training cluster.

RAY_TEMPLATE = "ray.yaml.jinja"
"""File name of the packaged template."""

# KubeRay's limits: it appends to these names.
_MAX_NAME_LETTERS = {"RayCluster": 53, "RayJob": 47}


def ray_template() -> str:
    """Returns the text of the packaged template; a `{% set %}` line defines each variable."""
    return packaged_template(RAY_TEMPLATE)


def render_ray(
    overrides: Mapping[str, object] | None = None,
    template: str | None = None,
    name: str = RAY_TEMPLATE,
) -> str:
    """Returns the manifests of a Ray cluster that runs programs of remote clients.

    They are YAML for `kubectl create -f -`, and need the KubeRay operator. With a `script`, the
    cluster runs it and ends (a RayJob). Arguments and errors as in `render_kubernetes`.

    Example:
        >>> from stratagem.cli.manifests.variable_rules import render_ray
        >>> "kind: RayCluster" in render_ray({"name": "train", "worker_replicas": 3})
        True
    """
    own = Template(ray_template() if template is None else template, name)
    values = own.values(overrides or {})
    check_values(values, RAY)
    kind = "RayJob" if values.get("script") else "RayCluster"
    check_name_length(str(values.get("name", "")), kind, _MAX_NAME_LETTERS[kind])
    return own.render(overrides)


# Slurm batch scripts of a training job.

SLURM_TEMPLATE = "slurm.sh.jinja"
"""File name of the packaged template."""


def slurm_template() -> str:
    """Returns the text of the packaged template; a `{% set %}` line defines each variable."""
    return packaged_template(SLURM_TEMPLATE)


def render_slurm(
    overrides: Mapping[str, object] | None = None,
    template: str | None = None,
    name: str = SLURM_TEMPLATE,
    *,
    nodes: int | None = None,
) -> str:
    """Returns the batch script of a training job, for `sbatch`.

    `nodes` sets `worker_replicas`, or else `tasks_per_node`, unless `overrides` does; None uses as
    many nodes as the tasks need. The nodes of servers count unless they are `heterogeneous`.
    Otherwise as `render_kubernetes`, and ValueError if the tasks do not need exactly `nodes` nodes,
    or for an array of heterogeneous jobs, which Slurm does not have.

    Example:
        >>> from stratagem.cli.manifests.variable_rules import render_slurm
        >>> script = render_slurm({"tasks_per_node": 4}, nodes=2)
        >>> "#SBATCH --ntasks=8" in script
        True
    """
    own = Template(slurm_template() if template is None else template, name)
    values = own.values(overrides or {})
    check_values(values, SLURM)
    if values.get("heterogeneous") and values.get("array"):
        raise ValueError(
            explain(
                f"array={values['array']!r} was given with heterogeneous=True.",
                expected="one of them: Slurm has no arrays of heterogeneous jobs.",
                fix="omit heterogeneous, or submit several jobs.",
            )
        )
    updated = dict(overrides or {})
    if nodes is not None:
        updated = _fit_to_nodes(nodes, updated, values)
    return own.render(updated)


def _fit_to_nodes(
    nodes: int, updated: dict[str, object], values: Mapping[str, int]
) -> dict[str, object]:
    """Returns the overrides, with workers or tasks per node derived from the number of nodes."""
    if nodes < 1:
        raise ValueError(
            explain(
                f"nodes={nodes} is not a number of nodes.",
                expected="at least one node.",
                fix="request 1 or more.",
            )
        )
    workers, on_a_node = values["worker_replicas"], values["tasks_per_node"]
    num_servers = 0 if values.get("heterogeneous") else values.get("ps_replicas", 0)
    others = num_servers + 1 if num_servers else 0  # and the coordinator
    if "worker_replicas" not in updated:
        workers = nodes * on_a_node - others
    elif "tasks_per_node" not in updated:
        on_a_node = math.ceil((workers + others) / nodes)
    check_values({"worker_replicas": workers}, SLURM)
    needed = math.ceil((workers + others) / on_a_node)
    if needed != nodes:
        servers = f" and {others} tasks of servers" if others else ""
        raise ValueError(
            explain(
                f"{workers} workers{servers} at {on_a_node} per node need {needed} nodes, but "
                f"{nodes} were requested.",
                expected="exactly as many nodes as the tasks need.",
                fix="omit the number of nodes, of workers, or of tasks per node.",
            )
        )
    return {**updated, "worker_replicas": workers, "tasks_per_node": on_a_node}
