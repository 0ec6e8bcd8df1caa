"""How much time the environment of a process leaves it after a notice."""

from __future__ import annotations

import time
from collections.abc import Callable

from stratagem import environment
from stratagem.messages import explain
from stratagem.preemption.google_cloud import on_google_cloud

__all__ = ["name_of_environment", "pod_time_left", "slurm_time_left"]


def name_of_environment() -> str | None:
    """Returns what is going to give notice here.

    A scheduler stands before the cloud whose machines it has: it takes care of them.

    Returns:
        `"Kubernetes"`, `"Slurm"` or `"Google Cloud"`; None elsewhere.
    """
    if environment.lookup("KUBERNETES_SERVICE_HOST"):
        return "Kubernetes"
    if environment.lookup("SLURM_JOB_ID"):
        return "Slurm"
    return "Google Cloud" if on_google_cloud() else None


def pod_time_left(grace_s: float | None = None) -> Callable[[], float]:
    """Returns what tells how long a pod has after SIGTERM.

    Args:
        grace_s: the pod's `terminationGracePeriodSeconds`, which a pod cannot find out by itself;
            `STRATAGEM_POD_GRACE_S` without it, and else Kubernetes's own default.

    Returns:
        A function without arguments; its value is in seconds.

    Raises:
        ValueError: it is not above 0.

    Example:
        >>> sg.preemption.pod_time_left(120)()
        120.0
    """
    time_left_s = environment.read("pod_grace_s") if grace_s is None else float(grace_s)
    if not 0 < time_left_s < float("inf"):
        raise ValueError(
            explain(
                f"A pod's grace_s={grace_s!r} is no time.",
                expected="a number of seconds above 0: its terminationGracePeriodSeconds.",
                fix="leave it out where it is not known.",
            )
        )
    return lambda: time_left_s


def slurm_time_left() -> Callable[[], float] | None:
    """Returns what tells how long a Slurm job has until its time limit.

    A job that is preempted or cancelled has less: Slurm does not tell it.

    Returns:
        A function without arguments, its value is in seconds; None where `SLURM_JOB_END_TIME` is
        not set, as with older versions of Slurm.

    Raises:
        ValueError: the variable is no time.
    """
    text = environment.lookup("SLURM_JOB_END_TIME")
    if text is None:
        return None
    if not text.isdecimal():
        raise ValueError(
            explain(
                f"SLURM_JOB_END_TIME={text!r} is no time.",
                expected="whole seconds since 1970, as Slurm sets it.",
                fix="unset it.",
            )
        )
    ends_at_s = int(text)
    return lambda: max(0.0, ends_at_s - time.time())
