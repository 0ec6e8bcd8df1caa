"""What the variables of the packaged templates can be: said before anything is rendered."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from stratagem.messages import explain

__all__ = ["KUBERNETES", "RAY", "SLURM", "Setting", "check_pod_names", "check_settings"]

_MAX_PORT = 65535
_MAX_INT32 = 2**31 - 1
_MAX_LABEL_LETTERS = 63
# A Job that counts the failures of each index takes no more of them.
_MAX_WORKERS = 100_000
_TASK_ROLES = {"worker": "worker_replicas", "ps": "ps_replicas", "evaluator": "has_eval"}


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a variable of a template can be.

    Args:
        is_right: whether a value can be it.
        expected: what it has to be, for the error.
    """

    is_right: Callable[[Any], bool]
    expected: str


def check_settings(values: Mapping[str, object], settings: Mapping[str, Setting]) -> None:
    """Raises for values that would make a manifest that cannot work.

    Args:
        values: values by variable; those that are not in `settings` can be anything.
        settings: what each can be.

    Raises:
        ValueError: another value.

    Example:
        >>> from stratagem.manifests.settings import KUBERNETES, check_settings
        >>> check_settings({"port": 70000}, KUBERNETES)
        Traceback (most recent call last):
        ...
        ValueError: port=70000 cannot be rendered.
        Expected a port from 1 to 65535.
        Fix: set port to such a value.
    """
    for variable, value in values.items():
        setting = settings.get(variable)
        if setting is None or setting.is_right(value):
            continue
        raise ValueError(
            explain(
                f"{variable}={value!r} cannot be rendered.",
                expected=setting.expected,
                fix=f"set {variable} to such a value.",
            )
        )


def check_pod_names(values: Mapping[str, Any]) -> None:
    """Raises where a pod's name would be too long for a label of the DNS.

    Args:
        values: values of the variables of `template.yaml.jinja`, each of them right.

    Raises:
        ValueError: a name that is too long.
    """
    for role, variable in _TASK_ROLES.items():
        count = int(values.get(variable, 0))
        longest = f"{values.get('name', '')}-{role}-{max(count - 1, 0)}"
        if count and len(longest) > _MAX_LABEL_LETTERS:
            raise ValueError(
                explain(
                    f"The last {role} would be called {longest!r}, in {len(longest)} letters.",
                    expected=f"at most {_MAX_LABEL_LETTERS}.",
                    fix="choose a shorter name.",
                )
            )


def _is_text(value: object) -> bool:
    """Whether a process can be given it: no half of a surrogate pair, no zero byte."""
    if not isinstance(value, str) or "\0" in value:
        return False
    return not any("\ud800" <= letter <= "\udfff" for letter in value)


def _matches(pattern: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _count(minimum: int, maximum: int = _MAX_INT32) -> Setting:
    def is_right(value: object) -> bool:
        return type(value) is int and minimum <= value <= maximum

    most = "" if maximum == _MAX_INT32 else f" and at most {maximum}"
    return Setting(is_right, f"a whole number of at least {minimum}{most}.")


def _is_command_line(value: object) -> bool:
    return all(map(_is_text, value)) if isinstance(value, list | tuple) else _is_text(value)


_TRUTH = Setting(lambda value: isinstance(value, bool), "True or False.")
_COMMAND_LINE = Setting(_is_command_line, "text, or a list of words.")
_FILE = Setting(lambda value: _is_text(value) and value != "", "the path of a file.")
_DNS_NAME = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_QUANTITY = r"[0-9]+(\.[0-9]+)?([EPTGMk]i?|Ki)?"

KUBERNETES: Mapping[str, Setting] = {
    "name": Setting(
        _matches(r"[a-z]([-a-z0-9]*[a-z0-9])?"),
        "a DNS label: small letters, digits and dashes, a letter first and no dash last.",
    ),
    "image": Setting(_matches(r"\S+"), "the name of an image."),
    "worker_replicas": _count(1, _MAX_WORKERS),
    "ps_replicas": _count(0, _MAX_WORKERS),
    "num_gpus_per_worker": _count(0),
    "has_eval": _TRUTH,
    "has_tensorboard": _TRUTH,
    "train_dir": Setting(
        lambda value: _is_text(value) and _matches(r"/[^:]*[^:/][^:]*|[a-z0-9]+://\S+")(value),
        "a folder as /path, or a URL such as gs://bucket/folder.",
    ),
    "script": _FILE,
    "cmdline_args": _COMMAND_LINE,
    "credential_secret_json": Setting(_matches(r"[-._a-zA-Z0-9]+"), "the name of a file."),
    "credential_secret_key": Setting(_matches(f"({_DNS_NAME})?"), 'the name of a secret, or "".'),
    "port": dataclasses.replace(_count(1, _MAX_PORT), expected=f"a port from 1 to {_MAX_PORT}."),
    "max_restarts": _count(0),
    "grace_period_s": _count(0),
    "volume_size": Setting(_matches(_QUANTITY), "a size such as 10Gi."),
    "volume_access_mode": Setting(
        _matches("ReadWriteMany|ReadWriteOnce"), "ReadWriteMany or ReadWriteOnce."
    ),
    "storage_class": Setting(_matches(f"({_DNS_NAME})?"), 'the name of a storage class, or "".'),
    "expose_tasks": _TRUTH,
}
"""What the variables of `template.yaml.jinja` can be."""

RAY: Mapping[str, Setting] = {
    **{name: KUBERNETES[name] for name in ("name", "image", "worker_replicas")},
    "ps_replicas": _count(1, _MAX_WORKERS),
    "num_gpus_per_worker": _count(0),
    "cpus_per_task": _count(1),
    "memory_per_task": Setting(_matches(_QUANTITY), "a size such as 4Gi."),
    "ray_version": Setting(_matches(r"[0-9]+(\.[0-9a-z]+)+"), "a version such as 2.60.0."),
    "token_secret": Setting(_matches(_DNS_NAME), "the name of a secret."),
    "port": KUBERNETES["port"],
}
"""What the variables of `ray.yaml.jinja` can be."""

SLURM: Mapping[str, Setting] = {
    "name": Setting(
        _matches(r"[A-Za-z0-9][-._A-Za-z0-9]*"), "letters, digits, dots, dashes and underscores."
    ),
    "worker_replicas": _count(1),
    "tasks_per_node": _count(1),
    "num_gpus_per_worker": _count(0),
    "cpus_per_worker": _count(0),
    "partition": Setting(
        _matches(r"([-._A-Za-z0-9]+(,[-._A-Za-z0-9]+)*)?"), "names with commas between them."
    ),
    "time": Setting(
        _matches(r"(\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}|UNLIMITED|INFINITE)?"),
        "minutes, or as 30:00, 12:00:00, 1-12, 1-12:00 or 1-12:00:00.",
    ),
    "python": _FILE,
    "script": _FILE,
    "cmdline_args": _COMMAND_LINE,
    "grace_period_s": _count(0, _MAX_PORT),
}
"""What the variables of `slurm.sh.jinja` can be."""
